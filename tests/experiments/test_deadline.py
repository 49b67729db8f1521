"""The deadline: SIGTERM at the right time, and no harm where nobody listens."""

import signal
import time

from experiments.deadline import deadline
from gss.training.loop import Interrupt


def test_a_deadline_is_heard_by_a_run() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with deadline(0.05) as limit, Interrupt() as interrupt:
        until = time.monotonic() + 5
        while interrupt.signal is None and time.monotonic() < until:
            time.sleep(0.01)
    assert limit.reached
    assert interrupt.signal is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_run_nothing_happens() -> None:
    with deadline(0.0) as limit:
        until = time.monotonic() + 5
        while not limit.reached and time.monotonic() < until:
            time.sleep(0.01)
    assert limit.reached
    with deadline(60.0) as limit:
        pass
    assert not limit.reached
    with deadline(None) as limit:
        pass
    assert not limit.reached
