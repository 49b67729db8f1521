"""What `gss bench` measures: checked first, refused when wrong, peers skipped with a word, one shape of rows."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import gss.bench.train
from gss.bench.check import check_training
from gss.bench.decode import bench_decode
from gss.bench.foreign import FOREIGN, Unavailable, build_foreign
from gss.bench.prefill import bench_prefill
from gss.bench.train import Training, bench_train, resolve_peer
from gss.cli import app
from gss.decode import Decoder
from gss.nn.gss import GSSLayer
from gss.presets import preset

CPU = torch.device("cpu")


def test_mfu_is_six_flops_a_parameter_and_token_over_the_matmul_rate() -> None:
    result = Training(400_000.0, 192_000_000, 6 * 192_000_000, None, None)
    assert result.mfu(766e12) == pytest.approx(6 * 192e6 * 400e3 / 766e12)


def test_train_measures_a_model_and_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, config: object, length: int) -> None:
        raise Unavailable("not installed (fla)")

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(gss.bench.train, "build_foreign", absent)
    common = {"model": "gss-tiny", "shapes": [(1, 64)], "device": CPU, "matmul_rate": 1e11, "repeats": 1}
    rows = {row.name: row for row in bench_train(**common, peers=["transformer", "fla-gla"])}  # type: ignore[arg-type]
    speed, mfu = rows["training gss-tiny, 1×64"], rows["MFU of gss-tiny, 1×64"]
    parameters = sum(p.numel() for p in gss.build_model(preset("gss-tiny")).parameters())
    assert speed.value
    assert mfu.value == pytest.approx(6 * parameters * speed.value / 1e11)
    beside = rows["training gss-tiny over transformer-tiny, 1×64"]
    assert beside.peer == "transformer-tiny"
    assert beside.ratio == pytest.approx(speed.value / rows["training transformer-tiny, 1×64"].value)
    skipped = rows["training fla-gla, 1×64"]
    assert skipped.value is None
    assert skipped.note == "not installed (fla)"
    monkeypatch.setattr(gss.bench.train, "_measure_foreign", full)
    assert bench_train(**common, peers=["hf-llama"])[-1].note == "out of memory"  # type: ignore[arg-type]


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
    monkeypatch.setattr(gss.bench.train, "_plain_loss", lambda model, inputs, targets: 1.0)
    with pytest.raises(ValueError, match="the plain float32 one 1"):
        bench_train(model="gss-tiny", shapes=[(1, 64)], device=CPU, matmul_rate=1e11, repeats=1)


def test_decode_refuses_wrong_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: original(self, tokens) + 1e-2)
    with pytest.raises(ValueError, match=r"decoded logits: .* away from float64"):
        bench_decode(model="gss-tiny", device=CPU, contexts=(64,), repeats=1)


def test_decode_measures_contexts_batches_and_peers() -> None:
    rows = bench_decode(
        model="gss-tiny",
        device=CPU,
        batches=(1, 2),
        contexts=(64, 100),
        peers=["transformer"],
        peer_context=64,
        repeats=1,
    )
    names = [row.name for row in rows]
    assert "decode gss-tiny, batch 1, context 100" in names
    assert "decode gss-tiny, batch 2, context 64" in names
    assert "decode gss-tiny, a token after 64 → 100" in names
    assert rows[-1].peer == "transformer-tiny"
    assert rows[-1].ratio == rows[-1].value


def test_prefill_checks_and_measures_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bench_prefill(
        model="gss-tiny", shapes=[(1, 100)], device=CPU, pieces=(40, 100), peers=["transformer"], repeats=1
    )
    assert [row.unit for row in rows].count("tokens/s") == 3
    assert all(row.met for row in rows if row.unit == "relative error")
    compiled = []
    monkeypatch.setattr(GSSLayer, "compile", lambda self: compiled.append(self))
    original = GSSLayer.forward

    def wrong(self: GSSLayer, *inputs: Any) -> Any:
        y, state = original(self, *inputs)
        return y * (1.1 if compiled else 1) ** torch.arange(128), state

    monkeypatch.setattr(GSSLayer, "forward", wrong)
    with pytest.raises(ValueError, match=r"the last logits of the prompt: .* nothing is reported"):
        bench_prefill(model="gss-tiny", shapes=[(1, 100)], device=CPU, compiled=True, repeats=1)


def test_peers_are_found_by_family_preset_or_library() -> None:
    assert resolve_peer("transformer", "gss-tiny") == "transformer-tiny"
    assert resolve_peer("dss", "gss") == "dss"
    assert resolve_peer("transformer", "gss-hybrid-l") == "transformer"
    assert resolve_peer("hf-llama", "gss") == "hf-llama"
    with pytest.raises(ValueError, match="there is no peer 'rwkv'; choose from: pypi-gss"):
        resolve_peer("rwkv", "gss")


@pytest.mark.parametrize("name", ["pypi-gss", "hf-gpt2", "hf-llama"])
def test_foreign_models_are_of_our_size_and_run(name: str) -> None:
    config = preset("gss-tiny")
    try:
        model = build_foreign(name, config, 64)
    except Unavailable as error:
        pytest.skip(f"{name}: {error}")
    own = sum(p.numel() for p in gss.build_model(config).parameters())
    assert 0.75 < model.parameter_count / own < 1.25
    tokens = torch.randint(0, 257, (2, 33))
    assert torch.isfinite(model(tokens[:, :-1], tokens[:, 1:]))
    with torch.no_grad():
        assert model.eval().last_logits(tokens).shape == (2, 257)
        following = model.continuation(tokens)
        assert following().shape == following().shape == (2,)


def test_a_library_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(config: object, length: int) -> None:
        raise ModuleNotFoundError("No module named 'fla'", name="fla")

    monkeypatch.setitem(FOREIGN, "fla-gla", absent)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=r"^not installed \(fla\)$"):
        build_foreign("fla-gla", preset("gss-tiny"), 64)


def test_the_command_prints_one_document() -> None:
    command = [
        "bench",
        "prefill",
        "--device",
        "cpu",
        "--model",
        "gss-tiny",
        "--length",
        "32",
        "--repeats",
        "1",
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"command", "commit", "hardware", "versions", "date", "ceilings", "rows"}
    assert any("matmul" in name for name in found["ceilings"])
    assert [row["name"] for row in found["rows"]] == ["prefill gss-tiny, 1×32", "error of prefill gss-tiny, 1×32"]


def test_the_command_prints_a_table_last() -> None:
    command = ["bench", "prefill", "--device=cpu", "--model=gss-tiny", "--shape=1x16", "--batch=2", "--repeats=1"]
    result = CliRunner().invoke(app, [*command, "--length=8", "--length=24"])
    assert result.exit_code == 0, result.output
    before, _, table = result.stdout.partition("\n\n")
    assert "float32 matmul" in before
    assert [line.split("  ")[0] for line in table.splitlines()[2::2]] == [
        "prefill gss-tiny, 1×16",
        "prefill gss-tiny, 2×8",
        "prefill gss-tiny, 2×24",
    ]
    refused = CliRunner().invoke(app, ["bench", "layer", "--shape", "64"])
    assert "'64' is not a shape" in str(refused.exception)
