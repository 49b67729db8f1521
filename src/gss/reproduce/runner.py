"""Run trials one after another, each in its run folder: skip finished ones, resume interrupted ones, score the rest.

OUT/NAME/result.json   the scores of a trial, in its run folder         OUT/TABLE.md   the table of all of them
"""

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gss.accounting import account
from gss.bench.machine import provenance
from gss.config import to_mapping
from gss.data import open_dataset
from gss.evaluation import evaluate, reachable_lengths
from gss.io import checkpoint
from gss.io.devices import pick_device
from gss.io.files import finite, read_json, write_file, write_json
from gss.io.runs import read_metrics, training_summary
from gss.lm import load
from gss.paper import LENGTHS
from gss.reproduce.settings import Target, recipe_name
from gss.reproduce.tables import WHOLE, report_text
from gss.reproduce.trials import HELD_OUT, Trial
from gss.training import train
from gss.training.config import differences

Show = Callable[[str, float], None]
Bar = Callable[[str], AbstractContextManager[Show]]
"""Given the name of a stage, a context manager that yields a function to show its progress."""
RESULT = "result.json"
# Tokens read at a time, and side by side.
_PIECE = {"cuda": 16_384, "cpu": 4096}
_SIDE_BY_SIDE = {"cuda": 131_072, "cpu": 16_384}


@dataclass
class Outcome:
    """How a call ended."""

    text: str = ""
    """The table as Markdown."""
    done: list[Trial] = field(default_factory=list)
    """Trials with a result, from this call or an earlier one."""
    failed: dict[str, str] = field(default_factory=dict)
    """The reason of each failure, by the name of the trial."""
    commands: list[str] = field(default_factory=list)
    """At the paper's scale: the commands that train the remaining trials on a machine with several GPUs."""
    signal: int | None = None
    """The signal that stopped it early."""


def reproduce(
    target: Target,
    trials: Sequence[Trial],
    out: Path,
    *,
    device: str = "auto",
    quiet: bool = False,
    say: Callable[[str], None] = lambda text: None,
    bar: Bar = lambda stage: nullcontext(lambda stage, share: None),
) -> Outcome:
    """Train and score every trial that has no result yet; write the table of all results."""
    where, outcome = pick_device(device), Outcome()
    results = {trial.name: _kept(trial, out / trial.name) for trial in trials}  # raises before any work is done
    for trial in trials:
        folder = out / trial.name
        if results[trial.name]:
            say(f"{trial.name}: done before")
            continue
        if trial.scale.name == "paper" and steps_done(folder) < trial.config.steps:
            outcome.commands.append(_command(trial, folder))
            continue
        say(f"{trial.name}: {trial.tokens:,} tokens")
        try:
            outcome.signal = train_trial(trial, folder, where, quiet)
            if outcome.signal is not None:
                break
            with bar(f"scoring {trial.name}") as show:
                results[trial.name] = score_trial(trial, folder, where, partial(show, f"scoring {trial.name}"))
            write_json(folder / RESULT, finite(results[trial.name]))
        except (ValueError, RuntimeError) as error:  # diverged, or out of memory: the others may succeed
            outcome.failed[trial.name] = str(error)
            say(f"{trial.name} failed: {error}")
    outcome.done = [trial for trial in trials if results[trial.name]]
    outcome.text = report_text(target, [(trial, results[trial.name]) for trial in outcome.done])
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / f"{target.name}.md", outcome.text)
    return outcome


def _kept(trial: Trial, folder: Path) -> dict[str, Any]:
    """A trial's stored result, empty if it has none; ValueError if it belongs to other settings or data."""
    path = folder / RESULT
    if not path.is_file():
        return {}
    kept: dict[str, Any] = read_json(path)
    try:
        changed = differences(kept["config"], trial.config)
        if kept["data"] != trial.corpus.identity:
            changed["data"] = (kept["data"], trial.corpus.identity)
        if kept["evaluation"]["tokens"] != trial.scored_tokens:
            changed["evaluated tokens"] = (kept["evaluation"]["tokens"], trial.scored_tokens)
    except (KeyError, TypeError):
        raise ValueError(f"{path} is not a result of gss reproduce: move it away") from None
    if changed:
        what = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items())
        raise ValueError(
            f"{path} is the result of a run with other settings or data: {what}. "
            "Move the run folder away to run it again, or give another --out"
        )
    return kept


