"""How state spaces start: each documented option does what it says."""

import math

import pytest
import torch

import gss
from gss.config import StateSpaceConfig
from gss.nn.state_space import DiagonalStateSpace, skew_hippo_frequencies
from gss.ops.state_space import kernel
from tests.conftest import small_config


def taps(config: StateSpaceConfig, length: int, channels: int = 400) -> torch.Tensor:
    space = DiagonalStateSpace(channels, config)
    with torch.no_grad():
        return kernel(*space.discretized(), length)


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
@pytest.mark.parametrize("step_range", [None, (0.03, 0.031)])
def test_equal_energy_gives_a_kernel_of_energy_one(method: str, step_range: tuple[float, float] | None) -> None:
    config = StateSpaceConfig(modes=64, discretization=method, step_range=step_range, decay_range=(0.05, 0.5))
    energy = taps(config, 5000).square().sum(-1)
    # C has two halves of variance 1, and the real part of a mode keeps half of that energy.
    assert energy.mean().item() == pytest.approx(1.0, rel=0.1)


def test_equal_energy_is_the_same_for_every_mode() -> None:
    config = StateSpaceConfig(modes=32)
    space = DiagonalStateSpace(2000, config)
    with torch.no_grad():
        readout, log_a = space.discretized()
        energy = readout.abs().square().mean(0) / (1 - torch.exp(2 * log_a.real.squeeze(0)))
    assert energy.sum().item() == pytest.approx(2.0, rel=0.05)
    assert (energy.max() / energy.min()).item() < 1.3


@pytest.mark.parametrize(("kind", "scale"), [("unit", 1.0), ("inverse_sqrt", 1 / 8), ("inverse", 1 / 64)])
def test_readout_scales(kind: str, scale: float) -> None:
    space = DiagonalStateSpace(200, StateSpaceConfig(modes=64, readout_init=kind))  # type: ignore[arg-type]
    assert space.readout.std().item() == pytest.approx(scale, rel=0.05)


def test_decays() -> None:
    decay = DiagonalStateSpace(1, StateSpaceConfig(modes=4000, decay_range=(1e-3, 1e-1))).log_decay.exp()
    assert decay.min() >= 1e-3 * (1 - 1e-5)
    assert decay.max() <= 1e-1 * (1 + 1e-5)
    assert decay.median().item() == pytest.approx(1e-2, rel=0.2)
    normal = DiagonalStateSpace(1, StateSpaceConfig(modes=4000, decay_init="log_normal")).log_decay
    assert normal.mean().item() == pytest.approx(0, abs=0.1)
    assert normal.std().item() == pytest.approx(1, rel=0.1)
    mixed = StateSpaceConfig(modes=1000, decay_init="mixed", decay_range=(5e-4, 0.1), readout_init="mixed")
    space = DiagonalStateSpace(50, mixed)
    assert space.log_decay[500:].max() <= math.log(0.1) + 1e-5
    assert space.log_decay[:500].max() > math.log(0.2)
    assert space.readout[:, :500].std().item() == pytest.approx(1000**-0.5, rel=0.05)
    with torch.no_grad():
        readout, log_a = space.discretized()
    energy = readout.abs().square().mean(0) / (1 - torch.exp(2 * log_a.real.squeeze(0)))
    assert energy[500:].sum().item() == pytest.approx(2 * 0.3**2 / 2, rel=0.05)  # half of the modes


def test_frequencies() -> None:
    linear = DiagonalStateSpace(1, StateSpaceConfig(modes=8, frequency_init="linear"))
    expected = 2 * math.pi * (torch.arange(8) + 0.5) / 8
    assert torch.allclose(linear.eigenvalues().imag.float(), expected)
    plain = DiagonalStateSpace(1, StateSpaceConfig(modes=8, frequency_init="linear", imaginary="plain"))
    assert torch.allclose(plain.frequency, expected)
    ranged = StateSpaceConfig(modes=1000, frequency_init="log_uniform", frequency_range=(0.01, 0.1))
    frequency = DiagonalStateSpace(1, ranged).eigenvalues().imag
    assert 0.0099 < frequency.min() < frequency.max() < 0.1001
    mixed = StateSpaceConfig(modes=1001, frequency_init="mixed", frequency_range=(0.01, 0.1))
    frequency = DiagonalStateSpace(1, mixed).eigenvalues().imag.flatten()
    assert frequency[:500].median().item() == pytest.approx(1, rel=0.2)
    assert 0.0099 < frequency[500:].min() < frequency[500:].max() < 0.1001
    normal = DiagonalStateSpace(1, StateSpaceConfig(modes=4000, frequency_init="log_normal")).frequency
    assert normal.mean().item() == pytest.approx(0, abs=0.1)
    assert normal.std().item() == pytest.approx(1, rel=0.1)


