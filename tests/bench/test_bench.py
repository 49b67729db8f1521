"""What `gss bench` measures: checked first, refused when wrong, peers that fail are said, one shape of rows."""

import json

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import gss.bench.models
from gss.bench.check import check_training
from gss.bench.models import TrainingSpeed, bench_decode, bench_prefill, bench_train, presets_of
from gss.cli import app
from gss.decode import Decoder
from gss.nn.gss import GSSLayer
from gss.presets import preset

CPU = torch.device("cpu")


def test_mfu_is_six_flops_a_parameter_and_token_over_the_matmul_rate() -> None:
    rows = {row.name: row.value for row in TrainingSpeed(400_000.0, 192_000_000).rows("gss", "16×4096", 766e12)}
    assert rows["MFU of gss, 16×4096"] == pytest.approx(6 * 192e6 * 400e3 / 766e12)
    assert rows["training gss, 16×4096"] == 400_000.0


def test_train_measures_a_model_and_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    models = presets_of("gss-tiny", ["transformer", "dss"])
    original = gss.bench.models.measure_training

    def full(name: str, *arguments: object) -> TrainingSpeed:
        if name == "dss-tiny":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return original(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gss.bench.models, "measure_training", full)
    rows = {row.name: row for row in bench_train(models, [(1, 64)], CPU, matmul_rate=1e11, repeats=1)}
    speed, mfu = rows["training gss-tiny, 1×64"], rows["MFU of gss-tiny, 1×64"]
    parameters = sum(p.numel() for p in gss.build_model(preset("gss-tiny")).parameters())
    assert speed.value
    assert mfu.value == pytest.approx(6 * parameters * speed.value / 1e11)
    beside = rows["training transformer-tiny, 1×64"]
    assert beside.peer == "gss-tiny"
    assert beside.value
    assert beside.ratio == pytest.approx(beside.value / speed.value)
    assert rows["training dss-tiny, 1×64"].value is None
    assert rows["training dss-tiny, 1×64"].note == "out of memory"


def test_train_refuses_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gss.bench.check._loss_and_gradients

    def wrong(model: gss.LanguageModel, tokens: Tensor, targets: Tensor, use_fast: bool) -> list[Tensor]:
        loss, *gradients = original(model, tokens, targets, use_fast)
        return [loss, *gradients[:-1], gradients[-1] * (1.5 if use_fast else 1)]

    check_training(preset("gss-tiny"), CPU, 64)
    monkeypatch.setattr(gss.bench.check, "_loss_and_gradients", wrong)
    with pytest.raises(ValueError, match="nothing is reported"):
        check_training(preset("gss-tiny"), CPU, 64)


def test_train_refuses_a_wrong_loss_at_the_measured_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gss.bench.models, "plain_loss", lambda model, inputs, targets: 1.0)
    with pytest.raises(ValueError, match="the plain float32 one 1"):
        bench_train(["gss-tiny"], [(1, 64)], CPU, repeats=1)


def test_decode_refuses_wrong_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: original(self, tokens) + 1e-2)
    with pytest.raises(ValueError, match=r"decoded logits: .* away from float64"):
        bench_decode(["gss-tiny"], [(1, 64)], CPU, repeats=1)


def test_decode_measures_contexts_batches_and_peers() -> None:
    rows = bench_decode(["gss-tiny", "transformer-tiny"], [(1, 64), (1, 100), (2, 64)], CPU, repeats=1)
    named = {row.name: row for row in rows}
    assert {"decode gss-tiny, batch 1, context 100", "decode gss-tiny, batch 2, context 64"} <= named.keys()
    assert "decode gss-tiny, a token after 64 → 100" in named
    peer = named["decode transformer-tiny, batch 1, context 64"]
    assert (peer.peer, peer.unit) == ("gss-tiny", "tokens/s")
    assert peer.ratio


def test_prefill_checks_and_measures_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bench_prefill(["gss-tiny", "transformer-tiny"], [(1, 100)], CPU, pieces=(40, 100), repeats=1)
    assert [row.unit for row in rows].count("tokens/s") == 4
    assert all(row.met for row in rows if row.unit == "relative error")
    compiled = []
    monkeypatch.setattr(GSSLayer, "compile", lambda self: compiled.append(self))
    original = GSSLayer.forward

    def wrong(self: GSSLayer, x: Tensor, *others: object, **options: object) -> object:
        y, state = original(self, x, *others, **options)  # type: ignore[arg-type]
        return y * (1.1 if compiled else 1) ** torch.arange(y.shape[-1]), state

    monkeypatch.setattr(GSSLayer, "forward", wrong)
    with pytest.raises(ValueError, match=r"the last logits of the prompt: .* nothing is reported"):
        bench_prefill(["gss-tiny"], [(1, 100)], CPU, compiled=True, repeats=1)


def test_peers_are_found_by_family_or_preset() -> None:
    assert presets_of("gss-tiny", ["transformer"]) == ["gss-tiny", "transformer-tiny"]
    assert presets_of("gss", ["dss"]) == ["gss", "dss"]
    assert presets_of("gss-hybrid-l", ["transformer"]) == ["gss-hybrid-l", "transformer"]
    with pytest.raises(ValueError, match="there is no peer 'rwkv'"):
        presets_of("gss", ["rwkv"])


def test_the_command_prints_one_document() -> None:
    command = ["bench", "prefill", "--device=cpu", "--model=gss-tiny", "--shape=1x32", "--repeats=1", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"command", "commit", "hardware", "versions", "date", "ceilings", "rows"}
    assert [row["name"] for row in found["rows"]] == ["prefill gss-tiny, 1×32", "error of prefill gss-tiny, 1×32"]


def test_the_command_prints_a_table_last() -> None:
    command = ["bench", "prefill", "--device=cpu", "--model=gss-tiny", "--shape=1x16", "--repeats=1"]
    result = CliRunner().invoke(app, [*command, "--shape=2x8", "--shape=2x24"])
    assert result.exit_code == 0, result.output
    before, _, table = result.stdout.partition("\n\n")
    assert "torch" in before
    assert [line.split("  ")[0] for line in table.splitlines()[2::2]] == [
        "prefill gss-tiny, 1×16",
        "prefill gss-tiny, 2×8",
        "prefill gss-tiny, 2×24",
    ]
    for words, reason in {
        ("prefill", "--shape=64"): "'64' is not a shape",
        ("data",): "nothing to measure named 'data'; choose from: train, prefill, decode",
        ("train", "--piece=8"): "gss bench train has no option --piece",
    }.items():
        assert reason in str(CliRunner().invoke(app, ["bench", *words]).exception)
