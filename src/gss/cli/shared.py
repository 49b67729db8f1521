"""Code shared by the commands: options, lists of numbers, tables and progress bars."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

PLAIN_EVERY = 10.0  # seconds between plain lines

Run = Annotated[Path | None, Argument(help="A run, or a folder of `gss export`. Default: `box`, the bundled model.")]
Step = Annotated[int | None, Option(help="The checkpoint's step. Default: the newest good one.")]
Device = Annotated[str, Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Precision = Annotated[str, Option(help="fp32, bf16 (autocast), or auto: bf16 on a GPU, else fp32.")]
Weights = Annotated[str | None, Option(help="Weights in bf16, int8 or int4; fp32 unpacks them. Default: as stored.")]
Speculate = Annotated[
    bool | None,
    Option(
        "--speculate/--no-speculate",
        help="Speculative decoding by lookup; same text. Default: on a CPU, and on a GPU at temperature 0.",
    ),
]
State = Annotated[Path | None, Option(help="Start from a state made by `gss read` or `gss train --tune state`.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Force = Annotated[bool, Option("--force", help="Replace what an earlier command made in OUT.")]


def whole_numbers(text: str, what: str = "lengths", example: str = "512,4096") -> list[int]:
    """The numbers of an option that takes several."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is not a list of {what}: write integers separated by commas, for example {example}")
    return [int(part) for part in parts]


def print_table(
    title: str | None,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    words: Sequence[str] = (),
) -> None:
    """Print rows of text under a header; columns hold numbers, except the first and those that are named as `words`.

    Numbers are never cut: a table is wider than the terminal where it must be.
    """
    drawn = Table(title=escape(title) if title else None, caption=escape(caption))
    cells, least = [list(map(escape, row)) for row in rows], 4  # the border, and room for Rich to round
    for place, name in enumerate(header):
        longest = 20 if name in words else max((len(row[place]) for row in cells), default=0)
        width = max(longest, *(min(len(word), 12) for word in name.split()))  # a header may be folded
        side = "left" if place == 0 or name in words else "right"
        drawn.add_column(escape(name), justify=side, min_width=width, overflow="fold")  # type: ignore[arg-type]
        least += width + 3
    for row in cells:
        drawn.add_row(*row)
    Console(width=max(Console().width, least)).print(drawn)


@contextmanager
def share_bar(stage: str) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, an occasional plain line where standard error is piped.

    Yields show(stage, share done from 0 to 1).
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    last_time, last_stage = time.monotonic(), ""

    def show_plain(stage: str, share: float) -> None:
        nonlocal last_time, last_stage
        if time.monotonic() - last_time >= PLAIN_EVERY or (share >= 1 and stage != last_stage):
            print(f"{stage}: {share:.0%}", file=sys.stderr, flush=True)
            last_time, last_stage = time.monotonic(), stage if share >= 1 else last_stage

    console = Console(stderr=True)
    if not console.is_terminal:
        yield show_plain
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task(stage, total=1.0)
        yield lambda stage, share: bars.update(task, description=stage, completed=share)
