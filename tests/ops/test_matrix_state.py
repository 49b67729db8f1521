"""The matrix state: chunks against the recurrence as it is defined, values and gradients, at odd lengths; its layer."""

import pytest
import torch
import torch.nn.functional as F

from gss.nn.gss2 import GSS2Layer
from gss.ops.matrix_state import left, reference, scan
from tests.comparing import relative_error
from tests.conftest import small_config


def inputs(length: int, batch: int = 2, heads: int = 3, modes: int = 4, values: int = 5) -> list[torch.Tensor]:
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    decay = torch.exp(torch.linspace(-9, 0, modes, dtype=torch.float64)).expand(heads, modes)
    rate = torch.stack([-decay, draw(heads, modes).exp()])
    q, k = draw(batch, length, heads, 2 * modes), draw(batch, length, heads, 2 * modes)
    state = draw(batch, heads, 2 * modes, values)
    return [t.requires_grad_() for t in (q, k, draw(batch, length, heads, values), rate, state)]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 131, 200])
@pytest.mark.parametrize("carried", [False, True])
def test_chunks_are_the_recurrence(length: int, carried: bool) -> None:
    *operands, state = inputs(length)
    given = state if carried else None
    y, after = scan(*operands, given)
    expected_y, expected_after = reference(*operands, given)
    assert relative_error(y, expected_y) < 1e-12
    assert relative_error(after, expected_after) < 1e-12
    weights = torch.randn_like(y), torch.randn_like(after)
    wanted = [*operands, state] if carried else operands
    gradients = torch.autograd.grad((y * weights[0]).sum() + (after * weights[1]).sum(), wanted)
    plain = (expected_y * weights[0]).sum() + (expected_after * weights[1]).sum()
    for gradient, expected in zip(gradients, torch.autograd.grad(plain, wanted), strict=True):
        assert relative_error(gradient, expected) < 1e-11


def test_the_size_of_a_chunk_does_not_matter() -> None:
    *operands, state = inputs(50)
    y, after = scan(*operands, state)
    for chunk in (1, 7, 16, 50):
        other, other_after = scan(*operands, state, chunk)
        assert relative_error(other, y) < 1e-12
        assert relative_error(other_after, after) < 1e-12


def test_what_tokens_leave_behind() -> None:
    q, k, v, rate, _ = inputs(150)
    assert relative_error(left(k, v, rate, chunk=40), reference(q, k, v, rate)[1]) < 1e-12


def test_the_largest_rates_overflow_nothing() -> None:
    """In float32, with modes that decay by e^−1 per token."""
    q, k, v = (torch.randn(1, 200, 1, size).requires_grad_() for size in (8, 8, 5))
    rate = torch.stack([torch.full((1, 4), -1.0), torch.rand(1, 4)]).double().requires_grad_()
    operands = (q, k, v, rate)
    results = []
    for function, kind in ((scan, torch.float32), (reference, torch.float64)):
        y, _ = function(*(t if t is rate else t.to(kind) for t in operands))
        results.append([y, *torch.autograd.grad(y.double().square().sum(), operands)])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-4


def test_float32_and_bfloat16_stay_close_over_many_chunks() -> None:
    *operands, _ = inputs(4096, batch=1)
    expected, _ = scan(*operands)
    for kind, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q, k, v = (t.to(kind) for t in operands[:3])
        y, state = scan(q, k, v, operands[3])
        assert y.dtype == kind
        assert state.dtype == torch.float32
        assert relative_error(y.double(), expected) < tolerance


def test_single_tokens_do_not_drift() -> None:
    """A factor that is rounded turns and shrinks a slow mode the same wrong way each time."""
    q, k, v, *_ = (t.detach() for t in inputs(3000, batch=1, heads=1, modes=8, values=1))
    rate = torch.stack([torch.full((1, 8), -1e-5), torch.logspace(-4, -1, 8).unsqueeze(0)]).double()
    expected, after = scan(q, k + 1, v + 1, rate)  # what is written adds up
    tokens = [t.float().split(1, dim=1) for t in (q, k + 1, v + 1)]
    state, parts = None, []
    for token in zip(*tokens, strict=True):
        y, state = scan(*token, rate, state)
        parts.append(y)
    assert state is not None
    assert state.dtype == torch.float32
    assert relative_error(torch.cat(parts, dim=1).double(), expected) < 3e-6
    assert relative_error(state.double(), after) < 3e-6


@torch.no_grad()
def test_a_layer_is_its_definition() -> None:
    """x + (norm(y) ∗ swish(norm(x)·W_z))·W_o and a feed-forward, with y by the recurrence."""
    layer, length, heads = GSS2Layer(small_config("gss2")).double(), 9, 2
    for parameter in layer.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    space = layer.state_space
    space.log_decay[0, 0] = 1.0  # no mode decays faster than e^−1 per token

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x = torch.randn(2, length, 16, dtype=torch.float64)
    normed = layer.norm(x)
    projected = torch.cat([layer.query(normed), layer.key(normed), layer.value(normed)], dim=-1)
    padded = F.pad(projected, (0, 0, 2, 0))
    mixed = F.silu(sum(padded[:, 2 - k : 2 - k + length] * tap for k, tap in enumerate(layer.short.taps)))
    keys = heads * 2 * space.modes
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1))
    decay = space.log_decay.exp().clamp(max=1)
    energy = (1 - torch.exp(-2 * decay)).sqrt().repeat(1, 2)
    rate = torch.stack([-decay, space.log_frequency.exp()])
    y, state = reference(unit(q) / (2 * space.modes) ** 0.5, unit(k) * energy, v, rate)
    y = unit(y + space.skip[:, None] * v).flatten(2) * layer.output_scale
    expected = layer.feedforward(x + layer.output(y * F.silu(layer.gate(normed))))
    found, after = layer.eval()(x)
    assert relative_error(found, expected) < 1e-12
    assert relative_error(after["modes"], state) < 1e-12
