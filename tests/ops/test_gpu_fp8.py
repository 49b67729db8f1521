"""Products in 8 bits: casts bit by bit, the gate's outputs and gradients against float64 and against rounding alone.

On a CUDA device with fp8 they run there (`pytest -m gpu`); elsewhere in Triton's interpreter, at small sizes.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

import gss
from gss.choices import ACTIVATIONS
from gss.ops import fast
from tests.comparing import relative_error
from tests.interpreted_fp8 import correct_casts, products_in_fp8

pytest.importorskip("triton")
from gss.ops.gpu import fp8, fp8_gate, fp8_head, gate
from tests.ops.test_gpu_kernels import draw, gradients

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [
    *([pytest.mark.gpu] if ON_GPU else []),
    pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no fp8"),
]
EIGHTH = 0.2
"""Of float64. Rounding to e4m3 has a relative error of 0.026 and to e5m2 one of 0.053; a gradient is two products deep,
of which each operand is rounded and the first one meets an activation's slope at a rounded place."""
SAME = 0.01
"""Of float64 with the same roundings, a few of which fall to the other side because sums are in another order."""


@pytest.fixture(autouse=True)
def _correct_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        correct_casts(monkeypatch)


def rounded(x: Tensor, most: Tensor, kind: torch.dtype = fp8.E4M3) -> Tensor:
    """x after a cast to 8 bits, in float64; with a kernel's own division, so that ties fall to the same side."""
    unit = most.float().clamp(min=1e-30) / fp8.MOST[kind]
    return (x.float() * (1 / unit)).clamp(-fp8.MOST[kind], fp8.MOST[kind]).to(kind).double() * unit.double()


@pytest.mark.parametrize("kind", [fp8.E4M3, fp8.E5M2])
@pytest.mark.parametrize(("height", "width"), [(1, 16), (70, 48), (128, 64), (33, 200)])
def test_casts(height: int, width: int, kind: torch.dtype) -> None:
    x = draw(height, width, kind=torch.bfloat16) * torch.logspace(-6, 2, width, device=DEVICE).bfloat16()
    x[0, 0] = 0.0
    found = fp8.cast(x, x.abs().amax(), kind)
    assert found.unit.item() == pytest.approx(x.abs().amax().item() / fp8.MOST[kind], rel=1e-6)
    assert torch.equal(found.rows.view(torch.uint8), (x.float() * (1 / found.unit)).to(kind).view(torch.uint8))
    assert torch.equal(found.columns.float()[:, :height], found.rows.float().t())
    assert found.columns.shape[1] % 16 == 0
    assert not found.columns.float()[:, height:].any()


def test_parameters_are_rounded_to_16_bits_first() -> None:
    x = draw(70, 48)
    found, expected = fp8.narrowed(x), fp8.cast(x.bfloat16(), x.bfloat16().abs().amax())
    assert x.dtype == torch.float32
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.float(), b.float())
    assert torch.equal(found.columns.float()[:, :70], found.rows.float().t())


def test_casts_saturate_and_keep_what_is_not_a_number() -> None:
    x = torch.tensor([[1.0, -5.0, 1e9, torch.inf, torch.nan, 0.0, 2e-3, -3e35]], device=DEVICE).bfloat16()
    found = (lambda cast: cast.rows.float() * cast.unit)(fp8.cast(x, torch.tensor(1.0, device=DEVICE)))
    assert found[0, :4].tolist() == [1.0, -1.0, 1.0, 1.0]
    assert found[0, 4].isnan()
    assert found[0, 7] == -1.0
    with np.errstate(invalid="ignore"):
        for most in (torch.nan, torch.inf):  # a sum that has gone wrong stays visible
            assert not fp8.cast(x, torch.tensor(most, device=DEVICE)).unit.isfinite()
    zeros = fp8.cast(torch.zeros(3, 16, device=DEVICE).bfloat16(), torch.tensor(0.0, device=DEVICE))
    assert not zeros.rows.float().any()


class Drawn:
    """The gate's inputs, of sizes with remainders everywhere; biases or none."""

    def __init__(self, tokens: int, biased: bool, width: int = 48, wide: int = 144, narrow: int = 16) -> None:
        half = torch.bfloat16
        self.x = draw(tokens, width, kind=half)
        self.y = draw(tokens, narrow, kind=half, scale=2.0)
        # Parameters in 32 bits, which a cast rounds to 16 first; the references round once.
        self.gate = draw(wide, width, kind=half, scale=width**-0.5).float()
        self.context = draw(wide, narrow, kind=half, scale=narrow**-0.5).float()
        self.output = draw(width, wide, kind=half, scale=wide**-0.5).float()
        self.biases = [draw(wide, scale=0.3), draw(wide, scale=0.3)] if biased else [None, None]
        self.grad = draw(tokens, width, kind=half, scale=1e-5) * torch.rand(tokens, 1, device=DEVICE).bfloat16() ** 8

    def run(self, function: Callable[..., Tensor], kind: torch.dtype | None = None) -> list[Tensor]:
        """The output, and the gradients with respect to x, W₂, y, W₃, W₄ and the biases."""
        given = [self.x, self.gate, self.y, self.context, self.output, *self.biases]
        inputs = [t if kind is None else t.to(kind) for t in given if t is not None]

        def called(x: Tensor, w2: Tensor, y: Tensor, w3: Tensor, w4: Tensor, *biases: Tensor) -> Tensor:
            b2, b3 = biases or (None, None)
            return function(x, w2, b2, y, w3, b3, w4)

        return gradients(called, inputs, self.grad)


