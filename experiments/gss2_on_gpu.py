"""GSS2 on a GPU: training steps and their kernels, errors against float64, and the kernels' times and settings.

    python -m experiments.gss2_on_gpu [--out FILE] [--seconds 65]

Floors are those that gss/ops/gpu/matrix_state.py counts. Parts that have not begun after `--seconds` are left
out, so the settings of the kernels come last. The table is printed line by line, the file is rewritten with it, and the
best setting of each kernel is printed at the end.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import gss
from experiments.kernels import TABLE, error, milliseconds, row, run_parts, show_profile, training
from gss.nn.gss2 import GSS2Layer, ShortConvolution
from gss.ops import matrix_state
from gss.ops.gpu import matrix_state as kernels
from gss.ops.gpu import short

MODES, WIDTH = 32, 128
BANDWIDTH = 4.2e12
FORWARD_BYTES, BACKWARD_BYTES, SEGMENT_BYTES = 1664, 2432, 384
NAMES = ("queries", "keys", "values", "rate", "state", "skip")
SHAPE = (32, 4096, 4)
RESULTS: dict[str, list[tuple[float, str]]] = {}
"""Milliseconds and settings, by kernel."""


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


def scan_runs() -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward, at the settings of now."""
    *sequence, rate, _, skip = operands(*SHAPE, torch.bfloat16)
    y, *rest = kernels.matrix_scan(*sequence, rate, skip, None)
    grad = torch.randn_like(y)
    after, states, table = (t.detach() for t in rest)

    def forward() -> None:
        with torch.no_grad():
            kernels.matrix_scan(*sequence, rate, skip, None)

    def backward() -> None:
        with torch.no_grad():
            kernels.matrix_scan_backward(grad, after, states, table, *sequence, skip)

    return forward, backward


def short_inputs(batch: int, length: int, kind: torch.dtype) -> list[torch.Tensor]:
    """x, taps, scale and the tokens before, for four heads of 64 and 128."""
    channels = SHAPE[2] * (4 * MODES + WIDTH)
    x, recent = (torch.randn(batch, n, channels, device="cuda").to(kind) for n in (length, 3))
    taps = torch.randn(4, channels, device="cuda") / 2
    scale = torch.rand(2 * SHAPE[2], 2 * MODES, device="cuda")
    return [t.requires_grad_() for t in (x, taps, scale, recent)]


