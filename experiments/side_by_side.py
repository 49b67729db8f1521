"""Runs of `gss reproduce`, several at a time on one GPU, within a given time; what is done is kept as a file a run.

    python -m experiments.side_by_side PLAN --data DATA --results RESULTS --work WORK --seconds 560 [--jobs 3]

PLAN is a text file with a run a line, the most important first: a target, a system and a corpus, then seeds and
training tokens if they are not the usual ones (`init init-1-4000 books 0,1,2 314572800`); `#` begins a remark. DATA
holds the prepared corpora. Each line becomes an `experiments.study … --shared` of its own, JOBS of them at a
time, under NVIDIA's MPS where it can be started. RESULTS is all that a later call needs: a run whose file is there is
not run again. WORK holds the checkpoints of runs that the time did not suffice for; a call that finds it goes on.

A line that begins with `alone` waits for all others to end and has the GPU to itself, so that its speed is kept; with
tokens of its own it is there for the speed, and little is scored.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gss.reproduce.settings import SCALES

_RESERVE_SECONDS = 10.0
_SCORED_FOR_SPEED = "65536"
_KILL_SECONDS = 15.0  # after its time limit a command is given so long to save


@dataclass(frozen=True)
class Line:
    """A line of the plan."""

    alone: bool
    target: str
    system: str
    corpus: str
    seeds: str = "0"
    tokens: str = ""

    @property
    def name(self) -> str:
        parts = (self.corpus, self.system, self.seeds, self.tokens, "alone" if self.alone else "")
        return "-".join(filter(None, parts)).replace(",", "+")


def parsed(text: str) -> list[Line]:
    """The lines of a plan; ValueError names one that says too little."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        alone = words[:1] == ["alone"]
        fields = words[1:] if alone else words
        if not words:
            continue
        if not 3 <= len(fields) <= 5:
            raise ValueError(f"line {number}: write TARGET SYSTEM CORPUS [SEEDS [TOKENS]], not {line.strip()!r}")
        lines.append(Line(alone, *fields))
    return lines


class Work:
    """The runs that are waiting, and what each of them takes with it and brings back."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.started = time.monotonic()
        self.results: Path = arguments.results
        self.work: Path = arguments.work
        self.lock = threading.Lock()

    @property
    def left(self) -> float:
        return self.arguments.seconds - (time.monotonic() - self.started)

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {what}", flush=True)

    def is_done(self, line: Line) -> bool:
        """Whether there is a file for every seed of a line. Of a run with another name that is the same, the command
        will know."""
        tokens = int(line.tokens or SCALES[self.arguments.scale].tokens or 0)
        names = [
            f"{line.corpus}.{line.system}.{self.arguments.scale}.*steps.seed{s}.json" for s in line.seeds.split(",")
        ]
        there = [[json.loads(path.read_text())["tokens"] for path in self.results.glob(name)] for name in names]
        return all(tokens in found for found in there)

    def go(self, lines: Sequence[Line], jobs: int) -> None:
        """All lines, so many at a time."""
        waiting = list(lines)

        def worker() -> None:
            while True:
                with self.lock:
                    if not waiting or self.left < 3 * _RESERVE_SECONDS:
                        return
                    line = waiting.pop(0)
                self.one(line)

        threads = [threading.Thread(target=worker) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def one(self, line: Line) -> None:
        """A command with an OUT of its own and a copy of all results so far: they tell speeds, and what is done."""
        out, log = self.work / "out" / line.name, self.work / "logs" / line.name
        (out / "results").mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._copy(self.results, out / "results")
        limit = self.left - _RESERVE_SECONDS
        with log.open("a") as file:
            process = subprocess.Popen(self.command(line, out, limit), stdout=file, stderr=subprocess.STDOUT)
            try:
                status: int | str = process.wait(timeout=limit + _KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = "killed, its time was long over"
        self._copy(out / "results", self.results)
        last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[-1]
        self.say(f"{line.name}: {status or ('not done' if last.startswith('not done') else 'done')}")

    def command(self, line: Line, out: Path, limit: float) -> list[str]:
        arguments = self.arguments
        words = [sys.executable, "-m", "experiments.study", line.target, "--scale", arguments.scale]
        words += ["--data", str(arguments.data), "--corpus", line.corpus, "--only", line.system, "--seeds", line.seeds]
        words += ["--out", str(out), "--work", str(self.work / "runs"), "--seconds", f"{limit:.0f}"]
        words += ["--tokens", line.tokens] if line.tokens else []
        words += [] if line.alone else ["--shared"]
        words += ["--evaluate-tokens", _SCORED_FOR_SPEED] if line.alone and line.tokens else []
        words += ["--commit", arguments.commit] if arguments.commit else []
        return [*words, *(item for setting in arguments.set for item in ("--set", setting))]

    def _copy(self, source: Path, target: Path) -> None:
        with self.lock:
            target.mkdir(parents=True, exist_ok=True)
            for path in source.glob("*.json"):
                if not (target / path.name).exists():
                    shutil.copyfile(path, target / path.name)


@contextlib.contextmanager
def shared_gpu(work: Path) -> Iterator[bool]:
    """NVIDIA's MPS while entered, so that kernels of several processes run at once; False where it is not there."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield False
        return
    folders = {"CUDA_MPS_PIPE_DIRECTORY": work / "mps", "CUDA_MPS_LOG_DIRECTORY": work / "mps-log"}
    for name, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder)
    nowhere = subprocess.DEVNULL
    start = subprocess.run([control, "-d"], check=False, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    running = start.returncode == 0
    try:
        yield running
    finally:
        if running:
            subprocess.run([control], input=b"quit\n", check=False, capture_output=True)
        for name in folders:
            del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--scale", default="small")
    parser.add_argument("--set", action="append", default=[], help="a setting of every run, key=value")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    work = Work(arguments)
    lines = [line for line in parsed(arguments.plan.read_text(encoding="utf-8")) if not work.is_done(line)]
    with shared_gpu(arguments.work) as shared:
        work.say(f"{len(lines)} lines to do, {arguments.jobs} at a time, {'with' if shared else 'without'} MPS")
        work.go([line for line in lines if not line.alone], arguments.jobs)
    work.go([line for line in lines if line.alone], 1)
    print("\n".join(sorted(path.stem for path in arguments.results.glob("*.json"))))


if __name__ == "__main__":
    main()
