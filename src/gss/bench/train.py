"""Training steps: tokens a second, the share of the machine's matrix rate, and memory, beside peers.

A step is the whole of it: forward, loss, backward, clipping, AdamW; bf16 autocast on a GPU. Ours is the step that
`gss train` runs, on batches of random tokens in memory. The loss and gradients of a small batch are checked first, and
the first timed model's loss against the plain float32 one; where they differ nothing is reported.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gss.accounting import account, flops_per_token
from gss.bench.check import autocast, check_training, paths
from gss.bench.foreign import FOREIGN, Foreign, Unavailable, build_foreign
from gss.bench.measure import intervals, release
from gss.bench.results import Row, missing
from gss.config import ModelConfig
from gss.data import Batch
from gss.loss import next_token_loss
from gss.model import LanguageModel, build_model
from gss.presets import PRESETS, preset
from gss.train.config import OptimizerConfig, TrainConfig
from gss.train.distributed import World
from gss.train.optim import build_optimizer, clip_gradients
from gss.train.step import Stepper

_SIZES = ("-tiny", "-small", "-lm1b")


@dataclass(frozen=True)
class Training:
    """What training one model at one shape gave."""

    tokens_per_second: float
    parameters: int
    flops: float
    """A token: 6 · parameters, the usual count, which MFU is made of."""
    accounted_flops: float | None
    """A token: three forward passes by `gss.accounting`, attention and convolutions included; ours alone."""
    peak_bytes: int | None
    """Of GPU memory; None on a CPU."""

    def mfu(self, matmul_rate: float) -> float:
        """The share of the machine's matrix rate that 6 · parameters · tokens/s make."""
        return self.flops * self.tokens_per_second / matmul_rate


