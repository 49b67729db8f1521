"""Runs one after another: skip what is done, go on with what was interrupted, stop before what would not fit.

    OUT/results/*.json   one file a run           OUT/TARGET/table.md, results.json, *.png   what they say together
    WORK/NAME/           run folders with checkpoints: only needed for runs that are not done

Written anew after every run, so that whenever it ends, everything that was finished is kept.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gss.bench.measure import release
from gss.bench.results import hardware
from gss.config import to_mapping
from gss.evaluate import PAPER_LENGTHS
from gss.reproduce import launch, measure, speed
from gss.reproduce.deadline import deadline
from gss.reproduce.plan import Run
from gss.reproduce.records import with_speeds
from gss.reproduce.report import write_report
from gss.reproduce.results import Layout, Shelf, shape
from gss.reproduce.settings import Target
from gss.train import checkpoint, train
from gss.train.config import TrainConfig
from gss.train.distributed import pick_device
from gss.train.progress import duration

_RESERVE_SECONDS = 20.0  # for the checkpoint of a run that is stopped, and the tables

Say = Callable[[str], None]
Show = Callable[[str, float], None]
Bar = Callable[[str], AbstractContextManager[Show]]
"""Given a stage's name, a context that yields what shows how far it is."""


def _silent(stage: str, share: float) -> None:
    """Show nothing."""


def _no_bar(stage: str) -> AbstractContextManager[Show]:
    return contextlib.nullcontext(_silent)


@dataclass
class Outcome:
    """How a call ended."""

    report: Path
    """The folder with the table."""
    text: str
    """The table as Markdown."""
    done: list[Run] = field(default_factory=list)
    """With a result, from this call or an earlier one."""
    left: list[Run] = field(default_factory=list)
    """Without one yet."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by the name of the run; those are among what is left."""
    signal: int | None = None
    """The signal that stopped it early."""


def reproduce(
    target: Target,
    runs: Sequence[Run],
    out: Path,
    *,
    work: Path | None = None,
    time_limit: float | None = None,
    partial: bool = False,
    shared: bool = False,
    device: str = "auto",
    quiet: bool = False,
    commit: str = "",
    command: str = "",
    say: Say = lambda text: None,
    bar: Bar = _no_bar,
) -> Outcome:
    """Train and score every run that has no result yet; write the table of all that have one.

    time_limit      seconds from now after which nothing may still be running; a run that would not be done by then,
                    by its measured speed, is not started
    partial         when all that fits is done, begin one that does not, and save it before the time is up; the next
                    call goes on with it if it finds the same `work`. Main thread only
    shared          other work has the same device: the speeds of these runs say nothing and are not kept
    work            where run folders go; default OUT/runs
    commit, command noted in the results; an empty commit is asked of the source tree
    """
    session = _Session(target, list(runs), out, work or out / "runs", time_limit, device, quiet, say, bar)
    session.partial, session.shared = partial and time_limit is not None, shared
    session.noted = {"command": command, **({"commit": commit} if commit else {})}
    try:
        return session.go()
    finally:
        torch.set_num_threads(session.threads)


