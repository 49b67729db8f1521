"""What a person sees of a run: a live line on a terminal, plain lines in a pipe, boards if asked.

Knows rows of numbers and the console; measures nothing itself but the machine's matrix-product rate.
"""

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gss.training.boards import Board


class Progress:
    """Shows rows as they come. On a terminal the last one stays in place, with the time left counting down."""

    def __init__(self, steps: int, boards: Sequence[Board] = (), quiet: bool = False) -> None:
        self._steps = steps
        self._console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._row: Mapping[str, Any] | None = None
        self._ends = 0.0
        self._began: tuple[int, float] | None = None
        self._boards = boards

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(console=self._console, transient=False, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        for board in self._boards:
            board.close()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text))

    def training(self, row: Mapping[str, Any], seconds_left: float) -> None:
        """The newest training row."""
        self._row, self._ends = row, time.monotonic() + seconds_left
        if self._live is not None:
            self.stepped(row["step"])
        else:
            self._console.print(Text(training_line(row, self._steps, seconds_left)))

    def stepped(self, step: int) -> None:
        """Another step was taken, of which nothing is known yet: on a terminal the line moves on."""
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
        """Numbers for the boards."""
        for board in self._boards:
            board.add(step, values)


def training_line(row: Mapping[str, Any], steps: int, seconds_left: float, width: int | None = None) -> str:
    """One line of progress. Where it would be wider than `width`, what matters least is left out."""
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
    """A stretch of time as people write it: 45s, 3m20s, 5h07m, 2d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def cpu_rate() -> float:
    """FLOP/s that training comes to on this CPU, as far as can be said without trying: for warnings."""
    return 1.5e10 * torch.get_num_threads()


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float | None:
    """FLOP/s of a large matrix product here: what MFU is measured against. None on a CPU, where it says little.

    Measured instead of looked up: a table of GPUs goes stale, and a GPU's limits depend on its power cap.
    """
    if device.type != "cuda":
        return None
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(8):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ a
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
