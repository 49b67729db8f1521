"""Training steps, prefill and decoding of a preset, in tokens per second.

bf16 autocast on a GPU, float32 on a CPU, random tokens in memory; medians after a warm-up. Results are checked against
plain arithmetic first, and nothing is reported if they differ.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gss.accounting import account
from gss.bench.check import Figure, check_decoding, check_training, checked, plain_loss
from gss.bench.machine import autocast, intervals, median_seconds, release
from gss.data import Batch
from gss.decode import BLOCK, decoder
from gss.generate import read
from gss.model import LanguageModel, build_model
from gss.ops import fast
from gss.presets import preset
from gss.training.config import TrainConfig
from gss.training.distributed import World
from gss.training.step import Stepper

Shapes = Sequence[tuple[int, int]]
"""(batch, length) pairs; decoding: (batch, context)."""
Report = Callable[[str], None]
"""Told what is being measured."""


def bench_train(
    name: str,
    shapes: Shapes,
    device: torch.device,
    matmul_rate: float | None = None,
    compiled: bool = False,
    repeats: int = 10,
    report: Report = lambda text: None,
) -> list[Figure]:
    """The speed of a preset's training steps at each shape; MFU where the matrix rate is known; memory on a GPU."""
    report("checking the loss and gradients of a small batch")
    rows = check_training(preset(name), device, min(length for _, length in shapes))
    for batch, length in shapes:
        where = f"{name}, {batch}×{length}"
        report(f"training {where}")
        speed, parameters, peak = measure_training(name, batch, length, device, compiled, repeats)
        rows.append(Figure(f"training {where}", speed, "tokens/s", note=f"{parameters / 1e6:.1f}M parameters"))
        if matmul_rate:
            mfu = 6 * parameters * speed / matmul_rate
            rows.append(Figure(f"MFU of {where}", mfu, "of matmul rate", note="6·parameters·tokens/s"))
        if peak is not None:
            rows.append(Figure(f"peak memory of {where}", peak / 1e9, "GB"))
    return rows


def measure_training(
    name: str,
    batch: int,
    length: int,
    device: torch.device,
    compiled: bool,
    repeats: int,
    vocab_size: int | None = None,
) -> tuple[float, int, int | None]:
    """Tokens per second of the training step of `gss train`, the parameters, and the peak of GPU memory."""
    release(device)
    torch.manual_seed(0)
    model_config = preset(name, **({} if vocab_size is None else {"vocab_size": vocab_size}))
    config = TrainConfig(
        preset=name, model=model_config, steps=repeats + 10, length=length, batch_tokens=batch * length,
        compile=compiled, device=device.type,
    )  # fmt: skip
    tokens = torch.randint(0, model_config.vocab_size, (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    try:
        model = build_model(model_config).to(device).eval()  # the first step is compared without dropout
        expected = plain_loss(model, inputs, targets)
        stepper = Stepper(model, config, World(device))
        mask = torch.ones_like(targets, dtype=torch.bool)
        starts = torch.zeros_like(mask)
        starts[:, 0] = True
        step = Batch(inputs, targets, mask, starts, 0, 0)
        first = stepper.step(step, 0).loss.item()
        if not abs(first - expected) <= 5e-3 * abs(expected):
            raise ValueError(f"{name}: the first step's loss is {first:.4f}, but {expected:.4f} in plain float32")
        model.train()
        seconds = statistics.median(intervals(lambda: stepper.step(step, 1), repeats, device, warmup=2))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return inputs.numel() / seconds, account(model_config, length).parameters, peak
    finally:
        release(device)


@torch.no_grad()
def bench_prefill(
    name: str,
    shapes: Shapes,
    device: torch.device,
    compiled: bool = False,
    piece: int | None = None,
    repeats: int = 10,
    report: Report = lambda text: None,
) -> list[Figure]:
    """The speed at which a preset reads prompts of each shape, in pieces if asked, and the error of its last logits."""
    rows: list[Figure] = []
    for batch, length in shapes:
        where = f"prefill {name}, {batch}×{length}" + (f" in pieces of {piece:,}" if piece and piece < length else "")
        report(where)
        release(device)
        torch.manual_seed(0)
        model = build_model(preset(name)).to(device).eval()
        tokens = torch.randint(0, model.config.vocab_size, (batch, length), device=device)

        def prefill(model: LanguageModel = model, tokens: Tensor = tokens) -> Tensor:
            with autocast(device):
                return read(model, tokens, piece=piece or tokens.shape[1])[0]

        with fast.disabled():
            exact, plain = read(model, tokens)[0], prefill()
        for layer in model.layers if compiled else ():
            layer.compile()
        found = checked(f"error of {where}", "the last logits of the prompt", [prefill()], [plain], [exact])
        speed = tokens.numel() / statistics.median(intervals(prefill, repeats, device, warmup=1))
        rows += [Figure(where, speed, "tokens/s"), found]
        del model, prefill
        release(device)
    return rows


@torch.no_grad()
def bench_decode(
    name: str, shapes: Shapes, device: torch.device, repeats: int = 5, report: Report = lambda text: None
) -> list[Figure]:
    """The speed of greedy decoding at each shape, and the ratio between the slowest and the fastest context."""
    report(f"checking the decoder of {name}")
    torch.manual_seed(0)
    model = build_model(preset(name)).to(device).eval()
    rows = [check_decoding(model, f"error of decode {name}")]
    report(f"{name} reads and decodes")
    rounds = {shape: decoding_round(model, *shape) for shape in shapes}
    seconds = median_seconds({shape: run for shape, (run, _) in rounds.items()}, repeats)  # all in turns
    speeds = {shape: shape[0] * rounds[shape][1] / taken for shape, taken in seconds.items()}
    rows += [Figure(f"decode {name}, batch {b}, context {c:,}", speed, "tokens/s") for (b, c), speed in speeds.items()]
    alone = {context: speed for (batch, context), speed in sorted(speeds.items()) if batch == 1}
    if len(alone) > 1:
        where = f"decode {name}, a token after {min(alone):,} → {max(alone):,}"
        ratio = max(alone.values()) / min(alone.values())
        rows.append(Figure(where, ratio, "× as long", 1.05, note="the slowest context over the fastest"))
    del model, rounds
    release(device)
    return rows


def decoding_round(model: LanguageModel, batch: int, context: int) -> tuple[Callable[[], None], int]:
    """A function that decodes some tokens of each row greedily after random ones and waits for them, and how many it
    decodes: whole blocks, so that the time of folding them into the state is included."""
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