class _Session:
    def __init__(
        self,
        target: Target,
        runs: list[Run],
        out: Path,
        work: Path,
        time_limit: float | None,
        device: str,
        quiet: bool,
        say: Say,
        bar: Bar,
    ) -> None:
        self.target, self.runs, self.out, self.work = target, runs, out, work
        self.quiet, self.say, self.bar = quiet, say, bar
        self.noted: dict[str, str] = {}
        self.device = pick_device(device)
        self.hardware = hardware(self.device)
        self.shelf = Shelf(out / "results")
        self.end = None if time_limit is None else time.monotonic() + time_limit
        self.layouts: dict[str, Layout] = {}
        self.longest_probe = 0.0
        self.threads = torch.get_num_threads()
        self.compiled = ""
        """The shape that what torch has compiled is of."""
        self.partial = self.shared = False
        self.failed: dict[str, str] = {}
        self.waiting: list[tuple[Run, Layout]] = []
        """Runs that did not fit, first to last."""

    def go(self) -> Outcome:
        for run in self.runs:
            self.shelf.find(run)  # refuse what is not ours before any work is done
        seen: list[Run] = []
        stopped = None
        for run in self._in_order():
            seen.append(run)
            if self.shelf.find(run):
                self.say(f"{run.name}: done before")
                continue
            if run.scale.name == "paper" and not self._launchable(run):
                continue
            try:
                layout = self._fitting(run)
            except (ValueError, RuntimeError) as error:
                self._fail(run, error)
                continue
            if layout is None:
                continue
            stopped = self._attempt(run, layout)
            if stopped is not None:
                break
        waiting = sorted(self.waiting, key=lambda entry: -_steps_done(self.work / entry[0].name))
        if self.partial and waiting and stopped is None and self._time_left() > 2 * _RESERVE_SECONDS:
            stopped = self._attempt(*waiting[0])
        outcome = self._report(figures=True)
        outcome.left = [run for run in seen if not self.shelf.find(run)]
        outcome.signal = stopped
        return outcome

    def _attempt(self, run: Run, layout: Layout) -> int | None:
        """Do a run, come what may; the signal that stopped it, if a person's did."""
        self.say(f"{run.name}: {run.tokens:,} tokens at about {layout.tokens_per_second:,.0f} tokens/s")
        stopped = None
        self._forget_other_shapes(shape(to_mapping(run.config)))
        try:
            stopped = self._do(run, layout)
        except (ValueError, RuntimeError) as error:  # diverged, or does not fit: the others may do
            self._fail(run, error)
        speed.free(self.device)
        self._report()
        return stopped

    def _forget_other_shapes(self, key: str) -> None:
        """Drop what was compiled for models of another shape; runs of one shape compile once between them."""
        if key != self.compiled:
            release(self.device)
            self.compiled = key

    def _fail(self, run: Run, error: Exception) -> None:
        self.failed[run.name] = str(error)
        self.say(f"{run.name} failed: {error}")

    def _in_order(self) -> Iterator[Run]:
        """All runs; where only the best get more seeds, the others' are left out once the best are known."""
        first = self.runs[0].config.seed if self.runs else 0
        most = self.target.more_seeds
        yield from (run for run in self.runs if most is None or run.config.seed == first)
        if most is None:
            return
        later = [run for run in self.runs if run.config.seed != first]
        if not later:
            return
        best = best_systems(self.target, self.runs, self.shelf, first, most)
        if best is None:
            self.say("the further seeds wait until every candidate has its first")
            return
        yield from (run for run in later if (run.corpus.name, run.system.name) in best)

    def _fitting(self, run: Run) -> Layout | None:
        """A layout for the run, or None where there is no time for it."""
        steps = run.config.steps - _steps_done(self.work / run.name)
        key = shape(to_mapping(run.config))
        layout = self.layouts.get(key) or self.shelf.layout(run, self.hardware, self.shared)
        if not steps:  # only to be scored
            layout = measure.trained_layout(self.work / run.name, run)
        if layout is None and (self.end is None or self._time_left() > 2 * self.longest_probe):
            started = time.monotonic()
            self.say(f"{run.name}: measuring the speed")
            self._forget_other_shapes(key)
            # The first run chooses the threads for all, so that their speeds compare.
            layout = speed.probe(run.config, self.device, self.say, 1 if self.layouts else self.threads)
            self.longest_probe = max(self.longest_probe, time.monotonic() - started)
        if layout is None:
            self.say(f"{run.name}: left for another call, there is no time to measure its speed")
            return None
        self.layouts[key] = layout
        tokens, compiled = steps * run.config.batch_tokens, key == self.compiled
        needed = speed.seconds_needed(layout, tokens, _scored_tokens(run), self.device, compiled)
        spare = self._time_left() - (_RESERVE_SECONDS if self.partial else 0.0)  # at which a run in parts is stopped
        if needed > spare:
            left = duration(max(0.0, spare))
            self.say(f"{run.name}: not now, it takes about {duration(needed)} and {left} are left")
            self.waiting.append((run, layout))
            return None
        return layout

    def _time_left(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()

    def _launchable(self, run: Run) -> bool:
        """At the paper's scale: whether it is trained already, or there are GPUs enough to try."""
        if _steps_done(self.work / run.name) >= run.config.steps:
            return True
        launch.write(run, self.out / "paper", self.work / run.name)
        return torch.cuda.device_count() > 1

    def _do(self, run: Run, layout: Layout) -> int | None:
        """Train and score a run, and keep what came out; the signal that stopped it, if one did."""
        folder = self.work / run.name
        config = replace(
            run.config,
            compile=layout.compile,
            micro_batch_tokens=layout.micro_batch_tokens,
            device=self.device.type,
        )
        before, started = _steps_done(folder), time.monotonic()
        spare = None if self.end is None else self._time_left() - _RESERVE_SECONDS
        with deadline(spare if self.partial else None) as limit:
            stopped = self._train(run, config, folder)
        if stopped is not None:
            return None if limit.reached else stopped
        trained = time.monotonic()
        scoring = speed.seconds_needed(layout, 0, _scored_tokens(run), self.device)
        if self.partial and scoring > self._time_left():
            self.say(f"{run.name}: trained; scoring it takes about {duration(scoring)} and is left for another call")
            return None
        stage = f"scoring {run.name}"
        with contextlib.nullcontext(_silent) if self.quiet else self.bar(stage) as show:
            outcome = measure.measured(run, folder, layout, self.device, lambda share: show(stage, share))
        wall = {"training": trained - started, "scoring": time.monotonic() - trained, "from_step": before}
        if self.shared:
            outcome["tokens_per_second"] = None
        self.shelf.put(run, {**outcome, "shared": self.shared, "wall_seconds": wall, **self.noted})
        return None

    def _train(self, run: Run, config: TrainConfig, folder: Path) -> int | None:
        if _steps_done(folder) >= config.steps:
            return None
        devices = torch.cuda.device_count()
        if run.scale.name == "paper" and devices > 1:
            command = launch.command(run, self.out / "paper", folder, devices)
            status = subprocess.run([sys.executable, "-m", *command], check=False).returncode
            if status:
                raise ValueError(f"training {run.name} ended with status {status}: what it printed says why")
            return None
        return train(config, run.corpus.folder, folder, quiet=self.quiet).signal

    def _report(self, figures: bool = False) -> Outcome:
        """Write what there is; figures, which take a moment, at the end alone."""
        found = with_speeds([(run, kept) for run in self.runs if (kept := self.shelf.find(run)) is not None])
        folder = self.out / self.target.name
        text = write_report(self.target, found, folder, self.say, figures)
        return Outcome(folder, text, done=[run for run, _ in found], failed=dict(self.failed))


def best_systems(
    target: Target, runs: Sequence[Run], shelf: Shelf, seed: int, count: int
) -> set[tuple[str, str]] | None:
    """(corpus, system) of the lowest perplexity at the training length with this seed; None while some are missing."""
    scores: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        if run.config.seed == seed:
            kept = shelf.find(run)
            if kept is None:
                return None
            scores.setdefault(run.corpus.name, []).append((_score(kept), run.system.name))
    return {(corpus, name) for corpus, rows in scores.items() for _, name in sorted(rows)[:count]}


def _score(kept: dict[str, Any]) -> float:
    """Perplexity at the length of training, or at the nearest that was scored."""
    lengths = {int(name): row["perplexity"] for name, row in kept["lengths"].items() if name.isdecimal()}
    wanted = kept["config"]["length"]
    score = lengths[min(lengths, key=lambda length: abs(length - wanted))]
    return float("inf") if score is None else float(score)


def _scored_tokens(run: Run) -> int:
    """Over all lengths."""
    return (len(PAPER_LENGTHS) + 1) * run.scored_tokens


def _steps_done(folder: Path) -> int:
    there = checkpoint.checkpoints(folder / "checkpoints")
    return checkpoint.step_of(there[-1]) if there else 0
