"""Progress of a run: a live line on a terminal, plain lines in a pipe; TensorBoard and Weights & Biases if enabled.

Also measures the machine's matrix-product rate, the reference for MFU.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gss.config import to_mapping
from gss.training.config import TrainConfig


class Tracker(NamedTuple):
    """Receives the metrics of each step by name, until it is closed."""

    add: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_trackers(config: TrainConfig, folder: Path) -> list[Tracker]:
    """The trackers that a run's settings enable."""
    trackers = []
    for name, opened in {"tensorboard": _tensorboard, "wandb": _wandb}.items():
        try:
            trackers += [opened(config, folder)] if getattr(config.report, name) else []
        except ImportError:
            raise ValueError(f"report.{name} needs the {name} package: pip install 'gss-lm[{name}]'") from None
    return trackers


def _tensorboard(config: TrainConfig, folder: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def add(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(add, writer.close)


def _wandb(config: TrainConfig, folder: Path) -> Tracker:
    """One W&B run per run folder, continued when training resumes. Account and server are wandb's own settings."""
    import wandb

    run = wandb.init(
        project="gss",
        name=folder.name,
        id=hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest(),
        resume="allow",
        dir=str(folder),
        config=to_mapping(config),
    )
    return Tracker(lambda step, values: run.log(dict(values), step=step), run.finish)


class Progress:
    """Shows rows of metrics. On a terminal the last one is updated in place, with the time left counting down."""

    def __init__(self, steps: int, trackers: Sequence[Tracker] = (), quiet: bool = False) -> None:
        self._steps = steps
        self._console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._row: Mapping[str, Any] | None = None
        self._ends = 0.0
        self._began: tuple[int, float] | None = None
        self._trackers = trackers

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(console=self._console, transient=False, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        for tracker in self._trackers:
            tracker.close()

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def training(self, row: Mapping[str, Any], seconds_left: float) -> None:
        """The newest training row."""
        self._row, self._ends = row, time.monotonic() + seconds_left
        if self._live is not None:
            self.stepped(row["step"])
        else:
            self._console.print(Text(training_line(row, self._steps, seconds_left)))

    def stepped(self, step: int) -> None:
        """Count another step in the live line; its metrics are not known yet."""
        if self._live is None:
            return
        now = time.monotonic()
        first, began = self._began = self._began or (step, now)
        line = f"step {step:,}/{self._steps:,} · the first figures are on their way"
        if self._row is not None:
            left = self._ends - now
            line = training_line({**self._row, "step": step}, self._steps, left, self._console.width)
        elif step > first:
            line += f" · about {duration((self._steps - step) * (now - began) / (step - first))} left"
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.add(step, values)


def training_line(row: Mapping[str, Any], steps: int, seconds_left: float, width: int | None = None) -> str:
    """One line of progress. The least important parts are left out where it would be wider than `width`."""
    parts = {
        "step": f"step {row['step']:,}/{steps:,}",
        "loss": f"loss {row['loss']:.4f}",
        "perplexity": f"perplexity {perplexity(row['loss']):.2f}",
        "rate": f"rate {row['learning_rate']:.2e}",
        "gradient": f"gradient {row['gradient_norm']:.2f}",
        "speed": f"{row['tokens_per_second']:,.0f} tokens/s",
        "mfu": f"MFU {row['mfu']:.1%}" if row.get("mfu") is not None else "",
        "left": f"{duration(seconds_left)} left",
    }
    for dropped in ("", "gradient", "rate", "mfu", "perplexity"):
        parts.pop(dropped, None)
        line = " · ".join(filter(None, parts.values()))
        if width is None or len(line) < width:
            break
    return line


def perplexity(loss: float) -> float:
    """e to the loss, infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def duration(seconds: float) -> str:
    """A duration in short form: 45s, 3m20s, 5h07m, 2d04h."""
    whole = max(0, round(seconds))
    for large, small, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{large}{whole % size // part:02d}{small}"
    return f"{whole}s"


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a large matrix product on this GPU, which MFU refers to; None on a CPU, where it means little.

    It is measured, since a table of GPUs would go stale and a GPU's rate depends on its power limit.
    """
    if device.type != "cuda":
        return None
    size = 8192
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(8):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ a
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
