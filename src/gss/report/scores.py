"""Held-out scores of a run: stored if there are any, else computed within a budget, else why there are none.

Scores are stored in RUN/evaluations/, one file per split, step and corpus, in the format of `gss eval --json`. A report
stores what it computes there, so that the next one is quick.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gss.data import Dataset, open_dataset, require_same
from gss.evaluation import Evaluation, LengthResult, PositionLoss, evaluate, reachable_lengths
from gss.io.files import finite, write_json
from gss.report.runs import RunRecord

FOLDER = "evaluations"
SPLIT = "valid"

Show = Callable[[str, float], None]


@dataclass(frozen=True)
class Scores:
    """The scores of a run on held-out data, or why there are none."""

    result: Evaluation | None
    data: str | None = None  # the hash of the data
    unigram_entropy: float | None = None
    """Of the same split: nats per token of a model that knows only the frequency of each id."""
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
    stage = f"scoring {run.name}"
    result = evaluate(
        model, dataset, wanted, max_tokens=max_tokens, report=lambda done, total: show(stage, done / total)
    )
    model.to("cpu")
    keep(run.folder, run.loaded.step, dataset, result)
    return Scores(result, dataset.hash, dataset.unigram_entropy)


def keep(run: str | Path, step: int, dataset: Dataset, result: Evaluation) -> None:
    """Store an evaluation of a run's checkpoint in its folder, if that is writable.

    One on data without a hash, from arrays, is not stored: nothing would distinguish it from others.
    """
    if dataset.hash is None:
        return
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
    """An object in a stored evaluation as what it was, with NaN again where JSON has null (but for a length)."""
    if not {"by_position", "start"} & values.keys():
        return values
    values = {name: math.nan if value is None and name != "length" else value for name, value in values.items()}
    if "start" in values:
        return PositionLoss(**values)
    values |= {"by_position": tuple(values["by_position"])}
    values |= {"by_document": tuple(map(tuple, values.get("by_document", ())))}
    return LengthResult(**{name: value for name, value in values.items() if name != "perplexity"})


def _held_out(run: RunRecord, data: str | Path | None) -> Dataset:
    """The run's validation split, if it is unchanged, or that of another corpus."""
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