def test_skew_hippo_is_the_eigenvalues_of_its_matrix() -> None:
    modes = 9
    matrix = torch.zeros(2 * modes, 2 * modes, dtype=torch.float64)
    for i in range(2 * modes):
        for j in range(i):
            matrix[i, j] = math.sqrt((2 * i + 1) * (2 * j + 1))
    eigenvalue = torch.linalg.eigvals((matrix - matrix.T) / 2)
    expected = eigenvalue.imag[eigenvalue.imag > 0].sort().values
    assert torch.allclose(skew_hippo_frequencies(modes), expected)
    assert skew_hippo_frequencies(64)[-1].item() == pytest.approx(5.2e3, rel=0.01)


def test_dss_starts_as_its_authors_have_it() -> None:
    import gss

    config = gss.preset("dss").state_space
    space = DiagonalStateSpace(1000, config)
    assert torch.allclose(space.eigenvalues().real, torch.tensor(-0.5, dtype=torch.float64))
    assert space.log_step is not None
    assert math.log(1e-3) <= space.log_step.min() < space.log_step.max() <= math.log(1e-1)
    assert space.readout.std().item() == pytest.approx(1.0, rel=0.02)
    assert space.skip.std().item() == pytest.approx(1.0, rel=0.1)


def test_a_seed_draws_the_same_model_and_nothing_else() -> None:
    config = small_config("gss")
    before = torch.get_rng_state()
    one, other, another = (gss.build_model(config, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    plain = gss.build_model(config)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))
        assert torch.equal(parameter, plain.get_parameter(name))
    assert not torch.equal(one.embedding.weight, another.embedding.weight)


def test_the_skip_of_a_matrix_state() -> None:
    for changes, expected in (({}, 1.0), ({"matrix_state.skip": 0.0}, 0.0)):
        layer = gss.build_model(small_config("gss2", **changes)).layers[0]
        assert layer.state_space.skip.tolist() == [expected] * 2
        for drawn in (layer.state_space.log_decay, layer.state_space.log_frequency):
            assert not torch.equal(*drawn)  # each head has modes of its own
    with pytest.raises(ValueError, match="skip must be a finite number"):
        small_config("gss2", **{"matrix_state.skip": math.inf})


def test_heads_share_out_the_decays_where_they_are_multiscale() -> None:
    config = small_config("gss2", **{"matrix_state.multiscale": True, "state_space.decay_range": [1e-4, 0.5]})
    decays = gss.build_model(config).layers[0].state_space.log_decay
    assert (decays[:-1].min(1).values >= decays[1:].max(1).values).all()
    assert decays.exp().min() >= 1e-4
    assert decays.exp().max() <= 0.5


def test_layers_may_start_as_the_identity() -> None:
    x = torch.randn(1, 9, 16)
    for zero in (True, False):
        for layer in gss.build_model(small_config("gss2", zero_outputs=zero)).layers:
            assert torch.equal(layer(x)[0], x) == zero
            dense = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
            assert {module.last for module in dense if not module.weight.any()} == ({True} if zero else set())


@torch.no_grad()
def test_what_a_state_space_says_of_itself() -> None:
    """How long each channel's modes last, with its own step, and its kernel without the skip."""
    space = DiagonalStateSpace(3, StateSpaceConfig(modes=4, step_range=(0.01, 0.1)))
    assert space.log_step is not None
    rate = space.log_step.double().exp().unsqueeze(1) * space.log_decay.double().exp()
    assert torch.allclose(space.time_constants(), 1 / rate.flatten())
    difference = space.taps(9) - space.responses(9)
    assert torch.allclose(difference[:, 0], space.skip, atol=1e-6)
    assert not difference[:, 1:].any()
