"""Each GPU kernel of training: its error against float64, its time, and a profile of a whole training step.

    python -m experiments.kernels [--out FILE] [--profile] [--whole] [--shapes 16x4096,1x65536]
        [--model gss]

Sizes are those of the `gss` preset. Times are medians by CUDA events; the table comes last.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton

import gss
from experiments.measurements import header
from experiments.parts import Parts
from gss.generate import read
from gss.loss import next_token_loss
from gss.nn.state_space import DiagonalStateSpace
from gss.ops import fast, vandermonde
from gss.ops.gpu import cross_entropy, fft, gate
from gss.precision import running
from gss.training.config import TrainConfig
from gss.training.distributed import prepare_layers

H, N, E, F, V = 256, 512, 1024, 4096, 32_000
TABLE: list[dict] = []


def row(name: str, value: float, unit: str = "ms") -> None:
    TABLE.append({"name": name, "value": value, "unit": unit})
    print(f"{name:64} {value:12.4g} {unit}", flush=True)


def milliseconds(function) -> float:
    return triton.testing.do_bench(function, warmup=10, rep=40, return_mode="median")


def error(actual, expected) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def convolution(batch: int, length: int) -> None:
    u = torch.randn(batch, H, length, device="cuda").bfloat16()
    g = torch.randn(batch, H, length, device="cuda").bfloat16() * 1e-5
    size = fft.row_length(length)
    taps = torch.randn(H, size, device="cuda") * torch.exp(-torch.arange(size, device="cuda") / 300)
    spectrum = fft.spectrum(taps)
    count = length // size

    def reference(x, kernel):
        bins = torch.fft.rfft(x.double().view(batch, H, count, size), n=2 * size)
        return torch.fft.irfft(bins * kernel[:, None], n=2 * size)[..., :size].reshape(x.shape)

    exact = torch.fft.rfft(taps.double(), n=2 * size)
    row(f"convolve {batch}x{length}: error", error(fft.convolve(u, *spectrum), reference(u, exact)), "relative")
    adjoint = fft.convolve(g, *spectrum, transpose=True)
    row(f"convolve {batch}x{length}: adjoint's error", error(adjoint, reference(g, exact.conj())), "relative")
    bins = [torch.fft.rfft(x.double().view(batch, H, count, size), n=2 * size) for x in (u, g)]
    expected = torch.fft.irfft((bins[0].conj() * bins[1]).sum((0, 2)), n=2 * size)[..., :size]
    found = fft.taps_of_spectrum(fft.correlation(u, g, size))
    row(f"convolve {batch}x{length}: taps' gradient's error", error(found, expected), "relative")
    for options in (
        {"SLICE": 16, "num_stages": 1},
        {"SLICE": 16, "num_stages": 2},
        {"SLICE": 32, "num_stages": 1},
        {"SLICE": 32, "num_stages": 2},
        {"SLICE": 32, "num_stages": 2, "maxnreg": 128},
        {"SLICE": 16, "num_stages": 2, "maxnreg": 128},
        {"SLICE": 64, "num_stages": 1},
    ):
        try:
            with mock.patch.object(fft, "OPTIONS", options):
                row(f"convolve {batch}x{length}: {options}", milliseconds(lambda: fft.convolve(u, *spectrum)))
                row(f"correlate {batch}x{length}: {options}", milliseconds(lambda: fft.correlation(u, g, size)))
        except Exception as problem:  # a shape that does not fit is one result among others
            print(options, repr(problem)[:200])
    row("spectrum of taps", milliseconds(lambda: fft.spectrum(taps)))
    row("taps of spectrum", milliseconds(lambda: fft.taps_of_spectrum(spectrum[0])))


def modes(length: int) -> None:
    space = DiagonalStateSpace(H, gss.preset("gss").state_space).cuda()
    with torch.no_grad():
        readout, log_a = space.discretized()
    weights, values = readout.unsqueeze(0), torch.randn(1, H, length, device="cuda")
    with fast.disabled():
        row(f"evaluate {length}: plain", milliseconds(lambda: vandermonde.evaluate(weights, log_a, length)))
        row(f"project {length}: plain", milliseconds(lambda: vandermonde.project(values, log_a)))
    row("discretized", milliseconds(lambda: space.discretized()))
    signal = torch.randn(16, H, length, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn_like(signal)

    def both(function):
        def run():
            y = function()
            y.backward(grad)

        return run

    def fast_mix():
        return space._mix_on_gpu(signal.transpose(1, 2), None, False)[0].transpose(1, 2)

    row(f"state space 16x{length}, forward", milliseconds(lambda: fast_mix()))
    row(f"state space 16x{length}, forward and backward", milliseconds(both(fast_mix)))


def gates(tokens: int) -> None:
    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    g, y, w3, w4 = draw(tokens, F), draw(tokens, H), draw(F, H, scale=H**-0.5), draw(E, F, scale=F**-0.5)
    b2, b3 = draw(F), draw(F)
    grad = draw(tokens, E)
    few = slice(0, 512)
    given = (g[few], b2, y[few], w3, b3, w4)
    inputs = [t.double().requires_grad_() for t in given]
    value = torch.nn.functional.gelu(inputs[0] + inputs[1])
    expected = (value * (inputs[2] @ inputs[3].T + inputs[4])) @ inputs[5].T
    expected.backward(grad[few].double())
    found = [t.clone().requires_grad_() for t in given]
    out, *_ = gate.gated_output(*found, "gelu")
    out.backward(grad[few])
    row("gate: error", error(out, expected), "relative")
    for name, a, b in zip(("gate", "b2", "y", "context", "b3", "output"), found, inputs, strict=True):
        row(f"gate: error of the gradient by {name}", error(a.grad, b.grad), "relative")
    c, d, p, q = (draw(tokens, F) for _ in range(4))
    for bm, bn, steps, warps in ((8, 256, 64, 4), (8, 256, 16, 4), (4, 256, 64, 4), (8, 512, 64, 8), (16, 256, 32, 8)):
        name = f"{bm}x{bn}, {steps} steps, {warps} warps"
        with mock.patch.object(gate, "_TILE", {"BM": bm, "BN": bn, "STEPS": steps, "num_warps": warps}):
            (grid, options), given = gate._launch(g), (g, b2, b3, *g.shape)
        sums = torch.empty(grid[1], 2, F, device="cuda")
        row(
            f"gate forward {name}",
            milliseconds(partial(gate._gate_kernel[grid], c, p, *given, ACTIVATION="gelu", **options)),
        )
        for kept in (False, True):
            kernel = gate._gate_backward_kernel[grid]
            backward = partial(kernel, d, c, q, p, sums, *given, ACTIVATION="gelu", KEPT=kept, **options)
            row(f"gate backward {name}{', products kept' * kept}", milliseconds(backward))
    row("product by W4", milliseconds(lambda: p @ w4.T))
    row("product by W3", milliseconds(lambda: y @ w3.T))


def losses(tokens: int) -> None:
    logits = torch.randn(8192, V, device="cuda").bfloat16()
    targets = torch.randint(0, V, (8192,), device="cuda")
    exact = logits[:256].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets[:256], reduction="none")
    expected.sum().backward()
    few = logits[:256].clone()
    row("cross-entropy: error", error(cross_entropy.cross_entropy_(few, targets[:256], -100), expected), "relative")
    row("cross-entropy: gradient's error", error(few, exact.grad), "relative")
    row("cross-entropy 8192", milliseconds(lambda: cross_entropy.cross_entropy_(logits, targets, -100)))
    weight = torch.randn(V, E, device="cuda", requires_grad=True)
    hidden = torch.randn(1, tokens, E, device="cuda", requires_grad=True)
    targets = torch.randint(0, V, (1, tokens), device="cuda")

    def head(x):
        return torch.nn.functional.linear(x * E**-0.5, weight)

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            next_token_loss(head, weight, hidden, targets, torch.ones_like(targets, dtype=torch.bool)).backward()

    row(f"loss of {tokens} tokens, forward and backward", milliseconds(run))


def training_step(model, whole: bool, precision: str = "bf16", rate: float = 1e-4, most: int = 65_536):
    """A function from at most so many tokens [B, L] to the loss, per token, of one step that learns to repeat them.

    All layers are compiled as one graph, or each as `gss train` does it.
    """
    prepare_layers(model, TrainConfig(model=model.config, compile=not whole), most)
    forward = torch.compile(model.hidden) if whole else model.hidden
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step(tokens, targets=None):
        targets = tokens if targets is None else targets
        mask = torch.ones_like(tokens, dtype=torch.bool)
        with running(model, precision):
            hidden, _ = forward(tokens, keep_state=False)
            weight, scale = model.embedding.weight, model.head_scale
            loss = next_token_loss(model.logits, weight, hidden, targets, mask, scale=scale) / tokens.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def training(
    batch: int, length: int, profile: bool, whole: bool, name: str = "gss", rows: int = 45, precision: str = "bf16"
) -> None:
    torch._dynamo.reset()
    model = gss.build_model(gss.preset(name)).cuda()
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")
    step = partial(training_step(model, whole, precision, most=tokens.numel()), tokens)
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    median = sorted(times)[len(times) // 2]
    what = f"training {name} {batch}x{length}{'' if precision == 'bf16' else f', {precision}'}"
    row(what, batch * length / median, "k tokens/s")
    row(f"{what}: step", median)
    row(f"{what}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
    if profile:
        show_profile(step, rows)


@torch.no_grad()
def prefill(length: int) -> None:
    """A prompt read whole, and where the time goes."""
    model = gss.build_model(gss.preset("gss")).cuda().eval()
    tokens = torch.randint(0, V, (1, length), device="cuda")

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            read(model, tokens, piece=length)

    row(f"prefill 1x{length}", milliseconds(run))
    show_profile(run)


def show_profile(step, rows: int = 45) -> None:
    """The kernels of one step by the time they take in all."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as trace:
        step()
        torch.cuda.synchronize()
    on_gpu = [k for k in trace.key_averages() if k.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [k for k in on_gpu if not getattr(k, "is_user_annotation", False)]
    kernels.sort(key=lambda k: -k.self_device_time_total)
    print(f"all kernels {sum(k.self_device_time_total for k in kernels) / 1e3:.3f} ms, of which", flush=True)
    for k in kernels[:rows]:
        print(f"{k.self_device_time_total / 1e3:9.3f} ms {k.count:5} x  {k.key[:110]}", flush=True)


def product_rate() -> None:
    """What the products of a training step are measured against."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    row("bf16 matrix product 8192", 2 * 8192**3 / milliseconds(lambda: a @ a) / 1e9, "TFLOP/s")


def run_parts(
    parts: Mapping[str, Callable[[], object]], out: Path | None, seconds: float = math.inf, commit: str = ""
) -> None:
    """Each part in turn, while there is time; the rows of all, with where they come from, go to the file."""
    about = header(commit)
    runner = Parts(
        out,
        lambda: {**about, "rows": TABLE},
        lambda name, why: TABLE.append({"name": name, "value": None, "unit": "", "note": why}),
        seconds,
    )
    for name, part in parts.items():
        runner.run(name, part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--whole", action="store_true", help="compile the layers together instead of one by one")
    parser.add_argument("--parts", default="convolution,modes,gates,losses,prefill,training")
    parser.add_argument("--shapes", default="16x4096")
    parser.add_argument("--model", default="gss", help="the preset to train")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    chosen = arguments.parts.split(",")
    actions: dict[str, Callable[[], object]] = {
        "convolution": lambda: (convolution(16, 4096), convolution(32, 1024)),
        "modes": lambda: modes(4096),
        "gates": lambda: gates(65_536),
        "losses": lambda: losses(65_536),
        "prefill": lambda: prefill(65_536),
        "training": product_rate,
    }
    for shape in arguments.shapes.split(",") if "training" in chosen else ():
        batch, length = map(int, shape.split("x"))
        given = (batch, length, arguments.profile, arguments.whole, arguments.model)
        actions[f"training {shape}"] = partial(training, *given)
        chosen.append(f"training {shape}")
    run_parts({name: actions[name] for name in chosen if name in actions}, arguments.out, commit=arguments.commit)


if __name__ == "__main__":
    main()
