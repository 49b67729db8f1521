"""Training in fp8 on a GPU: errors, training steps and losses compared with bf16, settings of kernels, and products.

    python -m experiments.fp8_on_gpu [--out FILE] [--seconds 150]

Parts that have not begun after `--seconds` are left out. The file is rewritten after every part, and a part that fails
gets a line that says why. The most important figures are repeated at the end.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import cross_entropy, gelu

import gss
from experiments.kernels import TABLE, E, F, H, V, error, milliseconds, row, run_parts, training, training_step
from gss.ops.gpu import cross_entropy as losses
from gss.ops.gpu import fp8, fp8_gate, fp8_head, gate

TOKENS = 65_536
STEPS, SUCCESSORS, USED = 60, 4, 1024
BANDWIDTH = 4.2e12
NAMES = ("output", "by x", "by W2", "by b2", "by y", "by W3", "by b3", "by W4")


def draw(*shape: int, scale: float = 1.0, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(kind)


def gate_inputs(tokens: int) -> list[torch.Tensor]:
    """x, W₂, b₂, y, W₃, b₃, W₄ of the `gss` preset at its beginning; weights in float32, as they are trained."""
    full = torch.float32
    w2, w3, w4 = (draw(*size, scale=(2 / sum(size)) ** 0.5, kind=full) for size in ((F, E), (F, H), (E, F)))
    return [draw(tokens, E), w2, draw(F, scale=0.1, kind=full), draw(tokens, H), w3, draw(F, scale=0.1, kind=full), w4]


def gate_errors(tokens: int) -> None:
    """Outputs and gradients of the gate in fp8 and in bf16 against float64."""
    inputs, grad = gate_inputs(tokens), draw(tokens, E, scale=1e-5)

    def exactly(x, w2, b2, y, w3, b3, w4):
        return (gelu(x @ w2.T + b2) * (y @ w3.T + b3)) @ w4.T

    def in_bf16(x, w2, b2, y, w3, b3, w4):
        w2, b2, w3, b3, w4 = (t.bfloat16() for t in (w2, b2, w3, b3, w4))
        return gate.gated_output(x @ w2.T, b2, y, w3, b3, w4, "gelu")[0]

    def run(function, kind=None):
        leaves = [t.to(kind or t.dtype).detach().requires_grad_() for t in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    expected = run(exactly, torch.float64)
    for name, function in (("fp8", partial(fp8_gate.gated_output, activation="gelu")), ("bf16", in_bf16)):
        for what, a, b in zip(NAMES, run(function), expected, strict=True):
            row(f"gate {tokens} tokens, {name}: error of {what}", error(a, b), "relative")


def head_errors(rows: int) -> None:
    """The head's loss and gradients, of which 8 bits make the gradients alone."""
    hidden, weight = draw(rows, E), draw(V, E, kind=torch.float32)
    targets = torch.randint(0, V, (rows,), device="cuda")
    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    expected = cross_entropy(leaves[0] @ leaves[1].T * E**-0.5, targets, reduction="sum")
    expected.backward()
    logits = (hidden * E**-0.5) @ weight.bfloat16().T
    found = fp8_head.loss_and_gradients(logits, targets, -100, hidden, fp8.narrowed(weight), E**-0.5, True)
    row(f"head {rows} rows: error of the loss", error(found[0], expected), "relative")
    for what, a, b in zip(("hidden", "weight"), found[1], leaves, strict=True):
        assert b.grad is not None
        row(f"head {rows} rows, fp8: error by {what}", error(a, b.grad), "relative")


def sequences() -> torch.Tensor:
    """Tokens [STEPS, 16, 4097] in which each of `USED` ids has `SUCCESSORS` equally likely ones: ln 4 nats to reach."""
    following = torch.randint(0, USED, (USED, SUCCESSORS), device="cuda")
    choice = torch.randint(0, SUCCESSORS, (4097, STEPS * 16), device="cuda")
    token = torch.randint(0, USED, (STEPS * 16,), device="cuda")
    tokens = [token]
    for chosen in choice[1:]:
        token = following[token, chosen]
        tokens.append(token)
    return torch.stack(tokens, 1).view(STEPS, 16, -1)


