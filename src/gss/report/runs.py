"""The contents of a run folder (settings, metrics by step, machine, data, samples, weights), and its scores.

Missing parts are None or empty (an imported run has no metrics, a new run no checkpoint); only a folder that is not a
run is an error. Held-out scores are the stored ones, or else computed within a budget, or else the reason why there are
none. They are stored in RUN/evaluations/, one file per split, step and corpus, in the format of `gss eval --json`. A
report stores the scores that it computes, so the next one is quick.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from gss.config import ModelConfig, from_mapping
from gss.data import Dataset, open_dataset, require_same
from gss.evaluation import Evaluation, LengthResult, PositionLoss, evaluate, reachable_lengths
from gss.io.checkpoint import checkpoints
from gss.io.files import finite, read_json, write_json
from gss.io.runs import read_config, read_metrics
from gss.lm import LM, load

FOLDER = "evaluations"
SPLIT = "valid"

Show = Callable[[str, float], None]


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
        return max(self.loaded.step if self.loaded else 0, self.training[-1]["step"] if self.training else 0)


def read_run(path: str | Path) -> RunRecord:
    """Read a run folder; ValueError where it is not one."""
    folder = Path(path)
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


@dataclass(frozen=True)
class Scores:
    """The scores of a run on held-out data, or why there are none."""

    result: Evaluation | None
    data: str | None = None  # the hash of the data
    unigram_entropy: float | None = None  # nats per token of a model that knows only how often each id occurs there
    missing: str = ""


def same_tokens(scored: Sequence[Scores]) -> bool:
    """Whether all scored runs were scored on the same tokens, so that their scores are comparable."""
    return len({(score.data, score.result.tokens) for score in scored if score.result}) <= 1


def scores(
    run: RunRecord,
    show: Show,
    *,
    data: str | Path | None = None,
    max_tokens: int = 1 << 17,
    lengths: Sequence[int] | None = None,
    again: bool = False,
    device: str = "cpu",
) -> Scores:
    """The scores of a run's newest checkpoint on its own validation data, or on a corpus at `data`.

    max_tokens      the most targets to score if scores must be computed; 0: compute nothing
    lengths         None: those of the paper's that documents reach
    again           compute, even where scores are stored
    device          where to compute; the model is on the CPU before and after
    """
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be 0 or more, not {max_tokens}")
    if run.loaded is None:
        return Scores(None, missing=f"no scores: {run.trouble}")
    kept = None if again else _kept(run, data, lengths)
    if kept is not None:
        return kept
    if not max_tokens:
        return Scores(None, missing="no scores are kept in the run folder, and none were to be computed")
    try:
        dataset = _held_out(run, data)
    except (ValueError, OSError) as error:
        return Scores(None, missing=f"no scores: {error}")
    model = run.loaded.model.to(device)
    wanted = lengths or reachable_lengths(model, dataset, max_tokens, run.length)

    def report(done: int, total: int) -> None:
        show(f"scoring {run.name}", done / total)

    result = evaluate(model, dataset, wanted, max_tokens=max_tokens, eos_first=run.loaded.eos_first, report=report)
    model.to("cpu")
    keep(run.folder, run.loaded.step, dataset, result)
    return Scores(result, dataset.hash, dataset.unigram_entropy)


def keep(run: str | Path, step: int, dataset: Dataset, result: Evaluation) -> None:
    """Store an evaluation of a run's checkpoint in its folder, if that is writable."""
    facts = {"run": str(run), "step": step, "data": dataset.hash, "split": result.split}
    facts |= {"documents": result.documents, "unigram_entropy": dataset.unigram_entropy}
    facts |= {"rows": [row.facts() for row in result.rows]}
    path = Path(run) / FOLDER / f"{result.split}-step-{step:08d}-{dataset.hash[:12]}.json"
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_json(path, finite(facts))


def _kept(run: RunRecord, data: str | Path | None, lengths: Sequence[int] | None) -> Scores | None:
    """The newest stored evaluation of this checkpoint on the wanted data and lengths."""
    assert run.loaded is not None
    with suppress(ValueError, OSError):
        wanted = run.data.get("hash") if data is None else open_dataset(data, SPLIT, verify=False).hash
        paths = sorted((run.folder / FOLDER).glob("*.json"), key=lambda path: -path.stat().st_mtime)
        for path in paths if wanted else ():
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # a file that is not ours
                facts = json.loads(path.read_text(encoding="utf-8"), object_hook=_revived)
                rows, about = tuple(facts["rows"]), (facts["step"], facts["split"], facts["data"])
                found = [row.length for row in rows]
                if about == (run.loaded.step, SPLIT, wanted) and found and found == list(lengths or found):
                    result = Evaluation(rows, int(facts["documents"]), rows[0].tokens, SPLIT)
                    return Scores(result, wanted, facts.get("unigram_entropy"))
    return None


def _revived(values: dict[str, Any]) -> Any:
    """An object of a stored evaluation, with NaN in place of null (except for a length)."""
    if not {"by_position", "start"} & values.keys():
        return values
    values = {name: math.nan if value is None and name != "length" else value for name, value in values.items()}
    if "start" in values:
        return PositionLoss(**values)
    values |= {"by_position": tuple(values["by_position"])}
    values |= {"by_document": tuple(map(tuple, values.get("by_document", ())))}
    return LengthResult(**{name: value for name, value in values.items() if name != "perplexity"})


def _held_out(run: RunRecord, data: str | Path | None) -> Dataset:
    """The validation split of the corpus at `data`, or else of the run's own data, if that is unchanged."""
    assert run.loaded is not None
    folder = data or run.data.get("folder")
    if not folder:
        raise ValueError("the run folder does not say where its data is; give --data")
    if not data and not Path(folder).is_dir():
        raise ValueError(f"the run's data is no longer at {folder}; give --data")
    dataset = open_dataset(folder, SPLIT, verify=False)
    if not data and dataset.hash != run.data.get("hash"):
        raise ValueError(f"{folder} holds other data than the run was trained on; give --data")
    require_same(dataset.tokenizer(), run.loaded.tokenizer.hash, f"the run {run.name}")
    return dataset
