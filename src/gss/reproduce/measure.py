"""What a trained trial scores: perplexity by length, loss by position, its speed; and where that was measured."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gss.accounting import account
from gss.bench.results import hardware, source_commit, versions
from gss.data import Dataset, open_dataset
from gss.evaluation import PAPER_LENGTHS, evaluate, reachable_lengths
from gss.io.runs import read_metrics, training_summary
from gss.lm import load
from gss.model import LanguageModel
from gss.reproduce.results import WHOLE
from gss.reproduce.trials import HELD_OUT, Trial

# Tokens read at a time, and side by side.
_PIECE = {"cuda": 16_384, "cpu": 4096}
_SIDE_BY_SIDE = {"cuda": 131_072, "cpu": 16_384}
# A length at which the model breaks has no perplexity.
_BROKEN: dict[str, Any] = {"perplexity": None, "loss": None, "by_position": []}


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
        "hardware": hardware(device),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "versions": versions(),
        "commit": source_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
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
    row = {**asdict(result.rows[0]), "perplexity": result.rows[0].perplexity}
    if not trial.corpus.lossless:
        row["bits_per_byte"] = None  # what the vocabulary drops is never paid for
    return row
