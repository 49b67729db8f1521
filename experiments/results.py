"""Results in JSON files, one per trial, which need no run folder: benchmarks/results/reproduce is made of them.

A file holds what was run (every setting, the data's hashes), what came out (perplexity and loss by position), and
where (hardware, versions, commit). It is all that a later call needs to know that the trial is done. A file of the same
name with other settings is refused.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gss.config import to_mapping
from gss.io.files import finite, write_file
from gss.reproduce.tables import Result
from gss.reproduce.trials import Trial
from gss.training.config import differences

FORMAT = 1


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
            **outcome,
            "data": {
                "train_tokens": trial.corpus.train_tokens,
                "train_bytes": trial.corpus.train_bytes,
                "held_out_tokens": trial.corpus.held_out_tokens,
                "vocab_size": trial.corpus.vocab_size,
            },
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
        raise ValueError(f"{path} is not a result of a study ({error}): move it away") from None
    return kept
