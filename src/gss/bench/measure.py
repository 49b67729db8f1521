"""Timing that is fair to all sides: a warm-up first, then medians of runs that take turns."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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


def intervals(function: Callable[[], Any], repeats: int, device: torch.device, warmup: int = 3) -> list[float]:
    """Seconds of each of `repeats` calls in a row, after warming up.

    On a GPU by events between calls that are not waited for, as a training loop does not wait either: where the host
    is the slower one, its time is what is measured.
    """
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


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more, compiled code too: the next contestant starts afresh."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