def exactly(activation: str) -> Callable[..., Tensor]:
    def function(
        x: Tensor, w2: Tensor, b2: Tensor | None, y: Tensor, w3: Tensor, b3: Tensor | None, w4: Tensor
    ) -> Tensor:
        g, c = x @ w2.T, y @ w3.T
        g, c = (g if b2 is None else g + b2), (c if b3 is None else c + b3)
        return (ACTIVATIONS[activation](g) * c) @ w4.T

    return function


def on_gpu(activation: str) -> Callable[..., Tensor]:
    return lambda *inputs: fp8_gate.gated_output(*inputs, activation)


def steepest(activation: str, value: Tensor) -> float:
    """The operation's bound of |φ'|, from φ."""
    return {"relu": 1.0, "relu2": 2 * float(value.detach().amax()) ** 0.5}.get(activation, 1.13)


def rounding(activation: str, drawn: Drawn) -> list[Tensor]:
    """What `Drawn.run` gives, in float64 with each rounding that the operation makes, and no other."""
    half = lambda t: t.bfloat16().double()  # noqa: E731
    own = lambda t: rounded(t, t.abs().amax())  # noqa: E731
    x, y, w2, w3, w4 = map(own, (drawn.x, drawn.y, drawn.gate, drawn.context, drawn.output))
    b2, b3 = (0.0 if b is None else b.double() for b in drawn.biases)
    g, c = (half(x @ w2.T) + b2).requires_grad_(), half(y @ w3.T) + b3
    value = ACTIVATIONS[activation](g)
    (slope,) = torch.autograd.grad(value.sum(), g)
    value = value.detach()
    p = value * c
    out = rounded(p, p.abs().amax(1, keepdim=True)) @ w4.T
    longest = drawn.grad.double().norm(dim=1).amax()
    by_out = rounded(drawn.grad, longest, fp8.E5M2)
    by_p = half(by_out @ w4)
    bound = 1.25 * longest * drawn.output.abs().amax().double() * drawn.x.shape[1] ** 0.5
    by_g, by_c = slope * c * by_p, value * by_p
    by_biases = [by_g.sum(0), by_c.sum(0)] if drawn.biases[0] is not None else []
    by_g = rounded(by_g, bound * steepest(activation, value) * c.abs().amax(), fp8.E5M2)
    by_c = rounded(by_c, bound * value.abs().amax(), fp8.E5M2)
    return [out, by_g @ w2, by_g.T @ x, by_c @ w3, by_c.T @ y, by_out.T @ own(p), *by_biases]


