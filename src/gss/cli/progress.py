"""Progress of a long job: a bar on a terminal, an occasional plain line where the output is piped."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_EVERY = 10.0  # seconds between plain lines


@contextmanager
def share_bar(stage: str) -> Iterator[Callable[[str, float], None]]:
    """Yields show(stage, share done from 0 to 1), which draws on standard error."""
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
