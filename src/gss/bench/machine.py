"""Timing, and the provenance of measurements: command, commit, hardware and versions."""

import gc
import itertools
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")
_PACKAGES = ("gss-lm", "torch", "triton", "transformers", "gated-state-spaces-pytorch", "flash-linear-attention")


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on a GPU, float32 on a CPU: what training and prefill run in."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def median_seconds(contestants: Mapping[Name, Callable[[], Any]], repeats: int) -> dict[Name, float]:
    """Median time of each function after a warm-up; they take turns, so that noise affects all of them equally."""
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

    On a GPU these are measured by events, without synchronizing between calls, as in a training loop; if the host is
    slower than the GPU, its time is what counts.
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
    """Free memory that is no longer referenced, compiled code included, so that the next measurement starts clean."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def provenance(device: torch.device) -> dict[str, Any]:
    """The provenance of a measurement: command, commit, hardware, versions and date."""
    there = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {
        "command": command_line(),
        "commit": source_commit(),
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **{name: there[name] for name in _PACKAGES if name in there}},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """The command line of this program; absolute paths are reduced to names, since folders differ between machines."""
    program = Path(sys.argv[0])
    script = program.suffix == ".py" and program.name != "__main__.py"
    start = ["python", "-m", f"experiments.{program.stem}"] if script else ["gss"]
    return shlex.join([*start, *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def source_commit() -> str:
    """The commit of the source tree, with "-dirty" if it has changes; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
