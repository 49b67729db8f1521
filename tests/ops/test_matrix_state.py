"""The matrix state: chunks against the recurrence as it is defined, values and gradients, at odd lengths; its layer."""

import pytest
import torch
import torch.nn.functional as F

from gss.nn.gss2 import GSS2Layer
from gss.ops.matrix_state import MOST_FORGOTTEN, left, reference, scan
from tests.comparing import relative_error
from tests.conftest import GATED, small_config


def inputs(length: int, batch: int = 2, heads: int = 3, modes: int = 4, values: int = 5) -> list[torch.Tensor]:
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    decay = torch.exp(torch.linspace(-9, 0, modes, dtype=torch.float64)).expand(heads, modes)
    rate = torch.stack([-decay, draw(heads, modes).exp()])
    q, k = draw(batch, length, heads, 2 * modes), draw(batch, length, heads, 2 * modes)
    state = draw(batch, heads, 2 * modes, values)
    return [t.requires_grad_() for t in (q, k, draw(batch, length, heads, values), rate, state)]


def gates(like: torch.Tensor) -> torch.Tensor:
    """Some log g for queries [B, L, h, 2N], of which a token in five forgets as much as one can."""
    drawn = torch.rand(like.shape[:3], dtype=like.dtype)
    return (-MOST_FORGOTTEN * (1.25 * drawn).clamp(max=1) ** 3).requires_grad_()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 131, 200])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_chunks_are_the_recurrence(length: int, carried: bool, gated: bool) -> None:
    *operands, state = inputs(length)
    given, log_gates = state if carried else None, gates(operands[0]) if gated else None
    y, after = scan(*operands, given, log_gates=log_gates)
    expected_y, expected_after = reference(*operands, given, log_gates)
    assert relative_error(y, expected_y) < 1e-12
    assert relative_error(after, expected_after) < 1e-12
    weights = torch.randn_like(y), torch.randn_like(after)
    wanted = [*operands, *[state] * carried, *([] if log_gates is None else [log_gates])]
    gradients = torch.autograd.grad((y * weights[0]).sum() + (after * weights[1]).sum(), wanted)
    plain = (expected_y * weights[0]).sum() + (expected_after * weights[1]).sum()
    for gradient, expected in zip(gradients, torch.autograd.grad(plain, wanted), strict=True):
        assert relative_error(gradient, expected) < 1e-11


def test_the_size_of_a_chunk_does_not_matter() -> None:
    *operands, state = inputs(50)
    log_gates = gates(operands[0])
    y, after = scan(*operands, state, log_gates=log_gates)
    for chunk in (1, 7, 16, 50):
        other, other_after = scan(*operands, state, chunk, log_gates=log_gates)
        assert relative_error(other, y) < 1e-12
        assert relative_error(other_after, after) < 1e-12


def test_what_tokens_leave_behind() -> None:
    q, k, v, rate, _ = inputs(150)
    log_gates = gates(q)
    for given in (None, log_gates):
        assert relative_error(left(k, v, rate, given, chunk=40), reference(q, k, v, rate, None, given)[1]) < 1e-12


def test_the_largest_gates_and_rates_overflow_nothing() -> None:
    """In float32, with every token forgetting as much as it can and modes that decay by e^−1 per token."""
    q, k, v = (torch.randn(1, 200, 1, size).requires_grad_() for size in (8, 8, 5))
    rate = torch.stack([torch.full((1, 4), -1.0), torch.rand(1, 4)]).double().requires_grad_()
    log_gates = torch.full((1, 200, 1), -MOST_FORGOTTEN).requires_grad_()
    operands = (q, k, v, rate, log_gates)
    results = []
    for function, kind in ((scan, torch.float32), (reference, torch.float64)):
        *given, gated = (t if t is rate else t.to(kind) for t in operands)
        y, _ = function(*given, log_gates=gated)
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


def test_gates_are_as_precise_after_many_tokens() -> None:
    """The sum of log g reaches −1,000 here, where float32 would round a ratio of gates to 6e-5."""
    *operands, _ = (t.detach() for t in inputs(8192, batch=1))
    log_gates = 0.5 * gates(operands[0]).detach() - 0.05
    expected, _ = scan(*operands, log_gates=log_gates)
    found, _ = scan(*(t.float() for t in operands[:3]), operands[3], log_gates=log_gates.float())
    assert relative_error(found[:, -512:].double(), expected[:, -512:]) < 2e-6


def test_gradients_of_gates_are_as_precise_in_a_long_sequence() -> None:
    """As a sum over all that follows, each would have the rounding of thousands of tokens in it."""
    *operands, _ = (t.detach() for t in inputs(4096, batch=1, modes=16, values=16))
    log_gates, weights = gates(operands[0]).detach(), torch.randn(1, 4096, 3, 16, dtype=torch.float64)
    found = []
    for kind in (torch.bfloat16, torch.float64):
        leaf = log_gates.clone().requires_grad_()
        y, _ = scan(*(t.bfloat16().to(kind) for t in operands[:3]), operands[3], log_gates=leaf)
        found += torch.autograd.grad(y, leaf, weights.bfloat16().to(kind))
    assert relative_error(*found) < 3e-2
    assert relative_error(*(gradient.mean(1) for gradient in found)) < 3e-1  # what a bias learns from


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
@pytest.mark.parametrize("family", ["gss2", GATED])
def test_a_layer_is_its_definition(family: str) -> None:
    """x + (norm(y) ∗ swish(norm(x)·W_z))·W_o and a feed-forward, with y by the recurrence."""
    layer, length, heads = GSS2Layer(small_config(family)).double(), 9, 2
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
    log_gates = None
    if layer.forget is not None:
        assert space.forget_bias is not None
        log_gates = -0.35 * torch.sigmoid(layer.forget(normed) + space.forget_bias)
    y, state = reference(unit(q) / (2 * space.modes) ** 0.5, unit(k) * energy, v, rate, log_gates=log_gates)
    y = unit(y + space.skip[:, None] * v).flatten(2) * layer.output_scale
    expected = layer.feedforward(x + layer.output(y * F.silu(layer.gate(normed))))
    found, after = layer.eval()(x)
    assert relative_error(found, expected) < 1e-12
    assert relative_error(after["modes"], state) < 1e-12
