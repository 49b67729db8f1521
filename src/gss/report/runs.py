"""The contents of a run folder: settings, metrics by step, machine, data, samples, weights.

Missing parts are None or empty (an imported run has no metrics, a new run no checkpoint); only a folder that is not a
run is refused.
"""

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from gss.config import ModelConfig, from_mapping
from gss.io.checkpoint import checkpoints
from gss.io.files import read_json
from gss.io.runs import read_config, read_metrics
from gss.lm import LM, load


@dataclass
class RunRecord:
    """The contents of a run folder, and its name in the report."""

    folder: Path
    name: str
    config: dict[str, Any]  # as in config.json
    model_config: ModelConfig
    training: list[dict[str, Any]] = field(default_factory=list)  # one row per step
    held_out: list[dict[str, Any]] = field(default_factory=list)  # one row per evaluation during training and length
    environment: dict[str, Any] = field(default_factory=dict)  # of the first start of the run
    data: dict[str, Any] = field(default_factory=dict)  # as in data.json
    probe: dict[str, Any] = field(default_factory=dict)  # as in probe.json, which `gss probe` writes
    sample: str | None = None  # the newest text in samples/
    loaded: LM | None = None  # the newest intact checkpoint, if there is one
    trouble: str = ""  # why there are no weights

    @property
    def preset(self) -> str:
        """The preset's name; empty if unknown."""
        return self.config.get("preset") or ""

    @property
    def length(self) -> int | None:
        """Tokens per row in training."""
        return self.config.get("length")

    @property
    def step(self) -> int:
        """Steps taken, according to the checkpoint or the last row, whichever is later."""
        kept = self.loaded.step if self.loaded else 0
        return max(kept, self.training[-1]["step"] if self.training else 0)


def read_run(path: str | Path) -> RunRecord:
    """Read a run folder; ValueError where it is not one."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a run folder: there is no such folder (`gss train --out` makes one)")
    config = read_config(folder)
    run = RunRecord(folder, folder.resolve().name, config, from_mapping(ModelConfig, config["model"]))
    if (folder / "metrics.jsonl").is_file():
        rows = read_metrics(folder / "metrics.jsonl")
        run.training = [row for row in rows if row.get("kind") == "train"]
        run.held_out = [row for row in rows if row.get("kind") == "evaluation"]
    starts = read_json(folder / "environment.json", list)
    run.environment = starts[0] if starts else {}
    run.data = read_json(folder / "data.json")
    run.probe = read_json(folder / "probe.json")
    samples = sorted((folder / "samples").glob("step-*.txt"))
    if samples:
        run.sample = samples[-1].read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    run.trouble = "the run has no checkpoint yet"
    if checkpoints(folder / "checkpoints"):
        try:
            run.loaded = load(folder)
        except (ValueError, OSError) as error:
            run.trouble = str(error)
    return run


def read_runs(paths: list[Path]) -> list[RunRecord]:
    """Several runs, each named by as much of its path as distinguishes it from the others."""
    if not paths:
        raise ValueError("no run to report on: give at least one run folder")
    places = [path.resolve() for path in paths]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"{place} is given twice")
    runs = [read_run(path) for path in paths]
    ends = (["/".join(place.parts[-size:]) for place in places] for size in count(1))
    for run, name in zip(runs, next(names for names in ends if len({*names}) == len(names)), strict=True):
        run.name = name
    return runs
