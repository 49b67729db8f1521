"""Results: what a trained trial scores, and the JSON file that keeps it, one per trial.

A file holds what was run (every setting, the data's hashes), what came out (perplexity and loss by position), and
where (hardware, versions, commit). It is all that a later call needs to know that the trial is done. A file of the same
name with other settings is refused.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gss.accounting import account
from gss.bench.results import provenance
from gss.config import to_mapping
from gss.data import Dataset, open_dataset
from gss.evaluation import PAPER_LENGTHS, evaluate, reachable_lengths
from gss.io.files import finite, write_file
from gss.io.runs import read_metrics, training_summary
from gss.lm import load
from gss.model import LanguageModel
from gss.reproduce.trials import HELD_OUT, Trial
from gss.training.config import differences

FORMAT = 1
WHOLE = "whole"
"""The name of the length at which every document is read whole, its state carried."""
Result = Mapping[str, Any]
"""What a file holds."""
# Tokens read at a time, and side by side.
_PIECE = {"cuda": 16_384, "cpu": 4096}
_SIDE_BY_SIDE = {"cuda": 131_072, "cpu": 16_384}
# A length at which the model breaks has no perplexity.
_BROKEN: dict[str, Any] = {"perplexity": None, "loss": None, "by_position": []}


class ResultStore:
    """The results that are kept in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def find(self, trial: Trial) -> Result | None:
        """A trial's result, if it is done; ValueError where the file is of something else.

        A trial of another name that was the same in everything serves too.
        """
        path = self.folder / f"{trial.name}.json"
        if not path.is_file():
            same_seed = f"{trial.corpus.name}.*.{trial.scale.name}.*steps.seed{trial.config.seed}*.json"
            others = map(read_result, sorted(self.folder.glob(same_seed)))
            return next((kept for kept in others if not _changed(kept, trial)), None)
        kept = read_result(path)
        changed = _changed(kept, trial)
        if changed:
            what = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items())
            raise ValueError(
                f"{path} is the result of a run with other settings or data: {what}. "
                "Move it away to run it again, or give another --out"
            )
        return kept

    def put(self, trial: Trial, outcome: Mapping[str, Any]) -> None:
        """Keep a trial's result; the file appears whole or not at all."""
        content = {
            "format": FORMAT,
            "name": trial.name,
            "system": trial.system.name,
            "label": trial.system.label,
            "scale": trial.scale.name,
            "corpus": trial.corpus.name,
            "seed": trial.config.seed,
            "changed": list(trial.changed),
            "tokens": trial.tokens,
            "epochs": trial.tokens / trial.corpus.train_tokens,
            **outcome,
            "identity": {**trial.corpus.identity, "evaluate_tokens": trial.evaluate_tokens},
            "config": to_mapping(trial.config),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self.folder / f"{trial.name}.json", json.dumps(finite(content), indent=1) + "\n")


def _changed(kept: Result, trial: Trial) -> dict[str, tuple[Any, Any]]:
    """What sets a result apart from a trial: name → (the result's, the trial's)."""
    changed = differences(kept["config"], trial.config)
    for name, value in {**trial.corpus.identity, "evaluate_tokens": trial.evaluate_tokens}.items():
        if kept["identity"].get(name) != value:
            changed[f"data.{name}"] = (kept["identity"].get(name), value)
    return changed


def read_result(path: Path) -> Result:
    """What a file holds; ValueError where it is not a result."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT:
            raise ValueError(f"its format is {kept['format']!r}, not {FORMAT}")
        missing = {"config", "identity", "layout", "hardware", "lengths", "evaluation"} - kept.keys()
        if missing:
            raise ValueError(f"it has no {missing.pop()}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of gss reproduce ({error}): move it away") from None
    return kept


def measured(trial: Trial, folder: Path, device: torch.device, show: Callable[[float], None]) -> dict[str, Any]:
    """Everything a result holds that is known once the run in `folder` has been trained."""
    loaded = load(folder, device=device)
    dataset = open_dataset(trial.corpus.folder, HELD_OUT, verify=False)
    precision = "bf16" if device.type == "cuda" else "fp32"
    reached = reachable_lengths(loaded.model, dataset, trial.evaluate_tokens, trial.config.length)
    lengths: list[int | None] = [length for length in reached if length in PAPER_LENGTHS]
    if loaded.model.bounded_state or not lengths:
        lengths.append(None)
    rows: dict[str, dict[str, Any]] = {}
    for index, length in enumerate(lengths):
        row = _scored(trial, loaded.model, dataset, length, precision)
        rows[WHOLE if length is None else str(length)] = row
        show((index + 1) / len(lengths))
    if lengths == [None]:
        rows["512"] = rows[WHOLE]  # no document is longer: the same windows
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    return {
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
        "data": {
            "train_tokens": trial.corpus.train_tokens,
            "train_bytes": trial.corpus.train_bytes,
            "held_out_tokens": trial.corpus.held_out_tokens,
            "vocab_size": trial.corpus.vocab_size,
        },
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        **provenance(device),
    }


def _scored(trial: Trial, model: LanguageModel, dataset: Dataset, length: int | None, precision: str) -> dict[str, Any]:
    """The scores at one length; without figures where losses are not finite."""
    kind = model.device.type
    try:
        result = evaluate(
            model,
            dataset,
            [length],
            max_tokens=trial.evaluate_tokens,
            piece=_PIECE[kind],
            batch_tokens=_SIDE_BY_SIDE[kind],
            precision=precision,
        )
    except ValueError as error:
        if "not finite" not in str(error):
            raise
        return _BROKEN
    row = result.rows[0].facts()
    if not trial.corpus.lossless:
        row["bits_per_byte"] = None  # what the vocabulary drops is never paid for
    return row