def bench_train(
    *,
    model: str,
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    matmul_rate: float,
    peers: Sequence[str] = (),
    compiled: bool = False,
    use_fast: bool = True,
    repeats: int = 10,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows for the preset and each peer at each (batch, length), and the errors of the small batch that was checked."""
    names = [resolve_peer(peer, model) for peer in peers]
    config = preset(model)
    rows: list[Row] = []
    report("checking the loss and gradients of a small batch")
    with paths(use_fast):
        errors = check_training(config, device, min(length for _, length in shapes))
    release(device)
    for what, error in errors.items():
        note = f"{model}, a small batch against float64; plain {error.plain:.1e}"
        rows.append(Row(f"error of the {what}", error.measured, "relative error", error.limit, note=note))
    for batch, length in shapes:
        where = f"{batch}×{length}"
        report(f"{model} at {where}")
        ours = measure_training(model, batch, length, device, compiled, use_fast, repeats)
        rows += training_rows(model, where, ours, matmul_rate)
        for name in names:
            report(f"{name} at {where}")
            try:
                theirs = measure_training(name, batch, length, device, compiled, use_fast, repeats, like=config)
            except Exception as error:  # a peer that fails is a row that says so
                release(device)
                rows.append(missing(f"training {name}, {where}", "tokens/s", reason(error)))
                continue
            rows += training_rows(name, where, theirs, matmul_rate)
            rows.append(ratio_row(f"training {model} over {name}, {where}", name, ours, theirs))
    return rows


def training_rows(name: str, where: str, result: Training, matmul_rate: float, note: str = "") -> list[Row]:
    """Speed, MFU by both counts and memory as rows."""
    size = f"{result.parameters / 1e6:.1f}M parameters"
    rows = [
        Row(f"training {name}, {where}", result.tokens_per_second, "tokens/s", note=f"{size}{note}"),
        Row(f"MFU of {name}, {where}", result.mfu(matmul_rate), "of matmul rate", note="6·parameters·tokens/s"),
    ]
    if result.accounted_flops is not None:
        share = result.accounted_flops * result.tokens_per_second / matmul_rate
        rows.append(Row(f"MFU of {name}, {where}, accounted", share, "of matmul rate", note="gss.accounting's FLOPs"))
    if result.peak_bytes is not None:
        rows.append(Row(f"peak memory of {name}, {where}", result.peak_bytes / 1e9, "GB"))
    return rows


def ratio_row(name: str, peer: str, ours: Training, theirs: Training, goal: float | None = None) -> Row:
    """Our speed over a peer's."""
    ratio = ours.tokens_per_second / theirs.tokens_per_second
    return Row(name, ratio, "×", goal, peer, ratio)


def resolve_peer(peer: str, model: str) -> str:
    """The peer's own name; a family of ours (`transformer`, `dss`) at the size of the model measured."""
    size = next((suffix for suffix in _SIZES if model.endswith(suffix)), "")
    if f"{peer}{size}" in PRESETS:
        return f"{peer}{size}"
    if peer in PRESETS or peer in FOREIGN:
        return peer
    raise ValueError(f"there is no peer {peer!r}; choose from: {', '.join(FOREIGN)}, or the name of a preset")


def reason(error: BaseException) -> str:
    """Why a contestant has no figure, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, Unavailable):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:160]


def measure_training(
    name: str,
    batch: int,
    length: int,
    device: torch.device,
    compiled: bool,
    use_fast: bool,
    repeats: int,
    like: ModelConfig | None = None,
) -> Training:
    """Train a preset, or a foreign model of about the size of `like`, from fresh; nothing is left in memory."""
    release(device)
    torch.manual_seed(0)
    vocabulary = (like or preset(name)).vocab_size
    tokens = torch.randint(0, vocabulary, (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    try:
        with paths(use_fast):
            if name in FOREIGN:
                assert like is not None
                return _measure_foreign(name, like, inputs, targets, compiled, repeats)
            return _measure_ours(name, like, inputs, targets, compiled, repeats)
    finally:
        release(device)


def _measure_ours(
    name: str, like: ModelConfig | None, inputs: Tensor, targets: Tensor, compiled: bool, repeats: int
) -> Training:
    (rows, length), device = inputs.shape, inputs.device
    model_config = preset(name, vocab_size=like.vocab_size) if like else preset(name)
    config = TrainConfig(
        preset=name,
        model=model_config,
        steps=repeats + 10,
        length=length,
        batch_tokens=rows * length,
        compile=compiled,
        device=device.type,
    )
    model = build_model(config.model).to(device)
    expected = _plain_loss(model, inputs, targets)
    release(device)
    stepper = Stepper(model, config, World(device))
    mask = torch.ones_like(targets, dtype=torch.bool)
    starts = torch.zeros_like(mask)
    starts[:, 0] = True
    batch = Batch(inputs, targets, mask, starts, 0, 0)
    first = stepper.step(batch, 0).loss.item()
    if not abs(first - expected) <= 5e-3 * abs(expected):
        raise ValueError(f"{name}: the first step's loss is {first:.4f}, the plain float32 one {expected:.4f}")
    seconds = statistics.median(intervals(lambda: stepper.step(batch, 1), repeats, device, warmup=2))
    parameters = account(config.model, length).parameters
    return Training(
        inputs.numel() / seconds,
        parameters,
        6 * parameters,
        3 * flops_per_token(config.model, length),
        _peak(device),
    )


@torch.no_grad()
def _plain_loss(model: LanguageModel, inputs: Tensor, targets: Tensor) -> float:
    """The mean loss by plain float32 arithmetic, a row at a time."""
    total = 0.0
    with paths(use_fast=False):
        for row in range(inputs.shape[0]):
            tokens, wanted = inputs[row : row + 1], targets[row : row + 1]
            hidden, _ = model.hidden(tokens, keep_state=False)
            counted = torch.ones_like(wanted, dtype=torch.bool)
            total += next_token_loss(model.logits, model.embedding.weight, hidden, wanted, counted).item()
    return total / targets.numel()


def _measure_foreign(
    name: str, like: ModelConfig, inputs: Tensor, targets: Tensor, compiled: bool, repeats: int
) -> Training:
    device = inputs.device
    model: Foreign = build_foreign(name, like, inputs.shape[1]).to(device)
    if compiled and model.compilable:
        model.module.compile()
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-4))
    parameters = list(model.parameters())

    def step() -> Tensor:
        with autocast(device):
            loss = model(inputs, targets)
        loss.backward()
        clip_gradients(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    first = step().item()
    if not first < float("inf"):
        raise ValueError(f"the loss is {first}")
    seconds = statistics.median(intervals(step, repeats, device, warmup=2))
    count = model.parameter_count
    return Training(inputs.numel() / seconds, count, 6 * count, None, _peak(device))


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
