"""The kernels of the matrix state against the recurrence in float64, outputs and every gradient.

On a CUDA device they run there (`pytest -m gpu`); elsewhere in Triton's interpreter, at small sizes.
"""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import gss
from gss.nn.gss2 import KeyedStateSpace
from gss.ops import fast
from gss.ops.matrix_state import reference, scan
from tests.comparing import relative_error

pytest.importorskip("triton")
from gss.ops.gpu import matrix_state as kernels

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if ON_GPU else []

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
NAMES = ("queries", "keys", "values", "rate", "skip", "state")


def draw(length: int, batch: int = 1, heads: int = 2, modes: int = 5, width: int = 6) -> dict[str, Tensor]:
    """Modes of 1 to 8,000 tokens' mean life that turn fast or slowly; keys of which each adds the same energy."""
    decay = torch.logspace(0, -3.9, modes, dtype=torch.float64).expand(heads, modes)
    rate = torch.stack([-decay, torch.rand(heads, modes, dtype=torch.float64) * 3])
    energy = torch.sqrt(-torch.expm1(2 * rate[0])).repeat(1, 2)
    q, k = (torch.randn(batch, length, heads, 2 * modes, dtype=torch.float64) for _ in range(2))
    v, skip = torch.randn(batch, length, heads, width).double(), torch.randn(heads).double()
    state = torch.randn(batch, heads, 2 * modes, width, dtype=torch.float64)
    return dict(zip(NAMES, (q, k * energy, v, rate, skip, state), strict=True))


def outputs_and_gradients(
    run: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], weights: tuple[Tensor, Tensor | None]
) -> dict[str, Tensor]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    y, after = run(**leaves)
    loss = (y * weights[0].to(y)).sum()
    if weights[1] is not None:
        loss = loss + (after * weights[1].to(after)).sum()
    loss.backward()
    grads = {f"gradient by {name}": t.grad for name, t in leaves.items() if t.grad is not None}
    return {"y": y.detach(), "after": after.detach(), **grads}


def plainly(queries, keys, values, rate, skip=None, state=None) -> tuple[Tensor, Tensor]:
    y, after = reference(queries, keys, values, rate, state)
    return y if skip is None else y + skip.unsqueeze(-1) * values, after


def by_kernels(queries, keys, values, rate, skip=None, state=None) -> tuple[Tensor, Tensor]:
    """`scan` on a GPU, on any device."""
    with mock.patch.object(fast, "half", lambda tensor: tensor.dtype):
        return scan(queries, keys, values, rate, state, skip=skip)


def check(inputs: dict[str, Tensor], kind: torch.dtype, ends: bool = True) -> None:
    """`ends`: whether the loss depends on the state after the sequence."""
    given = {name: t.to(kind if name in NAMES[:3] else torch.float32) for name, t in inputs.items()}
    given["rate"] = inputs["rate"]
    exact = {name: t.double() for name, t in given.items()}
    y, after = plainly(**exact)
    weights = torch.randn_like(y).to(kind), torch.randn_like(after) if ends else None
    expected = outputs_and_gradients(plainly, exact, weights)
    found = outputs_and_gradients(by_kernels, {name: t.to(DEVICE) for name, t in given.items()}, weights)
    assert found.keys() == expected.keys()
    assert found["y"].dtype == kind
    errors = {name: relative_error(found[name].cpu(), expected[name]) for name in expected}
    assert max(errors.values()) < TOLERANCE[kind], errors


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("length", [2, 64, 131])
def test_kernels_are_the_recurrence(length: int, carried: bool, kind: torch.dtype) -> None:
    inputs = draw(length, batch=2 if length == 2 else 1)
    if not carried:
        del inputs["state"], inputs["skip"]
    check(inputs, kind, ends=carried)


@pytest.mark.parametrize("programs", [4, 6])
def test_segments_side_by_side(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two and three segments of a sequence whose last chunk is short, and tiles of values with a rest."""
    for name, value in (("PROGRAMS", programs), ("TILE", 16), ("GRADIENT_TILE", 16)):
        monkeypatch.setattr(kernels, name, value)
    check(draw(64 * 2 + 17, heads=1, width=20), torch.float32)


def test_every_mode_has_its_gradient() -> None:
    """That of λ mode by mode: a fast mode's is small, and lost if positions were counted from the sequence's start."""
    inputs = {name: t for name, t in draw(150, heads=1).items() if name in NAMES[:4]}
    given = {name: t.bfloat16() if name != "rate" else t for name, t in inputs.items()}
    weights = torch.randn(1, 150, 1, 6).bfloat16(), None
    expected = outputs_and_gradients(plainly, {name: t.double() for name, t in given.items()}, weights)
    found = outputs_and_gradients(by_kernels, {name: t.to(DEVICE) for name, t in given.items()}, weights)
    for a, b in zip(found["gradient by rate"].cpu().unbind(2), expected["gradient by rate"].unbind(2), strict=True):
        assert relative_error(a, b) < 2e-2


def test_inputs_that_lie_apart_in_memory() -> None:
    """Views of one wide tensor, as a layer's are, and of a transposed one."""
    inputs = draw(70)
    wide = torch.cat([inputs[name].flatten(2) for name in NAMES[:3]], dim=-1).float().to(DEVICE)
    views = [t.unflatten(-1, (2, -1)) for t in wide.split([20, 20, 12], dim=-1)]
    views[0] = views[0].transpose(1, 3).contiguous().transpose(1, 3)
    rate = inputs["rate"].to(DEVICE)
    expected, _ = reference(*(t.double().cpu() for t in views), inputs["rate"])
    y, *_ = kernels.matrix_scan(*views, rate, None, None)
    assert relative_error(y.cpu(), expected) < 2e-6


def test_what_a_compiler_is_told() -> None:
    """Shapes, kinds and gradients without data, against what the operation does."""
    inputs = draw(3, heads=1)
    kinds = [torch.float64 if name == "rate" else torch.float32 for name in inputs]
    given = tuple(t.to(DEVICE, kind).requires_grad_() for t, kind in zip(inputs.values(), kinds, strict=True))
    torch.library.opcheck(kernels.matrix_scan.op, given, rtol=1e-4, atol=1e-4)


def test_a_layers_state_space_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, and gives what plain PyTorch gives; of one token, plain PyTorch itself."""
    config = gss.preset("gss2-tiny", state_space={"modes": 8}, matrix_state={"heads": 2, "value_width": 16})
    space = KeyedStateSpace(config).to(DEVICE)
    x = torch.randn(2, 80, 3 * 32, device=DEVICE).bfloat16()  # queries, keys and values side by side
    with fast.disabled():
        expected, after = space(x)
    called = []
    monkeypatch.setattr(fast, "half", lambda tensor: called.append(tensor) or tensor.dtype)
    y, state = space(x)
    assert called
    assert relative_error(y, expected) < 1e-2
    assert relative_error(state, after) < 1e-2
    _, further = space(x[:, :1], state)
    with fast.disabled():
        assert torch.equal(space(x[:, :1], state)[1], further)


def test_half_precision_does_not_overflow() -> None:
    """Powers of e^λ inside a chunk reach e^32, more than float16 holds."""
    check(draw(70, heads=1), torch.float16)
