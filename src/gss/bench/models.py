"""Whole models: training steps, prefill and decoding, in tokens per second, several presets in one run.

bf16 autocast on a GPU, float32 on a CPU, random tokens in memory. Correctness comes first, at every model: the loss and
gradients of a small batch, the first training step's loss, the last logits of a prompt, decoded logits. Where they are
not those of plain arithmetic nothing is reported. Times are medians after a warm-up.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gss.accounting import account
from gss.bench.check import Errors, autocast, check_decoding, check_training, joint_error, limited, plain_loss
from gss.bench.measure import intervals, median_seconds, release
from gss.bench.results import Measurement, Report, compared
from gss.data import Batch
from gss.decode import BLOCK, decoder
from gss.generate import read
from gss.model import LanguageModel, build_model
from gss.ops import fast
from gss.presets import PRESETS, preset
from gss.training.config import TrainConfig
from gss.training.distributed import World
from gss.training.step import Stepper

_SIZES = ("-tiny", "-small", "-lm1b")
Shapes = Sequence[tuple[int, int]]
"""(batch, length) pairs; decoding: (batch, context)."""


def presets_of(model: str, peers: Sequence[str]) -> list[str]:
    """A preset and those to measure beside it; a family (`transformer`, `dss`) is taken at the size of the first."""
    size = next((suffix for suffix in _SIZES if model.endswith(suffix)), "")
    names = [model]
    for peer in peers:
        name = next((name for name in (f"{peer}{size}", peer) if name in PRESETS), None)
        if name is None:
            raise ValueError(f"there is no peer {peer!r}: give transformer, dss or any other preset (see gss presets)")
        names.append(name)
    return names


@dataclass(frozen=True)
class TrainingSpeed:
    """What training one model at one shape gave."""

    tokens_per_second: float
    parameters: int
    peak_bytes: int | None = None
    """Of GPU memory; None on a CPU."""

    def rows(self, name: str, where: str, matmul_rate: float | None) -> list[Measurement]:
        """The speed; MFU where the machine's matrix rate is known; memory."""
        size = f"{self.parameters / 1e6:.1f}M parameters"
        rows = [Measurement(f"training {name}, {where}", self.tokens_per_second, "tokens/s", note=size)]
        if matmul_rate:
            mfu = 6 * self.parameters * self.tokens_per_second / matmul_rate
            rows.append(Measurement(f"MFU of {name}, {where}", mfu, "of matmul rate", note="6·parameters·tokens/s"))
        if self.peak_bytes is not None:
            rows.append(Measurement(f"peak memory of {name}, {where}", self.peak_bytes / 1e9, "GB"))
        return rows


def bench_train(
    models: Sequence[str],
    shapes: Shapes,
    device: torch.device,
    matmul_rate: float | None = None,
    compiled: bool = False,
    repeats: int = 10,
    report: Report = lambda text: None,
) -> list[Measurement]:
    """Rows for each preset at each (batch, length), and the errors of the small batch that was checked."""
    report("checking the loss and gradients of a small batch")
    errors = check_training(preset(models[0]), device, min(length for _, length in shapes))
    rows = [error.row(f"error of the {what}", f"{models[0]}, a small batch") for what, error in errors.items()]
    vocab_size = preset(models[0]).vocab_size

    def measure(where: str, batch: int, length: int, name: str) -> list[Measurement]:
        speed = measure_training(name, batch, length, device, compiled, repeats, vocab_size)
        return speed.rows(name, where, matmul_rate)

    for batch, length in shapes:
        where = f"{batch}×{length}"
        rows += compared(models, "training", where, partial(measure, where, batch, length), report)
    return rows


