"""What `gss bench` measures: checked first, refused when wrong, one shape of rows."""

import json

import pytest
import torch
from torch import Tensor

import gss.bench.models
from gss.bench.check import check_training
from gss.bench.models import bench_decode, bench_prefill, bench_train
from gss.decode import Decoder
from gss.nn.gss import GSSLayer
from gss.presets import preset
from gss.training.step import Stepper
from tests.making import call

CPU = torch.device("cpu")
PREFILL = ("bench", "prefill", "--device=cpu", "--model=gss-tiny", "--repeats=1")


def test_train_measures_a_model() -> None:
    rows = {row.name: row for row in bench_train("gss-tiny", [(1, 64)], CPU, matmul_rate=1e11, repeats=1)}
    speed, mfu = rows["training gss-tiny, 1×64"], rows["MFU of gss-tiny, 1×64"]
    parameters = sum(p.numel() for p in gss.build_model(preset("gss-tiny")).parameters())
    assert speed.value > 0
    assert mfu.value == pytest.approx(6 * parameters * speed.value / 1e11)
    for what in ("loss", "gradients"):
        error = rows[f"error of the {what}"]
        assert error.limit is not None
        assert error.value <= error.limit


def test_train_refuses_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gss.bench.check._loss_and_gradients

    def wrong(model: gss.LanguageModel, tokens: Tensor, targets: Tensor, use_fast: bool) -> list[Tensor]:
        loss, *gradients = original(model, tokens, targets, use_fast)
        return [loss, *gradients[:-1], gradients[-1] * (1.5 if use_fast else 1)]

    check_training(preset("gss-tiny"), CPU, 64)
    monkeypatch.setattr(gss.bench.check, "_loss_and_gradients", wrong)
    with pytest.raises(ValueError, match="nothing is reported"):
        check_training(preset("gss-tiny"), CPU, 64)


def test_dropout_does_not_hide_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for figure in check_training(preset("slide-tiny", dropout=0.5), CPU, 64):
        assert figure.limit is not None
        assert figure.limit < 1e-3
    small = preset("slide-tiny", dropout=0.5)
    monkeypatch.setattr(gss.bench.models, "preset", lambda name, **changes: small)
    steps = []
    original = Stepper.step
    monkeypatch.setattr(Stepper, "step", lambda self, *at: steps.append(self.model.training) or original(self, *at))
    bench_train("slide-tiny", [(1, 64)], CPU, repeats=1)
    assert steps == [False, True, True, True]  # compared without, timed with it


def test_train_refuses_a_wrong_loss_at_the_measured_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gss.bench.models, "plain_loss", lambda model, inputs, targets: 1.0)
    with pytest.raises(ValueError, match=r"but 1.*in plain float32"):
        bench_train("gss-tiny", [(1, 64)], CPU, repeats=1)


def test_decode_refuses_wrong_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: original(self, tokens) + 1e-2)
    with pytest.raises(ValueError, match=r"decoded logits: off by .* from float64"):
        bench_decode("gss-tiny", [(1, 64)], CPU, repeats=1)


def test_decode_measures_contexts_and_batches() -> None:
    named = {row.name: row for row in bench_decode("gss-tiny", [(1, 64), (1, 100), (2, 64)], CPU, repeats=1)}
    assert {"decode gss-tiny, batch 1, context 100", "decode gss-tiny, batch 2, context 64"} <= named.keys()
    assert "decode gss-tiny, a token after 64 → 100" in named
    assert named["decode gss-tiny, batch 1, context 64"].unit == "tokens/s"
    assert named["decode gss-tiny, batch 1, context 64"].value > 0


def test_prefill_checks_and_measures_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gss-tiny", "transformer-tiny"):
        for piece, where in ((40, "1×100 in pieces of 40"), (100, "1×100")):
            speed, error = bench_prefill(name, [(1, 100)], CPU, piece=piece, repeats=1)
            assert (speed.name, speed.unit) == (f"prefill {name}, {where}", "tokens/s")
            assert error.limit is not None
            assert error.value <= error.limit
    compiled = []
    monkeypatch.setattr(GSSLayer, "compile", lambda self: compiled.append(self))
    original = GSSLayer.forward

    def wrong(self: GSSLayer, x: Tensor, *others: object, **options: object) -> object:
        y, state = original(self, x, *others, **options)  # type: ignore[arg-type]
        return y * (1.1 if compiled else 1) ** torch.arange(y.shape[-1]), state

    monkeypatch.setattr(GSSLayer, "forward", wrong)
    with pytest.raises(ValueError, match=r"the last logits of the prompt: .* nothing is reported"):
        bench_prefill("gss-tiny", [(1, 100)], CPU, compiled=True, repeats=1)


def test_the_command_prints_one_document() -> None:
    found = json.loads(call(*PREFILL, "--shape=1x32", "--json"))
    assert set(found) == {"command", "commit", "hardware", "versions", "date", "ceilings", "rows"}
    assert [row["name"] for row in found["rows"]] == ["prefill gss-tiny, 1×32", "error of prefill gss-tiny, 1×32"]


def test_the_command_prints_a_table_last() -> None:
    before, _, table = call(*PREFILL, "--shape=1x16", "--shape=2x8", "--shape=2x24").partition("\n\n")
    assert "torch" in before
    names = [line.split("  ")[0] for line in table.splitlines()[::2]]
    assert names == [f"prefill gss-tiny, {shape}" for shape in ("1×16", "2×8", "2×24")]
    for words, reason in {
        ("prefill", "--shape=64"): "'64' is not a shape",
        ("data",): "there is no benchmark 'data'; choose from: train, prefill, decode",
        ("train", "--piece=8"): "gss bench train has no option --piece",
    }.items():
        with pytest.raises(ValueError, match=reason):
            call("bench", *words)
