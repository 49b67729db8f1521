"""Trials one after another: skip what is done, resume what was interrupted, keep what was finished.

OUT/results/*.json   one file per trial         OUT/TABLE.md   what they say together
WORK/NAME/           run folders with checkpoints: only needed for trials that are not done
"""

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gss.io import checkpoint
from gss.io.devices import pick_device
from gss.io.files import write_file
from gss.lm import load
from gss.model import LanguageModel
from gss.recipes import recipe_path
from gss.reproduce.results import ResultStore, measured
from gss.reproduce.settings import Target, recipe_name
from gss.reproduce.tables import report_text
from gss.reproduce.trials import Trial
from gss.training import train
from gss.training.config import TrainConfig

Show = Callable[[str, float], None]
Bar = Callable[[str], AbstractContextManager[Show]]
"""Given a stage's name, a context that yields what shows how far it is."""
More = Callable[[Trial, LanguageModel, dict[str, Any]], Mapping[str, Any]]
"""Given a trial, its model and its result so far: what else the result is to hold."""


def _no_bar(stage: str) -> AbstractContextManager[Show]:
    return nullcontext(lambda stage, share: None)


@dataclass
class Outcome:
    """How a call ended."""

    text: str
    """The table as Markdown."""
    done: list[Trial] = field(default_factory=list)
    """With a result, from this call or an earlier one."""
    left: list[Trial] = field(default_factory=list)
    """Without one yet."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by the name of the trial; those are among what is left."""
    commands: list[str] = field(default_factory=list)
    """At the paper's scale: what trains the trials that are left, on a machine with several GPUs."""
    signal: int | None = None
    """The signal that stopped it early."""


def reproduce(
    target: Target,
    trials: Sequence[Trial],
    out: Path,
    *,
    work: Path | None = None,
    device: str = "auto",
    quiet: bool = False,
    more: More | None = None,
    say: Callable[[str], None] = lambda text: None,
    bar: Bar = _no_bar,
) -> Outcome:
    """Train and score every trial that has no result yet; write the table of all that have one.

    work            where run folders go; default OUT/runs
    more            gives what a result is to hold besides what is measured here
    """
    store = ResultStore(out / "results")
    work = work or out / "runs"
    where = pick_device(device)
    outcome = Outcome("")
    for trial in trials:
        store.find(trial)  # refuse what is not ours before any work is done
    for trial in trials:
        folder = work / trial.name
        if store.find(trial):
            say(f"{trial.name}: done before")
            continue
        if trial.scale.name == "paper" and _steps_done(folder) < trial.config.steps:
            outcome.commands.append(_command(trial, folder))
            continue
        say(f"{trial.name}: {trial.tokens:,} tokens")
        try:
            before, started = _steps_done(folder), time.monotonic()
            outcome.signal = _train(trial, folder, where, quiet)
            if outcome.signal is not None:
                break
            trained = time.monotonic()
            with _no_bar("scoring") if quiet else bar(f"scoring {trial.name}") as show:
                result = measured(trial, folder, where, partial(show, f"scoring {trial.name}"))
            result["layout"] = _layout(folder, result)
            if more is not None:
                result |= more(trial, load(folder).model, result)
            wall = {"training": trained - started, "scoring": time.monotonic() - trained, "from_step": before}
            store.put(trial, {"wall_seconds": wall, **result})
        except (ValueError, RuntimeError) as error:  # diverged, or does not fit: the others may do
            outcome.failed[trial.name] = str(error)
            say(f"{trial.name} failed: {error}")
    found = [(trial, kept) for trial in trials if (kept := store.find(trial)) is not None]
    outcome.text = report_text(target, found)
    outcome.done = [trial for trial, _ in found]
    outcome.left = [trial for trial in trials if not store.find(trial)]
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / f"{target.name}.md", outcome.text)
    return outcome


def _train(trial: Trial, folder: Path, device: torch.device, quiet: bool) -> int | None:
    """Train, in smaller micro-batches where memory does not suffice; the signal that stopped it, if one did."""
    if _steps_done(folder) >= trial.config.steps:
        return None
    config = replace(trial.config, compile=trial.config.compile and device.type == "cuda", device=device.type)
    while True:
        try:
            return train(config, trial.corpus.folder, folder, quiet=quiet).signal
        except torch.OutOfMemoryError:
            config = _smaller(config)
            torch.cuda.empty_cache()


def _smaller(config: TrainConfig) -> TrainConfig:
    """The same training step in micro-batches of half the size."""
    half = (config.micro_batch_tokens or config.batch_tokens) // 2 // config.length * config.length
    if not half:
        raise ValueError(f"not even one row of {config.length:,} tokens of {config.preset} fits into memory") from None
    return replace(config, micro_batch_tokens=half)


def _layout(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """How the arithmetic was laid out on the device."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layout = {name: config[name] for name in ("compile", "micro_batch_tokens")}
    return {**layout, "tokens_per_second": result["tokens_per_second"]}


def _command(trial: Trial, folder: Path) -> str:
    """What trains a trial on one machine of eight GPUs; any number that divides the rows of a batch will do."""
    recipe = recipe_path(recipe_name(trial.system, trial.scale, trial.corpus.paper))
    changes = dict(trial.system.settings) | {"seed": trial.config.seed, "steps": trial.config.steps}
    changes |= trial.scale.settings
    words = ["torchrun", "--standalone", "--nproc-per-node=8", "-m", "gss", "train", "--config", str(recipe)]
    words += ["--preset", trial.config.preset, "--data", str(trial.corpus.folder), "--out", str(folder)]
    assignments = [f"{key}={str(value).lower()}" for key, value in changes.items()] + list(trial.changed)
    return shlex.join([*words, *(word for change in assignments for word in ("--set", change))])


def _steps_done(folder: Path) -> int:
    there = checkpoint.checkpoints(folder / "checkpoints")
    return checkpoint.step_of(there[-1]) if there else 0