@pytest.mark.parametrize("activation", gate.ACTIVATIONS)
def test_no_slope_is_steeper_than_its_bound(activation: str) -> None:
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64, requires_grad=True)
    value = ACTIVATIONS[activation](x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert slope.abs().amax() <= steepest(activation, value)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", gate.ACTIVATIONS)
def test_gate(activation: str, biased: bool) -> None:
    drawn = Drawn(150, biased)
    found, exact = drawn.run(on_gpu(activation)), drawn.run(exactly(activation), torch.float64)
    for i, (a, b, c) in enumerate(zip(found, rounding(activation, drawn), exact, strict=True)):
        assert relative_error(a.cpu(), c.cpu()) < EIGHTH, i
        # All but one row. Sums in float32 that differ by 2⁻¹⁴ move a row over a tie of e5m2, or a sum near zero to its
        # other side, often enough for the whole to differ by 0.016 once in 30 draws, and without that row by 0.002.
        off = (a.double() - b).reshape(len(a), -1).norm(dim=1)
        a, b = a[off < off.max()], b[off < off.max()]
        assert relative_error(a.cpu(), b.cpu()) < SAME, i


@pytest.mark.parametrize("biased", [False, True])
def test_a_feed_forward_without_a_gate(biased: bool) -> None:
    """c is 1: as a gate whose W₃ is nothing and whose b₃ is 1."""
    drawn = Drawn(70, biased=True)
    drawn.biases = [drawn.biases[0] if biased else torch.zeros(144, device=DEVICE), torch.ones(144, device=DEVICE)]
    drawn.context.zero_()
    inputs = [drawn.x, drawn.gate, drawn.output, *drawn.biases[:biased]]

    def alone(x: Tensor, w2: Tensor, w4: Tensor, b2: Tensor | None = None) -> Tensor:
        return fp8_gate.gated_output(x, w2, b2, None, None, None, w4, "gelu")

    found = gradients(alone, inputs, drawn.grad)
    expected = rounding("gelu", drawn)
    for a, i in zip(found, (0, 1, 2, 5, 6), strict=False):
        assert relative_error(a.cpu(), expected[i].cpu()) < SAME, i


@pytest.mark.parametrize(("tokens", "wide"), [(1, 48), (16, 144), (65, 64), (512, 64), (530, 128)])
def test_gate_of_any_length(tokens: int, wide: int) -> None:
    drawn = Drawn(tokens, True, wide=wide)
    for i, (a, b) in enumerate(zip(drawn.run(on_gpu("gelu")), rounding("gelu", drawn), strict=True)):
        assert relative_error(a.cpu(), b.cpu()) < SAME, i


def test_no_gradient_beside_large_ones_is_lost() -> None:
    """Tokens whose gradient is 2⁻¹⁰ of the largest: units come from bounds, which e5m2 has room for."""
    drawn = Drawn(64, biased=False)
    drawn.grad = draw(64, drawn.x.shape[1], kind=torch.bfloat16, scale=1e-6)
    drawn.grad[0] *= 2**10
    found, exact = drawn.run(on_gpu("gelu")), drawn.run(exactly("gelu"), torch.float64)
    for i in (1, 3):  # with respect to x and y
        assert relative_error(found[i][1:].cpu(), exact[i][1:].cpu()) < EIGHTH


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 16), (5, 1008), (70, 160)])
def test_head(rows: int, vocabulary: int) -> None:
    """Losses are not rounded to 8 bits; gradients are, against float64 with the same roundings and without any."""
    width, scale = 48, 0.25
    hidden, weight = (
        draw(rows, width, kind=torch.bfloat16, scale=4.0),
        draw(vocabulary, width, kind=torch.bfloat16).float(),
    )
    targets = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    targets[rows // 2 + 1 :: 3] = -100
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logits = scale * exact[0] @ exact[1].T
    logits.retain_grad()
    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    loss.backward()
    given = logits.detach().float()
    found, gradients = fp8_head.loss_and_gradients(given, targets, -100, hidden, fp8.narrowed(weight), scale, True)
    assert abs(found.item() / loss.item() - 1) < 1e-5
    assert logits.grad is not None
    one = torch.ones((), device=DEVICE)
    by_logits = rounded(logits.grad, one, fp8.E5M2)
    own = [by_logits @ rounded(weight, weight.abs().amax()), by_logits.T @ rounded(hidden, hidden.abs().amax())]
    for by_us, rounded_alike, by_autograd in zip(gradients, own, (t.grad for t in exact), strict=True):
        assert relative_error(by_us.cpu(), scale * rounded_alike.cpu()) < SAME
        assert by_autograd is not None
        assert relative_error(by_us.cpu(), by_autograd.cpu()) < EIGHTH
    (alone,) = fp8_head.loss_and_gradients(given, targets, -100, hidden, fp8.narrowed(weight), scale, False)[1]
    assert torch.equal(alone, gradients[0])


@pytest.mark.parametrize("name", ["gss-tiny", "transformer-tiny", "llama-tiny"])
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GSS layers, and feed-forward layers with and without a gate, by autocast and in 8 bits, against float64."""
    if not ON_GPU:
        products_in_fp8(monkeypatch)
    sizes = {"width": 32, "gate_width": 48, "feedforward_width": 48, "channels": 16, "state_space.modes": 6, "depth": 1}
    layer = gss.build_model(gss.preset(name, **sizes, **{"attention.heads": 2}), seed=0).to(DEVICE).layers[0]
    part = layer if name.startswith("gss") else layer.feedforward
    exact = copy.deepcopy(part).double()
    x = draw(2, 40, 32)
    errors = []
    for inside in (fast.in_fp8(), nullcontext()):
        with torch.autocast(DEVICE.type, torch.bfloat16), inside:
            found = (part(x)[0] if part is layer else part(x)) - x
        (parameter_gradient,) = torch.autograd.grad(found.sum(), part.norm.weight)
        expected = (exact(x.double())[0] if part is layer else exact(x.double())) - x
        (exact_gradient,) = torch.autograd.grad(expected.sum(), exact.norm.weight)
        errors.append(relative_error(found.cpu(), expected.cpu()))
        assert relative_error(parameter_gradient.cpu(), exact_gradient.cpu()) < EIGHTH
    assert 2 * errors[1] < errors[0] < EIGHTH
