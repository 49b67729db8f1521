"""Results: one JSON file a run, which is all that a later call needs to know that the run is done.

The file holds what was run (every setting, the data's hashes), what came out (perplexity, loss by position and time
constants), and where (hardware, versions, commit). A file of the same name with other settings is refused.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gss.config import to_mapping
from gss.report.files import finite, replace
from gss.reproduce.plan import Run
from gss.train.config import differences

FORMAT = 1
WHOLE = "whole"
"""The name of the length at which every document is read whole, its state carried."""


@dataclass(frozen=True)
class Layout:
    """How a run's arithmetic is laid out on a device, and how fast that is."""

    compile: bool
    micro_batch_tokens: int | None
    tokens_per_second: float


class Shelf:
    """The results that are kept in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, run: Run) -> Path:
        """Where a run's result lies, or will."""
        return self.folder / f"{run.name}.json"

    def find(self, run: Run) -> dict[str, Any] | None:
        """A run's result, if it is done; ValueError where the file is of something else.

        A run of another name that was the same in everything serves too: a default is among what it was chosen from.
        """
        path = self.path(run)
        if not path.is_file():
            others = self.folder.glob(f"{run.corpus.name}.*.{run.scale.name}.*steps.seed{run.config.seed}*.json")
            return next((kept for kept in map(read_result, sorted(others)) if not _changed(kept, run)), None)
        kept = read_result(path)
        changed = _changed(kept, run)
        if changed:
            what = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items())
            raise ValueError(
                f"{path} is the result of a run with other settings or data: {what}. "
                "Move it away to run anew, or give another --out"
            )
        return kept

    def put(self, run: Run, outcome: Mapping[str, Any]) -> None:
        """Keep a run's result; the file appears whole or not at all."""
        document = {
            "format": FORMAT,
            "name": run.name,
            "system": run.system.name,
            "label": run.system.label,
            "scale": run.scale.name,
            "corpus": run.corpus.name,
            "seed": run.config.seed,
            "changed": list(run.changed),
            "tokens": run.tokens,
            "epochs": run.tokens / run.corpus.train_tokens,
            **outcome,
            "identity": {**run.corpus.identity, "evaluate_tokens": run.evaluate_tokens},
            "config": to_mapping(run.config),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        replace(self.path(run), (json.dumps(finite(document), indent=1) + "\n").encode())

    def layout(self, run: Run, hardware: str, shared: bool = False) -> Layout | None:
        """How fast a model of the same shape was on the same hardware, on any corpus and with any seed; a device that
        is shared with other work is another one."""
        for path in sorted(self.folder.glob(f"*.{run.scale.name}.*.json")):
            kept = read_result(path)
            same = kept["hardware"] == hardware and kept.get("shared", False) == shared
            if same and shape(kept["config"]) == shape(to_mapping(run.config)):
                return Layout(**kept["layout"])
        return None


def _changed(kept: Mapping[str, Any], run: Run) -> dict[str, tuple[Any, Any]]:
    """What sets a result apart from a run: name → (the result's, the run's)."""
    changed = differences(kept["config"], run.config)
    for name, value in {**run.corpus.identity, "evaluate_tokens": run.evaluate_tokens}.items():
        if kept["identity"].get(name) != value:
            changed[f"data.{name}"] = (kept["identity"].get(name), value)
    return changed


def shape(config: Mapping[str, Any]) -> str:
    """What of a config its speed depends on, as a key: everything but how parameters start and how they learn."""
    model = {name: value for name, value in config["model"].items() if name != "state_space"}
    model["modes"] = config["model"]["state_space"]["modes"]
    wanted = {name: config[name] for name in ("preset", "length", "batch_tokens", "batching")}
    return json.dumps([wanted, model, config["optimizer"]["name"]], sort_keys=True)


def read_result(path: Path) -> dict[str, Any]:
    """What a file holds; ValueError where it is not a result."""
    return _parsed(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1024)
def _parsed(path: Path, changed_at: int) -> dict[str, Any]:
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