def train_trial(trial: Trial, folder: Path, device: torch.device, quiet: bool) -> int | None:
    """Train or resume, with smaller micro-batches if memory is short; returns the signal that stopped it."""
    if steps_done(folder) >= trial.config.steps:
        return None
    config = replace(trial.config, compile=trial.config.compile and device.type == "cuda", device=device.type)
    while True:
        try:
            return train(config, trial.corpus.folder, folder, quiet=quiet).signal
        except torch.OutOfMemoryError:
            half = (config.micro_batch_tokens or config.batch_tokens) // 2 // config.longest * config.longest
            if not half:
                raise ValueError(
                    f"not even one row of {config.longest:,} tokens of {config.preset} fits into memory"
                ) from None
            config = replace(config, micro_batch_tokens=half)
            torch.cuda.empty_cache()


def score_trial(trial: Trial, folder: Path, device: torch.device, show: Callable[[float], None]) -> dict[str, Any]:
    """The result of the trained run in `folder`: settings, speed, and scores at each length."""
    model = load(folder, device=device).model
    dataset = open_dataset(trial.corpus.folder, HELD_OUT, verify=False)
    precision = "bf16" if device.type == "cuda" else "fp32"
    reached = reachable_lengths(model, dataset, trial.evaluate_tokens, trial.config.length)
    lengths: list[int | None] = [length for length in reached if length in LENGTHS]
    if model.bounded_state or not lengths:
        lengths.append(None)
    rows: dict[str, dict[str, Any]] = {}
    for index, length in enumerate(lengths):
        try:
            row = evaluate(
                model, dataset, [length], max_tokens=trial.evaluate_tokens, piece=_PIECE[device.type],
                batch_tokens=_SIDE_BY_SIDE[device.type], precision=precision, eos_first=trial.config.eos_first,
            ).rows[0].facts()  # fmt: skip
        except ValueError as error:
            if "not finite" not in str(error):
                raise
            row = {"perplexity": None, "loss": None, "by_position": []}  # the model breaks at this length
        if not trial.corpus.lossless:
            row["bits_per_byte"] = None  # text that the vocabulary drops would cost no bits
        rows[WHOLE if length is None else str(length)] = row
        show((index + 1) / len(lengths))
    if lengths == [None]:
        rows["512"] = rows[WHOLE]  # no document is longer: the same windows
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    return {
        "tokens": trial.tokens,
        "epochs": trial.tokens / trial.corpus.train_tokens,
        "parameters": account(trial.config.model).parameters,
        **training_summary(steps, trial.config.batch_tokens),
        "lengths": rows,
        "evaluation": {
            "split": dataset.split,
            "documents": int(np.searchsorted(np.cumsum(dataset.lengths), trial.scored_tokens)) + 1,
            "tokens": trial.scored_tokens,
            "lossless": trial.corpus.lossless,
            "precision": precision,
        },
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        **provenance(device),
        "data": dict(trial.corpus.identity),
        "config": to_mapping(trial.config),
    }


def _command(trial: Trial, folder: Path) -> str:
    """The command that trains a trial on eight GPUs; any number that divides the rows of a batch works."""
    recipe = recipe_name(trial.system, trial.scale, trial.corpus.paper)
    changes = dict(trial.system.settings) | {"seed": trial.config.seed, "steps": trial.config.steps}
    changes |= trial.scale.settings
    words = ["torchrun", "--standalone", "--nproc-per-node=8", "-m", "gss", "train", "--config", recipe]
    words += ["--preset", trial.config.preset, "--data", str(trial.corpus.folder), "--out", str(folder)]
    assignments = [f"{key}={str(value).lower()}" for key, value in changes.items()] + list(trial.changed)
    return shlex.join([*words, *(word for change in assignments for word in ("--set", change))])


def steps_done(folder: Path) -> int:
    """The step of a run folder's newest checkpoint, 0 without one."""
    there = checkpoint.checkpoints(folder / "checkpoints")
    return checkpoint.step_of(there[-1]) if there else 0
