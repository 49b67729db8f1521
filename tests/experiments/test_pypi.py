"""Parity with an independent implementation: PyPI's gated-state-spaces-pytorch, weights copied in."""

import pytest
import torch

from experiments.layer import bench_layer
from experiments.pypi_gss import paired_parameters, pypi_gss, pypi_part
from gss.config import ModelConfig, StateSpaceConfig
from gss.nn.gss import GSSLayer
from gss.presets import preset
from tests.comparing import relative_error

pytest.importorskip("gated_state_spaces_pytorch", reason="the peer is an optional test dependency")


@pytest.mark.parametrize("imaginary", ["exp", "plain"])
@pytest.mark.parametrize("length", [1, 2, 127, 1000])
def test_outputs_and_gradients(length: int, imaginary: str) -> None:
    space = StateSpaceConfig(
        modes=24,
        imaginary=imaginary,  # type: ignore[arg-type]
        decay_init="log_normal",
        frequency_init="log_normal",
        readout_init="unit",
    )
    config = ModelConfig(width=32, gate_width=96, channels=16, norm_epsilon=1e-5, state_space=space)
    layer = GSSLayer(config)
    torch.nn.init.normal_(layer.norm.bias)  # type: ignore[arg-type]
    torch.nn.init.normal_(layer.output.bias)
    peer = pypi_gss(layer)
    x = torch.randn(3, length, 32, requires_grad=True)
    actual, expected = layer(x)[0], peer(x)
    assert relative_error(actual, expected) < 1e-5

    gradient = torch.randn_like(expected)
    actual.backward(gradient)
    input_gradient, x.grad = x.grad, None
    expected.backward(gradient)
    assert relative_error(input_gradient, x.grad) < 1e-5
    gradients = {id(p): p.grad for p in layer.parameters()}
    halves = {id(peer.dss.C_real): 0, id(peer.dss.C_imag): 1}
    for theirs, ours in paired_parameters(peer, layer):
        own = layer.state_space.readout.grad[..., halves[id(theirs)]] if id(theirs) in halves else gradients[id(ours)]
        assert relative_error(own, theirs.grad) < 1e-5


def test_bench_refuses_to_report_on_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.layer._difference", lambda ours, theirs: float("nan"))
    config, rivals = preset("gss-tiny", norm_epsilon=1e-5), {"pypi-gss": pypi_part}
    with pytest.raises(ValueError, match="differ by nan"):
        bench_layer(config, [(1, 64)], torch.device("cpu"), rivals=rivals, repeats=1)


def test_bench_beside_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.layer.peak_bytes", lambda *arguments: 1 << 20)  # a process each
    sizes = {"width": 16, "gate_width": 32, "channels": 8, "state_space.modes": 8}
    config = preset("gss-tiny", norm_epsilon=1e-5, **sizes)
    rows = bench_layer(config, [(1, 64)], torch.device("cpu"), rivals={"pypi-gss": pypi_part}, repeats=1)
    errors = [row for row in rows if row.unit == "relative error"]
    assert len(errors) == 6
    assert all(row.value is not None and row.value < 1e-5 for row in errors)
    times = {row.name: row for row in rows if row.unit == "ms"}
    for part in ("state space", "layer"):
        assert times[f"{part}, 1×64, pypi-gss"].value
        assert times[f"{part}, 1×64, plain"].peer == "pypi-gss"
        assert times[f"{part}, 1×64, plain"].ratio