def short_errors(batch: int, length: int) -> None:
    """Of the fused operation, against plain modules in float64."""
    inputs = short_inputs(batch, length, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    x, taps, scale, recent = exact
    with torch.device("cuda"):
        module = ShortConvolution(x.shape[2], 4).double()
    convolved, _ = torch.func.functional_call(module, {"taps": taps}, (x, {"recent": recent}))
    heads = SHAPE[2]
    keys = heads * 2 * MODES
    parts = torch.nn.functional.silu(convolved).split([keys, keys, heads * WIDTH], dim=-1)
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in parts)
    normed = [torch.nn.functional.rms_norm(t, t.shape[-1:], eps=1e-6) for t in (q, k)]
    expected = [*(t * s for t, s in zip(normed, scale.chunk(2), strict=True)), v]
    found = short.short_mix(*inputs, heads, "swish")
    weights = [torch.randn_like(t) for t in found]
    torch.autograd.backward(expected, [w.double() for w in weights])
    torch.autograd.backward(found, weights)
    name = f"short {batch}x{length}: error of"
    for what, a, b in zip(NAMES, found, expected, strict=False):
        row(f"{name} {what}", error(a.detach(), b.detach()), "relative")
    for what, a, b in zip(("x", "taps", "scale", "recent"), inputs, exact, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        row(f"{name} the gradient by {what}", error(a.grad, b.grad), "relative")


def short_runs() -> tuple[Callable[[], object], Callable[[], object]]:
    x, taps, scale, _ = (t.detach() for t in short_inputs(*SHAPE[:2], torch.bfloat16))
    grads = [torch.randn_like(t) for t in short.short_mix(x, taps, scale, None, SHAPE[2], "swish")]
    return (
        lambda: short.short_mix(x, taps, scale, None, SHAPE[2], "swish"),
        lambda: short.short_mix_backward(*grads, x, taps, scale, None, "swish"),
    )


def layer_errors(batch: int, length: int) -> None:
    """A layer in bfloat16 by autocast against itself in float64, which no kernel takes: outputs and gradients."""
    config = gss.preset("gss2-small", zero_outputs=False)
    module, exact = GSS2Layer(config).to("cuda"), GSS2Layer(config).to("cuda").double()
    exact.load_state_dict(module.state_dict())
    x = torch.randn(batch, length, 512, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = module(x, None, False)[0]
    expected = exact(x.double(), None, False)[0]
    weight = torch.randn_like(found)
    found.backward(weight)
    expected.backward(weight.double())
    row(f"layer {batch}x{length}: error of y − x", error(found.detach() - x, expected.detach() - x), "relative")
    for (name, a), b in zip(module.named_parameters(), exact.parameters(), strict=True):
        if a.grad is not None and b.grad is not None and b.grad.norm() > 0:
            row(f"layer {batch}x{length}: error of the gradient by {name}", error(a.grad, b.grad), "relative")


def measure(kernel: str, runs: Callable[[], tuple[Callable[[], object], ...]], label: str) -> None:
    """One line: forward and backward, and for a kernel of only one of them, that one counts."""
    forward, backward = (milliseconds(run) for run in runs())
    counted = {"output": forward, "short forward": forward, "gradient": backward, "short backward": backward}
    spent = counted.get(kernel, forward + backward)
    RESULTS.setdefault(kernel, []).append((spent, label))
    TABLE.append({"name": f"{kernel}: {label}", "forward": forward, "backward": backward, "unit": "ms"})
    print(f"{kernel:16} {label:70} forward {forward:7.4f} backward {backward:7.4f} ms", flush=True)


def times() -> None:
    """Both operations at the settings of now, then kernel by kernel."""
    tokens = SHAPE[0] * SHAPE[1] * SHAPE[2]
    for kernel in ("states", "output", "gradient"):
        measure(kernel, scan_runs, "as set")
    for kernel in ("short forward", "short backward"):
        measure(kernel, short_runs, "as set")
    for what, size in (("forward", FORWARD_BYTES), ("backward", BACKWARD_BYTES)):
        row(f"scan's {what}: floor", tokens * size / BANDWIDTH * 1e3)
    size = SHAPE[0] * SHAPE[1] * SHAPE[2] * (4 * MODES + WIDTH) * 2
    row("short forward: floor", 2 * size / BANDWIDTH * 1e3)
    row("short backward: floor", 3 * size / BANDWIDTH * 1e3)
    for runs in (scan_runs(), short_runs()):
        show_profile(lambda runs=runs: [run() for run in runs], 12)


def variants() -> dict[str, Callable[[], object]]:
    """Each kernel's other settings, the most promising first."""
    warps = lambda w, s=1, **more: {"num_warps": w, "num_stages": s, **more}  # noqa: E731
    rows = lambda r, w, **more: {"ROWS": r, "num_warps": w, **more}  # noqa: E731
    choices: list[tuple[str, Any, dict[str, Any]]] = [
        ("short backward", short, {"BACKWARD": rows(4, 4)}),
        ("gradient", kernels, {"GRADIENT": warps(4, maxnreg=168)}),
        ("gradient", kernels, {"GRADIENT_TILE": 32}),
        ("states", kernels, {"PROGRAMS": 1024}),
        ("output", kernels, {"OUTPUT_TILE": 64}),
        ("short forward", short, {"FORWARD": rows(4, 4)}),
        ("short forward", short, {"FORWARD": rows(16, 4)}),
        ("states", kernels, {"TILE": 128, "STATES": warps(8, 3)}),
        ("gradient", kernels, {"GRADIENT": warps(8)}),
        ("states", kernels, {"STATES": warps(4, 2)}),
        ("short backward", short, {"STRETCH": 128}),
        ("short backward", short, {"STRETCH": 32}),
        ("gradient", kernels, {"GRADIENT": warps(4), "GRADIENT_TILE": 64}),
        ("output", kernels, {"OUTPUT": warps(8)}),
        ("states", kernels, {"PROGRAMS": 512}),
        ("output", kernels, {"OUTPUT": warps(4, maxnreg=128)}),
        ("states", kernels, {"STATES": warps(4, 4)}),
        ("short backward", short, {"BACKWARD": rows(16, 8)}),
        ("short backward", short, {"BACKWARD": rows(8, 4, maxnreg=128)}),
    ]

    def run(kernel: str, module: Any, values: dict[str, Any]) -> None:
        with mock.patch.multiple(module, **values):
            measure(kernel, scan_runs if module is kernels else short_runs, str(values))

    return {f"{kernel}, {values}": partial(run, kernel, module, values) for kernel, module, values in choices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gss2_on_gpu.json"))
    parser.add_argument("--seconds", type=float, default=65)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    parts: dict[str, Callable[[], object]] = {
        name: partial(training, *SHAPE[:2], True, False, name, rows=25)
        for name in ("gss2-small", "llama-small", "gss-hybrid-small")
    }
    last = {"gss-hybrid-small": parts.pop("gss-hybrid-small")}
    parts |= {
        "errors of the short convolution": lambda: short_errors(2, 1000),
        "errors of the scan": lambda: errors(2, 1024, 4, torch.bfloat16),
        "errors of the scan at an odd length": lambda: errors(2, 1000, 4, torch.bfloat16),
        "errors of a layer": lambda: layer_errors(2, 1000),
        "times": times,
    }
    run_parts(parts | variants() | last, arguments.out, arguments.seconds, arguments.commit)
    for kernel, found in RESULTS.items():
        spent, label = min(found)
        print(f"best for {kernel:16} {spent:8.4f} ms  {label}  (of {len(found)}; as set {found[0][0]:.4f})", flush=True)


if __name__ == "__main__":
    main()