def compare() -> None:
    """The losses of the same steps from the same weights, in bf16, again from other weights, and in fp8."""
    torch._dynamo.reset()
    data, curves = sequences(), {}
    for name, precision, seed in (("bf16", "bf16", 0), ("fp8", "fp8", 0), ("bf16, another seed", "bf16", 1)):
        model = gss.build_model(gss.preset("gss"), seed=seed).cuda()
        step = training_step(model, False, precision, rate=1e-3)
        found = torch.stack([step(tokens[:, :-1], tokens[:, 1:]) for tokens in data]).tolist()
        curves[name] = found
        row(f"{STEPS} steps in {name}: loss of the last ten", sum(found[-10:]) / 10, "nats")
        print(name, " ".join(f"{loss:.4f}" for loss in found[::4]), flush=True)
        torch.cuda.empty_cache()
    TABLE.append({"name": "losses", "value": curves, "unit": "nats"})


def kernel_runs() -> dict[str, tuple[Callable[[], object], float]]:
    """Each kernel as a training step calls it, at the settings of now, and the bytes it cannot do without."""
    g, c, grad = draw(TOKENS, F), draw(TOKENS, F), draw(TOKENS, E)
    x, w2, b2, y, w3, b3, w4 = gate_inputs(TOKENS)
    logits, targets = draw(16_384, V), torch.randint(0, V, (16_384,), device="cuda")
    most, wide, rows = grad.abs().amax(), TOKENS * F, 16_384 * V
    p, units = torch.empty(TOKENS, F, dtype=fp8.E4M3, device="cuda"), torch.empty(TOKENS, 1, device="cuda")
    found = fp8_gate._forward(x, x.abs().amax(), w2, b2, y, w3, b3, w4, "gelu")
    _, saved_g, _, unit, extremes, p_unit = found
    by_g, by_c = (fp8_gate._empty(TOKENS, F, TOKENS, g.device) for _ in range(2))
    by_p = torch.empty(F, TOKENS, dtype=fp8.E4M3, device="cuda")
    _, normalizers = losses.losses_and_normalizers(logits, targets, -100)

    def forward():
        count = -(-TOKENS // fp8_gate.ROWS["STEPS"])
        fp8_gate._rows_kernel[(count,)](
            g, c, b2, b3, p, units, torch.empty(count, 2, device="cuda"), TOKENS, F, LIMIT=448.0,
            ACTIVATION="gelu", EVEN=True, BLOCK=F, **fp8_gate.ROWS,
        )  # fmt: skip

    def backward():
        tile = fp8_gate.TILE
        grid = (F // tile["BN"], TOKENS // (tile["BM"] * tile["STEPS"]))
        fp8_gate._tiles_kernel[grid](
            g, c, saved_g, b2, b3, most, unit, extremes, p_unit, 1.0, *by_g, *by_c, by_p,
            torch.empty(grid[1], 2, F, device="cuda"), TOKENS, TOKENS, F, ACTIVATION="gelu", LIMIT=448.0,
            GRADIENT_LIMIT=57344.0, EVEN=True, **tile,
        )  # fmt: skip

    return {
        "gate forward": (forward, 5 * wide),
        "gate backward": (backward, 11 * wide),
        "cast": (lambda: fp8.cast(grad, most, fp8.E5M2), 4 * TOKENS * E),
        "logit gradients": (lambda: fp8_head.logit_gradients(logits, targets, normalizers, -100), 4 * rows),
        "losses": (lambda: losses.losses_and_normalizers(logits, targets, -100), 2 * rows),
        "weight's cast": (lambda: fp8.narrowed(w2), 10 * F * E),
    }


SETTINGS: dict[str, tuple[Any, str]] = {
    "gate forward": (fp8_gate, "ROWS"),
    "gate backward": (fp8_gate, "TILE"),
    "cast": (fp8, "_TILE"),
    "logit gradients": (fp8_head, "TILE"),
}


def choices(kernel: str) -> Iterator[dict[str, int]]:
    if kernel == "gate forward":
        for warps, registers in ((16, 64), (16, 40), (16, 32), (8, 80), (8, 64), (8, 48)):
            yield {"STEPS": 16, "num_warps": warps, "maxnreg": registers}
        for steps in (8, 32):
            yield {"STEPS": steps, "num_warps": 16, "maxnreg": 40}
    elif kernel == "gate backward":
        for high, wide, warps, registers in (
            (64, 64, 4, 168), (64, 64, 4, 128), (64, 64, 4, 200), (128, 32, 4, 168), (32, 128, 4, 168),
            (32, 64, 4, 128), (32, 64, 2, 168), (128, 64, 8, 128), (64, 128, 8, 128),
        ):  # fmt: skip
            yield {"BM": high, "BN": wide, "STEPS": 512 // high, "num_warps": warps, "maxnreg": registers}
        for steps in (4, 16):
            yield {"BM": 64, "BN": 64, "STEPS": steps, "num_warps": 4, "maxnreg": 168}
    else:
        for high, wide, warps in ((64, 64, 4), (64, 64, 8), (128, 64, 8), (64, 128, 8), (128, 128, 16), (128, 32, 4)):
            yield {"BM": high, "BN": wide, "num_warps": warps}


def kernels() -> None:
    """Times beside the floor that the traffic sets; the best settings stay for what follows."""
    runs = kernel_runs()
    for kernel, (run, size) in runs.items():
        row(f"{kernel}: floor", size / BANDWIDTH * 1e3)
        if kernel not in SETTINGS:
            row(kernel, milliseconds(run))
            continue
        module, name = SETTINGS[kernel]
        found = []
        for chosen in choices(kernel):
            try:
                with mock.patch.object(module, name, chosen):
                    found.append((milliseconds(run), str(chosen), chosen))
            except Exception as problem:  # too many registers, too much shared memory
                print(kernel, chosen, "failed:", repr(problem)[:300], flush=True)
                continue
            row(f"{kernel} {chosen}", found[-1][0])
        if found:
            best = min(found)
            print(f"best for {kernel}: {best[1]}", flush=True)
            setattr(module, name, best[2])


def products() -> None:
    """Each product of the gate and of the head's gradient: bf16, fp8, and fp8 with float32 sums."""
    shapes = {
        "g": (TOKENS, F, E), "c": (TOKENS, F, H), "out": (TOKENS, E, F), "by y": (TOKENS, H, F),
        "by W2": (F, E, TOKENS), "by W3": (F, H, TOKENS), "by W4": (E, F, TOKENS),
        "by hidden": (16_384, E, V), "by embedding": (V, E, 16_384),
    }  # fmt: skip
    one = torch.ones((), device="cuda")
    for name, (rows, columns, depth) in shapes.items():
        a, b = draw(rows, depth), draw(columns, depth)
        row(f"product {name}, bf16", milliseconds(lambda a=a, b=b: a @ b.T))
        gradient = name.startswith("by")
        a, b = a.to(fp8.E5M2 if gradient else fp8.E4M3), b.to(fp8.E4M3)
        for fast in (True, False):
            run = partial(fp8.product, a, b, one, one, fast)
            row(f"product {name}, fp8{'' if fast else ', float32 sums'}", milliseconds(run))
        if name == "out":
            by_row = torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda")
            row(f"product {name}, fp8, a unit per row", milliseconds(partial(fp8.product, a, b, *by_row)))
        del a, b


def train(batch: int, length: int, precision: str, profile: bool = False) -> None:
    training(batch, length, profile, False, rows=28, precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fp8_on_gpu.json"))
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    parts: dict[str, Callable[[], object]] = {
        "errors of the gate": lambda: gate_errors(4096),
        "errors at an odd length": lambda: gate_errors(1001),
        "errors of the head": lambda: head_errors(1000),
        "kernels": kernels,
        "fp8 16x4096, the best settings": lambda: train(16, 4096, "fp8", True),
        "bf16 16x4096": lambda: train(16, 4096, "bf16"),
        "losses": compare,
        "fp8 1x65536": lambda: train(1, 65_536, "fp8", True),
        "bf16 1x65536": lambda: train(1, 65_536, "bf16"),
        "products": products,
    }
    run_parts(parts, arguments.out, arguments.seconds, arguments.commit)
    print()
    for each in TABLE:
        if each["value"] is None or each["name"].startswith((f"{STEPS} steps", "training", "gate 4096")):
            print(f"{each['name']:64} {each['value'] if each['value'] is not None else each['note'][:200]}")


if __name__ == "__main__":
    main()
