"""A measurement in parts, the most important first; if one fails or takes too long, the others still run."""

import math
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gss.io.files import finite, write_json


class Parts:
    """Runs parts one after another within a given time, and writes the results so far to a file after each.

    content         returns the contents of the file
    unmeasured      called with the name of a part that has no result, and the reason
    clean           called after each part
    """

    def __init__(
        self,
        out: Path | None,
        content: Callable[[], Any],
        unmeasured: Callable[[str, str], None],
        seconds: float = math.inf,
        clean: Callable[[], object] = torch.cuda.empty_cache,
    ) -> None:
        self._out, self._content, self._unmeasured, self._clean = out, content, unmeasured, clean
        self._end = time.monotonic() + seconds

    def run(self, name: str, work: Callable[[], object], needs: float = 0.0, most: float = math.inf) -> None:
        """Run a part that needs about `needs` seconds; stop it after `most`."""
        begun = time.monotonic()
        left = self._end - begun
        print(f"\n== {name}", flush=True)
        if left < needs:
            self._unmeasured(name, f"left out: {left:.0f} s are left, it needs {needs:.0f}")
        else:
            limited = min(most, left) if most < math.inf else 0
            before = signal.signal(signal.SIGALRM, _too_long)
            signal.setitimer(signal.ITIMER_REAL, limited)
            try:
                work()
            except Exception:  # one result among others
                problem = traceback.format_exc().strip()[-2000:]
                print(problem, flush=True)
                self._unmeasured(name, problem)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            self._clean()
        print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._out, finite(self._content()))


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError("the part took too long")
