"""The fused short convolution against plain PyTorch in float64, outputs and every gradient.

On a CUDA device it runs there (`pytest -m gpu`); elsewhere in Triton's interpreter, at small sizes.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gss
from gss.choices import ACTIVATIONS
from gss.nn.gss2 import GSS2Layer
from gss.ops import fast
from tests.comparing import relative_error

pytest.importorskip("triton")
from gss.ops.gpu import short

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if ON_GPU else []

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def plainly(
    x: Tensor, taps: Tensor, scale: Tensor, recent: Tensor | None, heads: int, feature_map: str
) -> list[Tensor]:
    known = F.pad(x, (0, 0, 3, 0)) if recent is None else torch.cat([recent, x], 1)
    u = sum(known[:, 3 - k : 3 - k + x.shape[1]] * tap for k, tap in enumerate(taps))
    width = scale.shape[1]
    parts = u.split([heads * width, heads * width, x.shape[2] - 2 * heads * width], dim=-1)
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in parts)
    q, k = (ACTIVATIONS[feature_map](t) for t in (q, k))
    normed = (F.rms_norm(t, (width,), eps=1e-6) * s for t, s in zip((q, k), scale.chunk(2), strict=True))
    return [*normed, F.silu(v)]


def draw(length: int, carried: bool, heads: int = 2, width: int = 10, values: int = 19) -> list[Tensor | None]:
    channels = heads * (2 * width + values)
    batch = 1 if length > 32 else 2
    x, recent = torch.randn(batch, length, channels), torch.randn(batch, 3, channels)
    return [x, torch.randn(4, channels), torch.randn(2 * heads, width), recent if carried else None]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens a program: the interpreter is slow."""
    monkeypatch.setattr(short, "STRETCH", 8)
    for options in (short.FORWARD, short.BACKWARD):
        monkeypatch.setitem(options, "ROWS", 4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("length", "carried", "feature_map"), [(2, True, "swish"), (16, False, "relu2"), (45, True, "swish")]
)
def test_it_is_the_plain_one(length: int, carried: bool, feature_map: str, kind: torch.dtype) -> None:
    """Within a stretch, at the end of one, and with stretches beside and after each other of which one is short."""
    x, *rest = draw(length, carried)
    given = [x.to(kind), *rest]
    exact = [None if t is None else t.double().requires_grad_() for t in given]
    found = [None if t is None else t.to(DEVICE).detach().requires_grad_() for t in given]
    expected, y = plainly(*exact, 2, feature_map), short.short_mix(*found, 2, feature_map)
    weights = [torch.randn_like(t).to(kind) for t in expected]
    torch.autograd.backward(expected, [w.double() for w in weights])
    torch.autograd.backward(y, [w.to(DEVICE) for w in weights])
    pairs = [*zip(y, expected, strict=True)]
    pairs += [(a.grad, b.grad) for a, b in zip(found, exact, strict=True) if a is not None]
    errors = [relative_error(a.detach().cpu(), b.detach()) for a, b in pairs]
    assert y[0].dtype == kind
    assert max(errors) < TOLERANCE[kind], errors


def test_what_a_compiler_is_told() -> None:
    """Shapes, kinds and gradients without data, against what the operation does."""
    given = [t.to(DEVICE).requires_grad_() for t in draw(3, True, 1, 3, 2)]
    torch.library.opcheck(short.short_mix.op, (*given, 1, "relu2"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "bias", "feature_map"), [(2, False, "swish"), (40, False, "swish"), (40, True, "relu2")]
)
def test_a_layer_takes_it(length: int, bias: bool, feature_map: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, after an earlier piece, with what plain PyTorch gives; only with as many taps as the kernel has, and
    a feature map that it knows.
    """
    sizes = {"heads": 2, "value_width": 16, "feature_map": feature_map}
    config = gss.preset("gss2-tiny", state_space={"modes": 8}, matrix_state=sizes, bias=bias)
    layer = GSS2Layer(config).to(DEVICE).bfloat16()
    torch.nn.init.normal_(layer.output.weight)
    for each in (layer.query, layer.key, layer.value) if bias else ():
        torch.nn.init.normal_(each.bias)
    x = torch.randn(2, 5 + length, config.width, device=DEVICE).bfloat16()
    with fast.disabled():
        _, state = layer(x[:, :5])
        expected, after = layer(x[:, 5:], state)
    called = []
    original = short.short_mix
    monkeypatch.setattr(fast, "half", lambda tensor: tensor.dtype if tensor.dtype == torch.bfloat16 else None)
    monkeypatch.setattr(short, "short_mix", lambda *given: called.append(given) or original(*given))
    _, state = layer(x[:, :5])
    y, found = layer(x[:, 5:], state)
    assert len(called) == 2
    assert relative_error(y, expected) < 2e-2
    assert {name: tuple(t.shape) for name, t in found.items()} == {name: tuple(t.shape) for name, t in after.items()}
    for name in after:
        assert relative_error(found[name], after[name]) < 2e-2
    for name, other in (("TAPS", 5), ("FEATURE_MAPS", ())):  # as if the layer had another number, or map
        with monkeypatch.context() as changed:
            changed.setattr(short, name, other)
            layer(x[:, 5:], state)
    assert len(called) == 2
