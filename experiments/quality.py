"""Models of one size on the same tokens: trained with `gss.train`, scored document by document, compared in pairs.

    python -m experiments.quality experiments/quality.plan --data DATA --out RESULTS [--work runs/quality] \\
        [--workers 3] [--seconds 560] [--only-whole] [--set steps=800] [--hardware "NVIDIA H200"] [--commit ID]

PLAN is a text file with a run per line, the most important first: a corpus, a system and optionally the word `probe`;
`#` begins a comment. It is read again before each run, so you can add lines meanwhile. DATA/CORPUS is a folder of
`gss prepare` with the splits train and valid; runs on a corpus that does not exist yet wait for it while others run. A
system is a preset or a peer of `fla_layers.PEERS`, followed by `+key=value` for each changed setting, such as the seed.
RESULTS has a file per corpus. Runs in it are not repeated, and a run that was not finished in time resumes from its
last step with the same --work. If nothing can resume, `--only-whole` ends a run after 20 steps if it would not be
trained and scored in time, and tries the next one.

Settings are chosen on every other held-out document (`choose`) and reported on the rest (`report`), with ratios paired
over documents. A probed run also has `context`, the loss by the number of true tokens before (`gss.probe`), and
`stream`, the loss of concatenated held-out documents in windows of 65,536 tokens and in one of 1,048,576. Only probed
runs of a model that attends to everything are scored beyond their training length, with a sliding window of that
length, since the model has not learned larger distances.
"""

import argparse
import contextlib
import datetime
import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from experiments import fla_layers
from experiments.best_recipe import RESULTS, table
from gss.io.files import write_file

if TYPE_CHECKING:
    from gss.data import Dataset
    from gss.model import LanguageModel

RECIPE = {
    "steps": "800",
    "length": "4096",
    "batch_tokens": "131072",
    "compile": "true",
    "optimizer.name": "muon",
    "optimizer.learning_rate": "6.4e-3",
    "optimizer.warmup_steps": "100",
    "report.evaluate_every": "0",
    "report.sample_every": "0",
    "checkpoint.every": "400",
    "checkpoint.keep_last": "2",
}
"""The settings of every system, unless it changes them."""

LENGTHS = (512, 4096, 16_384, 65_536)
BATCH = 1 << 17  # tokens scored at a time
STOPPED = 128 + signal.SIGTERM
_COMPILING_STEPS, _TIMED_STEPS = 2, 20
_SCORING_SECONDS, _PROBING_SECONDS = 30.0, 20.0  # about what they take on an H200
_SAVING_SECONDS, _WORTH_STARTING_SECONDS = 15.0, 45.0


class Line(NamedTuple):
    """A run of a plan."""

    corpus: str
    system: str
    probed: bool = False


def parsed(text: str) -> list[Line]:
    """The runs of a plan, in order; ValueError names an invalid line."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) not in (0, 2, 3) or words[2:] not in ([], ["probe"]):
            raise ValueError(f"line {number}: write CORPUS SYSTEM, or CORPUS SYSTEM probe, not {line.strip()!r}")
        if words:
            lines.append(Line(words[0], words[1], len(words) == 3))
    return lines


def measure(
    system: str, corpus: Path, work: Path, changes: Sequence[str], probed: bool = False, until: float = math.inf
) -> dict[str, Any] | None:
    """Train a system, or resume training it, and score it; None if a signal stopped it, TimeoutError if it would not be
    done by the time `until`."""
    import torch

    import gss
    from gss.data import open_dataset
    from gss.io.runs import read_metrics, training_summary
    from gss.lm import load
    from gss.training import resolve

    name, *own = system.split("+")
    if name in fla_layers.PEERS:
        fla_layers.register()
        name, *peer = fla_layers.PEERS[name].split("+")
        own = peer + own
    recipe = dict(setting.split("=", 1) for setting in (*(f"{k}={v}" for k, v in RECIPE.items()), *changes, *own))
    held_out = open_dataset(corpus, "valid")
    # Not by all settings, which can be longer than a file name may be.
    folder = work / f"{corpus.name}-{name}-{zlib.crc32(system.encode()):08x}"
    config = resolve(name, None, [f"{key}={value}" for key, value in recipe.items()], held_out.vocab_size)
    with in_turn(work, until - _SCORING_SECONDS - (_PROBING_SECONDS if probed else 0)):
        if gss.train(config, corpus, folder, quiet=True).signal is not None:
            return None
    lm = load(folder, device="cuda" if torch.cuda.is_available() else "cpu")
    training = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    losses, summary = [row["loss"] for row in training], training_summary(training, config.batch_tokens)
    with unstoppable():
        found = scores(lm.model, held_out, config.longest, probed)
    return {
        "system": system,
        "settings": recipe,
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "tokens": config.steps * config.batch_tokens,
        "tokens_per_second": round(summary["tokens_per_second"]),
        "train": [round(sum(part) / len(part), 4) for part in (losses[i : i + 50] for i in range(0, len(losses), 50))],
        **found,
    }


@contextlib.contextmanager
def in_turn(work: Path, until: float = math.inf) -> Iterator[None]:
    """One process trains at a time; meanwhile another compiles in its first steps, or scores what it has trained.

    The first steps in turn are timed: TimeoutError if the rest would take longer than `until`.
    """
    from gss.training.step import Stepper

    take_step, steps, since = Stepper.step, itertools.count(), 0.0
    work.mkdir(parents=True, exist_ok=True)
    with (work / "training.lock").open("w") as lock:

        def waiting(stepper: Stepper, batch: Any, number: int) -> Any:
            nonlocal since
            taken = next(steps) - _COMPILING_STEPS
            if taken == 0:
                fcntl.flock(lock, fcntl.LOCK_EX)
                since = clock()
            elif taken == _TIMED_STEPS:
                end = clock() + (clock() - since) / _TIMED_STEPS * (stepper.config.steps - number)
                if end > until:
                    raise TimeoutError(f"it would train for {end - until:.0f} seconds too long")
            return take_step(stepper, batch, number)

        with mock.patch.object(Stepper, "step", waiting):
            yield


def clock() -> float:
    """`time.monotonic`, the same in every process, after synchronizing with the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


