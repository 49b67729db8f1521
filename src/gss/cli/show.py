"""What commands show: tables, and the progress of a long job."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_EVERY = 10.0  # seconds between plain lines


def table(
    title: str | None,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    words: Sequence[str] = (),
) -> "Table":
    """Rows of text under a header; columns hold numbers, except the first and those that are named as `words`."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=escape(title) if title else None, caption=escape(caption))
    for place, name in enumerate(header):
        is_text = place == 0 or name in words
        drawn.add_column(escape(name), justify="left" if is_text else "right", no_wrap=place == 0)
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn


@contextmanager
def share_bar(stage: str) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, an occasional plain line where standard error is piped.

    Yields show(stage, share done from 0 to 1).
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task(stage, total=1.0)

        def show(stage: str, share: float) -> None:
            bars.update(task, description=stage, completed=share)

        yield show


def _plain_lines() -> Callable[[str, float], None]:
    last_time, last_stage = time.monotonic(), ""

    def show(stage: str, share: float) -> None:
        nonlocal last_time, last_stage
        if time.monotonic() - last_time >= PLAIN_EVERY or (share >= 1 and stage != last_stage):
            print(f"{stage}: {share:.0%}", file=sys.stderr, flush=True)
            last_time, last_stage = time.monotonic(), stage if share >= 1 else last_stage

    return show