def measure_training(
    name: str, batch: int, length: int, device: torch.device, compiled: bool, repeats: int, vocab_size: int
) -> TrainingSpeed:
    """Train a preset from fresh, with the training step of `gss train`; nothing is left in memory."""
    release(device)
    torch.manual_seed(0)
    model_config = preset(name, vocab_size=vocab_size)
    config = TrainConfig(
        preset=name, model=model_config, steps=repeats + 10, length=length, batch_tokens=batch * length,
        compile=compiled, device=device.type,
    )  # fmt: skip
    tokens = torch.randint(0, vocab_size, (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    try:
        model = build_model(model_config).to(device)
        expected = plain_loss(model, inputs, targets)
        stepper = Stepper(model, config, World(device))
        mask = torch.ones_like(targets, dtype=torch.bool)
        starts = torch.zeros_like(mask)
        starts[:, 0] = True
        step = Batch(inputs, targets, mask, starts, 0, 0)
        first = stepper.step(step, 0).loss.item()
        if not abs(first - expected) <= 5e-3 * abs(expected):
            raise ValueError(f"{name}: the first step's loss is {first:.4f}, the plain float32 one {expected:.4f}")
        seconds = statistics.median(intervals(lambda: stepper.step(step, 1), repeats, device, warmup=2))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return TrainingSpeed(inputs.numel() / seconds, account(model_config, length).parameters, peak)
    finally:
        release(device)


def bench_prefill(
    models: Sequence[str],
    shapes: Shapes,
    device: torch.device,
    pieces: Sequence[int] = (),
    compiled: bool = False,
    repeats: int = 10,
    report: Report = lambda text: None,
) -> list[Measurement]:
    """Rows for each preset at each (batch, length), read in pieces of each size (default: whole)."""
    rows: list[Measurement] = []

    def measure(where: str, batch: int, length: int, piece: int, name: str) -> list[Measurement]:
        speed, error = measure_prefill(name, batch, length, piece, device, compiled, repeats)
        what = f"prefill {name}, {where}"
        return [Measurement(what, speed, "tokens/s"), error.row(f"error of {what}", "last logits")]

    for batch, length in shapes:
        for piece in dict.fromkeys(min(piece, length) for piece in pieces or (length,)):
            where = f"{batch}×{length}" + (f" in pieces of {piece:,}" if piece < length else "")
            rows += compared(models, "prefill", where, partial(measure, where, batch, length, piece), report)
    return rows


@torch.no_grad()
def measure_prefill(
    name: str, batch: int, length: int, piece: int, device: torch.device, compiled: bool, repeats: int
) -> tuple[float, Errors]:
    """Tokens per second of a preset, and how far its last logits are from plain float32 (refused where too far)."""
    release(device)
    torch.manual_seed(0)
    model = build_model(preset(name)).to(device).eval()
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device=device)

    def prefill() -> Tensor:
        with autocast(device):
            return read(model, tokens, piece=piece)[0]

    with fast.disabled():
        exact, plain = read(model, tokens)[0], prefill()
    if compiled:
        for layer in model.layers:
            layer.compile()
    try:
        errors = limited(joint_error([prefill()], [exact]), joint_error([plain], [exact]), device)
        errors.demand("the last logits of the prompt")
        return tokens.numel() / statistics.median(intervals(prefill, repeats, device, warmup=1)), errors
    finally:
        release(device)


@torch.no_grad()
def bench_decode(
    models: Sequence[str],
    shapes: Shapes,
    device: torch.device,
    repeats: int = 5,
    report: Report = lambda text: None,
) -> list[Measurement]:
    """Rows for each preset at each (batch, context); and how much longer a token takes after the slowest context."""
    rows: list[Measurement] = []
    speeds: dict[str, dict[tuple[int, int], float]] = {}
    for name in models:
        report(f"checking the decoder of {name}")
        torch.manual_seed(0)
        subject = build_model(preset(name)).to(device).eval()
        rows.append(check_decoding(subject).row(f"error of decode {name}", "logits"))
        report(f"{name} reads and decodes")
        rounds = {shape: decoding_round(subject, *shape) for shape in shapes}
        seconds = median_seconds({shape: run for shape, (run, _) in rounds.items()}, repeats)  # all in turns
        speeds[name] = {shape: shape[0] * rounds[shape][1] / taken for shape, taken in seconds.items()}
        del rounds, subject
        release(device)
    for batch, context in shapes:
        where = f"batch {batch}, context {context:,}"
        values = [Measurement(f"decode {name}, {where}", speeds[name][batch, context], "tokens/s") for name in models]
        rows += [values[0], *(value.beside(models[0], values[0].value) for value in values[1:])]
    alone = {context: speed for (batch, context), speed in sorted(speeds[models[0]].items()) if batch == 1}
    if len(alone) > 1:
        name = f"decode {models[0]}, a token after {min(alone):,} → {max(alone):,}"
        ratio = max(alone.values()) / min(alone.values())
        rows.append(Measurement(name, ratio, "× as long", 1.05, note="the slowest context over the fastest"))
    return rows


def decoding_round(model: LanguageModel, batch: int, context: int) -> tuple[Callable[[], None], int]:
    """What decodes some tokens of each row greedily after random ones and waits for them, and how many. Whole blocks,
    so that folding them into the state is in the time; several where a graph makes them short."""
    device = model.device
    tokens = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    token = torch.zeros(batch, dtype=torch.int64, device=device)
    with autocast(device):
        going_on = decoder(model, read(model, tokens)[1])
    count = BLOCK * going_on.stride

    def run() -> None:
        nonlocal token
        with autocast(device):
            token = going_on.generate(count, token).tokens[-1]
        token.cpu()

    return run, count
