"""GSS2 on a GPU: the matrix state's kernels against float64, and how fast they, a layer and training steps are.

    python -m experiments.gss2_on_gpu [--out FILE] [--seconds 95]

Floors are those that gss/ops/gpu/matrix_state.py counts. What has not begun at `--seconds` is left out; the settings
of the kernels come last, so that they can be left out. The table is printed line by line, the file rewritten with it.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import gss
from experiments.kernels import TABLE, error, milliseconds, row, training
from gss.ops import fast, matrix_state
from gss.ops.gpu import matrix_state as kernels

MODES, WIDTH = 32, 128
BANDWIDTH = 4.2e12
FORWARD_BYTES, BACKWARD_BYTES, SEGMENT_BYTES = 768, 2688, 384
NAMES = ("queries", "keys", "values", "rate", "state", "skip")
MODELS = ("gss2-small", "llama-small", "gss-hybrid-small")
SHAPES = ((16, 4096, 4), (32, 4096, 8), (1, 65_536, 8))


def operands(
    batch: int, length: int, heads: int, kind: torch.dtype, modes: int = MODES, width: int = WIDTH
) -> list[torch.Tensor]:
    """As a layer of `gss2` makes them; all leaves."""
    draw = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    decay = torch.logspace(-0.3, -3.9, modes, dtype=torch.float64, device="cuda").expand(heads, modes)
    frequency = torch.rand(heads, modes, dtype=torch.float64, device="cuda")
    energy = torch.sqrt(-torch.expm1(-2 * decay)).repeat(1, 2).float()
    q = draw(batch, length, heads, 2 * modes) / (2 * modes) ** 0.5
    k = draw(batch, length, heads, 2 * modes) * energy
    state = draw(batch, heads, 2 * modes, width)
    parts = (q.to(kind), k.to(kind), draw(batch, length, heads, width).to(kind), torch.stack([-decay, frequency]))
    return [t.detach().requires_grad_() for t in (*parts, state, draw(heads))]


def scan(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernels, in any precision."""
    *sequence, rate, state, skip = inputs
    y, after, *_ = kernels.matrix_scan(*sequence, rate, skip, state)
    return y, after


def errors(batch: int, length: int, heads: int, kind: torch.dtype, *sizes: int) -> None:
    inputs = operands(batch, length, heads, kind, *sizes)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    q, k, v, rate, state, skip = exact
    expected = matrix_state.scan(q, k, v, rate, state, skip=skip)
    found = scan(inputs)
    weights = [torch.randn_like(t).to(kind) for t in expected]
    torch.autograd.backward(expected, [w.double() for w in weights])
    torch.autograd.backward(found, [w.to(t.dtype) for w, t in zip(weights, found, strict=True)])
    name = f"scan {batch}x{length}, {heads} heads, {str(kind)[6:]}: error of"
    for what, a, b in zip(("y", "the state"), found, expected, strict=True):
        row(f"{name} {what}", error(a.detach(), b.detach()), "relative")
    for what, a, b in zip(NAMES, inputs, exact, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        row(f"{name} the gradient by {what}", error(a.grad, b.grad), "relative")
        if what == "rate":
            by_mode = (a.grad - b.grad).norm(dim=(0, 1)) / b.grad.norm(dim=(0, 1))
            row(f"{name} the gradient by rate, the worst mode", by_mode.max().item(), "relative")


def times(batch: int, length: int, heads: int) -> None:
    *sequence, rate, _, skip = operands(batch, length, heads, torch.bfloat16)
    _, shape = kernels._layout(sequence[1], sequence[2])
    tokens, segments = batch * length * heads, shape[1]
    more = SEGMENT_BYTES if segments > 1 else 0
    y, *rest = kernels.matrix_scan(*sequence, rate, skip, None)
    grad = torch.randn_like(y)
    after, starts, table = (t.detach() for t in rest)

    def forward() -> None:
        with torch.no_grad():
            kernels.matrix_scan(*sequence, rate, skip, None)

    def backward() -> None:
        with torch.no_grad():
            kernels.matrix_scan_backward(grad, after, starts, table, *sequence, skip)

    name = f"scan {batch}x{length}, {heads} heads, {segments} segments"
    for what, run, size in (("forward", forward, FORWARD_BYTES), ("backward", backward, BACKWARD_BYTES)):
        spent = milliseconds(run)
        floor = tokens * (size + more) / BANDWIDTH * 1e3
        row(f"{name}: {what}", spent)
        row(f"{name}: {what}, of the floor {floor:.3f} ms", floor / spent, "of 1")


def layer(batch: int, length: int, compiled: bool, plain: bool) -> None:
    torch._dynamo.reset()
    module = gss.build_model(gss.preset("gss2-small", depth=1)).layers[0].cuda()
    x = torch.randn(batch, length, 512, device="cuda", requires_grad=True)
    if compiled:
        module.compile()

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x, None, False)[0]
        y.sum().backward()

    name = f"layer of gss2-small {batch}x{length}{', compiled' if compiled else ''}{', plain scan' if plain else ''}"
    with fast.disabled() if plain else nothing():
        row(f"{name}: forward and backward", milliseconds(run))


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    before = getattr(kernels, name)
    setattr(kernels, name, value)
    try:
        yield
    finally:
        setattr(kernels, name, before)


def variants() -> Iterator[Callable[[], None]]:
    """Each kernel's other settings, at the first shape."""
    choices: list[tuple[str, Any]] = [("PROGRAMS", n) for n in (1, 256, 1024, 2048)]
    choices += [("SCAN", {"num_warps": w, "num_stages": s}) for w, s in ((4, 1), (4, 3), (8, 2))]
    choices += [("STATES", {"num_warps": w, "num_stages": s}) for w, s in ((4, 2), (4, 4), (8, 3))]
    choices += [("GRADIENT", {"num_warps": w, "num_stages": s}) for w, s in ((8, 1), (4, 1))]
    choices += [("GRADIENT", {"num_warps": 8, "num_stages": 1, "maxnreg": 128}), ("GRADIENT_TILE", 64)]
    for name, value in choices:

        def run(name: str = name, value: Any = value) -> None:
            print(name, value, flush=True)
            with setting(name, value):
                begun = len(TABLE)
                times(*SHAPES[0])
                for line in TABLE[begun:]:
                    line["name"] = f"{name} {value}: {line['name']}"

        yield run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gss2_on_gpu.json"))
    parser.add_argument("--seconds", type=float, default=95)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    parts: list[Callable[[], None]] = [
        lambda: errors(2, 1024, 4, torch.bfloat16),
        lambda: errors(1, 64, 2, torch.bfloat16, 5, 6),
        lambda: errors(2, 1000, 4, torch.bfloat16),
        lambda: times(*SHAPES[0]),
        lambda: layer(16, 4096, True, False),
        *(lambda name=name: training(16, 4096, False, False, name) for name in MODELS),
        *(lambda shape=shape: times(*shape) for shape in SHAPES[1:]),
        lambda: layer(16, 4096, False, False),
        lambda: layer(16, 4096, False, True),
        lambda: errors(1, 8192, 4, torch.bfloat16),
        lambda: errors(2, 1000, 4, torch.float32, 8, 16),  # products of larger ones take a minute to compile
    ]
    for part in (*parts, *variants()):
        if time.monotonic() > deadline:
            print("no time for the rest", flush=True)
            break
        try:
            part()
        except Exception as problem:  # one result among others
            print("failed:", repr(problem)[:1500], flush=True)
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(TABLE, indent=1) + "\n")


if __name__ == "__main__":
    main()