@contextlib.contextmanager
def unstoppable() -> Iterator[None]:
    """Ignores SIGTERM: under MPS, a process that dies on the GPU takes others with it that are still saving."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def shared_gpu(work: Path) -> Iterator[None]:
    """Runs NVIDIA's MPS, if available, so that kernels of several processes run at once."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    folders = {"CUDA_MPS_PIPE_DIRECTORY": work / "mps", "CUDA_MPS_LOG_DIRECTORY": work / "mps-log"}
    for name, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder)
    nowhere = subprocess.DEVNULL
    start = subprocess.run([control, "-d"], check=False, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    try:
        yield
    finally:
        if start.returncode == 0:
            subprocess.run([control], input=b"quit\n", check=False, capture_output=True)
        for name in folders:
            del os.environ[name]


def scores(model: "LanguageModel", held_out: "Dataset", trained: int, probed: bool) -> dict[str, Any]:
    """Nats and targets of each document by length and, for a probed run, the losses by context and of one stream."""
    from gss.evaluation import evaluate

    whole = any(kind in model.config.layers for kind in fla_layers.PEERS)  # they carry no state from piece to piece
    longest = int(held_out.lengths.max())
    longest = longest if probed or whole or model.bounded_state else min(longest, max(LENGTHS[0], trained))
    found: dict[str, list[tuple[float, int]]] = {}
    for length in [length for length in LENGTHS if length <= longest] or [longest]:
        if length > trained and not whole:
            model = with_window(model, trained)
        piece = length if whole else min(length, 4096)
        row = evaluate(model, held_out, [length], piece=piece, batch_tokens=BATCH).rows[0]
        found[str(length)] = [(round(nats, 2), count) for nats, count in row.by_document]
    if not probed:
        return {"documents": found}
    model = with_window(model, trained)
    return {"documents": found, "context": context_losses(model, held_out), "stream": stream_losses(model, held_out)}


def with_window(model: "LanguageModel", tokens: int) -> "LanguageModel":
    """The same model with attention over so many tokens where it would be over all of them."""
    from gss.config import override
    from gss.model import build_model

    if model.bounded_state:
        return model
    window = build_model(override(model.config, {"attention.sliding": tokens}))
    window.load_state_dict(model.state_dict())
    return window.to(model.device)


def context_losses(model: "LanguageModel", held_out: "Dataset") -> dict[str, Any]:
    """Nats of 512 tokens of each document after 512, 1,024, … true tokens and another document's before them."""
    from gss.probe import probe_context, shared_longest

    longest = min(LENGTHS[-1], shared_longest(held_out.lengths, 512))
    probe = probe_context(
        model, held_out, longest=longest, shortest=512, per_document=1, max_documents=50, position_tokens=1,
        batch_tokens=BATCH,
    )  # fmt: skip
    return {
        "distances": [row.context for row in probe.replaced],
        "loss": [round(row.loss, 5) for row in probe.replaced],
        "excess": [round(row.excess, 5) for row in probe.replaced],
        "excess_error": [round(row.excess_error, 5) for row in probe.replaced],
        "documents": probe.documents,
        "effective": probe.effective_context,
        "interval": probe.effective_interval,
    }


def stream_losses(model: "LanguageModel", held_out: "Dataset", most: int = 1 << 20) -> dict[str, float]:
    """Nats per token of the first documents, concatenated, by the length of the windows they are cut into."""
    import numpy as np

    from gss.precision import resolved, running
    from gss.scoring import score_sequences

    tokens = np.asarray(held_out.tokens[: most + 1])
    length = (len(tokens) - 1) // LENGTHS[-1] * LENGTHS[-1]
    found = {}
    for window in (LENGTHS[-1], length) if length > LENGTHS[-1] else ():
        rows = [tokens[start : start + window + 1] for start in range(0, length, window)]
        with running(model, resolved("auto", model)):
            parts = list(score_sequences(model, rows, piece=4096 if len(rows) > 1 else 16_384))
        found[str(window)] = round(-sum(float(part.log_probability.sum()) for part in parts) / length, 5)
    return found


def missing(plan: Path, kept: Callable[[str], list[dict[str, Any]]]) -> list[Line]:
    """The runs of a plan that have no result."""
    lines = parsed(plan.read_text(encoding="utf-8"))
    return [line for line in lines if all(run["system"] != line.system for run in kept(line.corpus))]


class Runs:
    """The runs of a plan, several at a time, within a given time."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.deadline = time.monotonic() + given.seconds
        self.lock = threading.Lock()
        self.begun: set[Line] = set()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.about = {"hardware": given.hardware, "date": today, "commit": given.commit}

    def kept(self, corpus: str) -> list[dict[str, Any]]:
        path = self.given.out / f"{corpus}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    def work(self) -> None:
        """While there is time, run the first line of the plan that has neither a result nor begun."""
        while self.deadline - time.monotonic() > _WORTH_STARTING_SECONDS:
            with self.lock:
                waiting = [line for line in missing(self.given.plan, self.kept) if line not in self.begun]
                ready = [line for line in waiting if (self.given.data / line.corpus).is_dir()]
                self.begun.update(ready[:1])
            if ready:
                self.one(ready[0])
            elif waiting:
                time.sleep(1)
            else:
                return

    def one(self, line: Line) -> None:
        """One run in a separate process; its result is stored at once."""
        left = self.deadline - time.monotonic()
        given, (corpus, system, probed) = self.given, line
        command = [sys.executable, "-m", "experiments.quality", str(given.plan), "--one", corpus, system]
        command += ["--data", str(given.data), "--work", str(given.work), *(f"--set={each}" for each in given.changes)]
        command += ["--probe"] if probed else []
        command += [f"--until={self.deadline}"] if given.only_whole else []
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            found, errors = process.communicate(timeout=left - _SAVING_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                found, errors = process.communicate(timeout=_SAVING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                found, errors = process.communicate()
        said = "done" if process.returncode == 0 else f"status {process.returncode}: {errors[-600:]}"
        if process.returncode == 0:
            with self.lock:
                result = {**json.loads(found.splitlines()[-1]), **self.about}
                rows = [json.dumps(run) for run in (*self.kept(corpus), result)]
                write_file(given.out / f"{corpus}.json", "[\n" + ",\n".join(rows) + "\n]\n")
        print(f"{corpus} {system}: {said} after {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    parser.add_argument("--workers", type=int, default=3, help="runs at a time: one trains, others compile or score")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--only-whole", action="store_true", help="end runs early that would not be scored in time")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--hardware", default="a CPU")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--one", nargs=2, metavar=("CORPUS", "SYSTEM"), help="be the process of one run")
    parser.add_argument("--probe", action="store_true", help="with --one: probe it too")
    parser.add_argument("--until", type=float, default=math.inf, help="with --one: the time.monotonic() to be done by")
    given = parser.parse_args(arguments)
    if given.one:
        corpus, system = given.one
        try:
            result = measure(system, given.data / corpus, given.work, given.changes, given.probe, given.until)
        except TimeoutError as late:
            sys.exit(f"left out: {late}")
        if result is None:
            sys.exit(STOPPED)
        print(json.dumps(result))
        return
    parsed(given.plan.read_text(encoding="utf-8"))  # refused before anything is begun
    runs = Runs(given)
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    with shared_gpu(given.work), ThreadPoolExecutor(given.workers) as pool:
        for worker in [pool.submit(runs.work) for _ in range(given.workers)]:
            worker.result()
    plan = parsed(given.plan.read_text(encoding="utf-8"))
    for corpus in dict.fromkeys(line.corpus for line in plan):
        if results := runs.kept(corpus):
            choices = (("to choose from", "choose"), ("to report", "report"))
            print(*(f"{title}:\n{table({corpus: results}, which)}\n" for title, which in choices), sep="\n")
    undone = [f"{line.corpus} {line.system}" for line in missing(given.plan, runs.kept)]
    print(f"{len(plan) - len(undone)} of {len(plan)} runs are done", *undone, sep="\n  ")


if __name__ == "__main__":
    main()
