"""Layers that run window by window, compiled: the same results, from a few graphs however many windows and blocks."""

import shutil
import time

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import gss
from gss.nn.block_recurrent import RecurrentLayer
from gss.nn.lora import add_lora
from gss.nn.state import LayerState
from tests.comparing import relative_error
from tests.conftest import small_config

WINDOW = 8


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def stack(family: str, **overrides: object) -> RecurrentLayer:
    torch.manual_seed(0)
    layer = gss.build_model(small_config(family, **overrides)).layers[-1]
    assert isinstance(layer, RecurrentLayer)
    return layer


def piece(layer: RecurrentLayer, rows: int, length: int) -> tuple[Tensor, LayerState]:
    """Tokens as from a layer below, and a state: the first row's is a start, the others have read two windows."""
    dtype = layer.cell.initial.dtype
    with torch.no_grad():
        state = layer(torch.randn(rows, 2 * WINDOW, 16, dtype=dtype))[1]
    first = torch.tensor([0])
    x = torch.randn(rows, length, 16, dtype=dtype, requires_grad=True)
    return x, {name: tensor.index_fill(0, first, 0) for name, tensor in state.items()}


def run(layer: RecurrentLayer, x: Tensor, state: LayerState, recompute: bool = False) -> dict[str, Tensor]:
    """Outputs, the state after and gradients."""
    layer.zero_grad()
    y, after = checkpoint(layer, x, state, use_reentrant=False) if recompute else layer(x, state)
    (y.square().mean() + sum(t.square().mean() for t in after.values() if t.is_floating_point())).backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **{name: tensor.detach() for name, tensor in after.items()}, **gradients}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert relative_error(found[name].double(), tensor.double()) < tolerance, name


def test_graphs_serve_all_windows_blocks_and_layers() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    for windows, blocks in ((3, 2), (5, 2), (5, 4)):
        layer = stack("feedback-lstm-single", recurrent={"vectors": 5, "blocks": blocks, "block": 1}).double()
        x, state = piece(layer, 3, windows * WINDOW + 3)
        expected = run(layer, x, state)
        layer.compile(backend=counter)
        assert_same(run(layer, x, state), expected, 1e-10)
        assert counter.frame_count == 6  # the bias, what is read of the vectors; block and update, first and later
    with torch.no_grad():
        layer(x[:2])  # another batch size
    assert counter.frame_count == 6


def test_pieces_that_end_within_windows() -> None:
    layer = stack("rec-fixed-skip").double()
    x, state = piece(layer, 2, 3 * WINDOW)
    expected = run(layer, x, state)
    layer.compile(backend="eager")
    after, pieces = state, []
    for part in x.split([WINDOW, 3, WINDOW, 1, WINDOW - 4], dim=1):
        y, after = layer(part, after)
        pieces.append(y)
    assert_same({"y": torch.cat(pieces, dim=1), **after}, {name: expected[name] for name in ("y", *after)}, 1e-10)


def test_under_autocast_and_recomputed() -> None:
    """A weight is cast once, as autocast does it, and its gradient summed over windows before it is cast back."""
    layer = stack("feedback-lstm-single")
    x, state = piece(layer, 2, 3 * WINDOW)
    precise = run(layer, x, state)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(layer, x, state)
        layer.compile(backend="aot_eager")
        found = run(layer, x, state)
        assert_same(run(layer, x, state, recompute=True), found, 1e-6)
    for name, tensor in precise.items():
        assert found[name].dtype == tensor.dtype
        assert relative_error(found[name], tensor) < 2 * relative_error(expected[name], tensor) + 0.02, name


def test_lora_under_autocast() -> None:
    layer = stack("rec-fixed-skip")
    add_lora(layer, 2)
    x, state = piece(layer, 2, 2 * WINDOW)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(layer, x, state)
        layer.compile(backend="eager")
        assert_same(run(layer, x, state), expected, 0.02)


def test_a_model_of_some_size_compiles_in_seconds() -> None:
    """Nine blocks, four windows: a graph of them all would take many minutes."""
    config = gss.preset("feedback-lstm-single-small", **{"attention.window": WINDOW, "recurrent.vectors": 8})
    counter = CompileCounterWithBackend("aot_eager")
    layer = gss.build_model(config).layers[0]
    layer.compile(backend=counter)
    started = time.perf_counter()
    x = torch.randn(1, 4 * WINDOW, config.width, requires_grad=True)
    layer(x)[0].sum().backward()
    assert time.perf_counter() - started < 100
    assert counter.frame_count <= 6


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
@pytest.mark.parametrize("family", ["feedback-lstm-single", "rec-fixed-skip"])
def test_compiled_for_real(family: str) -> None:
    layer = stack(family).double()
    x, state = piece(layer, 3, 4 * WINDOW)
    expected = run(layer, x, state)
    layer.compile()
    assert_same(run(layer, x, state), expected, 1e-10)
