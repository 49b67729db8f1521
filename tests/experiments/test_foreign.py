"""Models of other libraries, to measure beside ours."""

import pytest
import torch

import gss
from experiments import beside
from experiments.foreign import FOREIGN, Unavailable, build_foreign, decode_foreign, prefill_foreign, train_foreign
from experiments.measurements import Measurement
from gss.presets import preset


@pytest.mark.parametrize("name", ["pypi-gss", "hf-gpt2", "hf-llama"])
def test_foreign_models_are_of_our_size_and_run(name: str) -> None:
    config, device = preset("gss-tiny"), torch.device("cpu")
    try:
        found = train_foreign(name, config, 1, 32, device, False, repeats=1)
    except Unavailable as error:
        pytest.skip(f"{name}: {error}")
    own = sum(p.numel() for p in gss.build_model(config).parameters())
    assert 0.75 < found.parameters / own < 1.25
    assert found.tokens_per_second > 0
    assert prefill_foreign(name, config, 1, 32, device, repeats=1) > 0
    assert decode_foreign(name, config, 32, device, repeats=1) > 0


def test_a_library_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(config: object, length: int) -> None:
        raise ModuleNotFoundError("No module named 'fla'", name="fla")

    monkeypatch.setitem(FOREIGN, "fla-gla", absent)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=r"^not installed \(fla\)$"):
        build_foreign("fla-gla", preset("gss-tiny"), 64)
    with pytest.raises(ValueError, match="there is no peer 'rwkv'; choose from: pypi-gss"):
        build_foreign("rwkv", preset("gss-tiny"), 64)


def test_a_speed_table_beside_other_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for what in ("train", "prefill", "decode"):
        arguments = [what, "--model=gss-tiny", "--shape=1x16", "--context=16", "--repeats=1", "--peer=pypi-gss"]
        monkeypatch.setattr("sys.argv", ["beside", *arguments, "--peer=fla-gla", "--peer=transformer-tiny"])
        beside.main()
        text = capsys.readouterr().out
        assert "gss-tiny" in text
        assert "pypi-gss" in text
        assert "fla-gla" in text
        assert "transformer-tiny" in text


def test_a_peer_is_a_ratio_or_a_reason() -> None:
    ours = [Measurement("training gss-tiny, 1×64", 200.0, "tokens/s")]
    (row,) = beside.beside(ours, "transformer-tiny", "training", "1×64", lambda: 100.0)
    assert (row.name, row.peer, row.ratio) == ("training transformer-tiny, 1×64", "gss-tiny", 0.5)

    def full() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    (row,) = beside.beside(ours, "dss-tiny", "training", "1×64", full)
    assert (row.value, row.note) == (None, "out of memory")
