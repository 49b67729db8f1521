"""A deadline for training: when it is reached, this process gets the signal that makes a run save and stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_AGAIN_SECONDS = 1.0


@dataclass
class Deadline:
    """Whether it was reached."""

    reached: bool = False


@contextmanager
def deadline(seconds: float | None) -> Iterator[Deadline]:
    """While entered, sends SIGTERM to this process so many seconds from now; None: never. Main thread only."""
    state = Deadline()
    if seconds is None:
        yield state
        return

    over = threading.Event()

    def strike() -> None:
        wait = max(0.0, seconds)
        while not over.wait(wait):
            state.reached = True
            os.kill(os.getpid(), signal.SIGTERM)
            wait = _AGAIN_SECONDS

    # Training takes the first signal over while it runs. Before and after it this handler keeps the process alive, and
    # a signal that came too early to be heard comes again.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
