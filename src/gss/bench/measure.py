"""Timing and peak memory, fair to all sides: runs take turns in one process, memory is measured in a fresh one each."""

import gc
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Name = TypeVar("Name")


def median_seconds(contestants: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, float]:
    """Median time of each function, after a warm-up; they take turns, so that noise falls on all alike."""
    seconds: dict[Name, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, function in contestants.items():
            started = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def intervals(function: Callable[[], Any], repeats: int, device: "torch.device", warmup: int = 3) -> list[float]:
    """Seconds of each of `repeats` calls in a row, after warming up.

    On a GPU by events between calls that are not waited for, as a training loop does not wait either: where the host
    is the slower one, its time is what is measured.
    """
    import torch

    for _ in range(warmup):
        function()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            function()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def release(device: "torch.device") -> None:
    """Give back what nothing refers to any more, compiled code too: the next contestant starts afresh."""
    import torch

    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> int:
    """How far one run raises the peak memory of a new process, in which `prepare(*arguments)` made the function."""
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
    if sys.platform == "linux":  # a new process has its parent's ru_maxrss there, but a high-water mark of its own
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    if sys.platform == "win32":
        return 0  # not known without another package
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
