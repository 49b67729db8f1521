"""Peak memory of a function, measured in a separate process."""

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_bytes(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> int:
    """By how much one call of the function that `prepare(*arguments)` returns raises the peak memory of a new
    process.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report_peak, args=(sender, prepare, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError("the process that measures memory ended without an answer: out of memory?") from None
    finally:
        process.join()


def _report_peak(sender: Any, prepare: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    function = prepare(*arguments)
    before = _peak()
    function()
    sender.send(_peak() - before)


def _peak() -> int:
    if sys.platform == "linux":  # there a new process inherits its parent's ru_maxrss, but not the high-water mark
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    if sys.platform == "win32":
        return 0  # not known without another package
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
