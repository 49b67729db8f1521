"""What a trained run scores and remembers: perplexity by length, loss by position, time constants by layer.

Bits a byte have two denominators. `raw` is the text as it was before any vocabulary saw it. `given_back` is the text
that the scored tokens decode to, without marks for unknown characters: for a lossless vocabulary the same, for one
that drops newlines, runs of spaces and characters it does not know (T5's) less, since what was dropped was never
predicted, nor paid for.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gss.accounting import account
from gss.bench.results import hardware, source_commit, versions
from gss.data import Dataset, open_dataset
from gss.evaluate import PAPER_LENGTHS, Evaluation, LengthResult, evaluate
from gss.loading import load
from gss.model import LanguageModel, build_model
from gss.nn.state_space import DiagonalStateSpace
from gss.reproduce.plan import HELD_OUT, Run
from gss.reproduce.results import WHOLE, Layout
from gss.train.folder import read_metrics

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_REACHES = (100, 1000, 4096)
_CURVE_POINTS = 40
_UNBOUNDED_LIMIT = 4096  # attention to everything costs the square of the length
# Tokens read at a time and side by side; on a GPU long pieces, many of them.
_PIECE = {"cuda": 16_384, "cpu": 4096}
_SIDE_BY_SIDE = {"cuda": 131_072, "cpu": 16_384}
_LEAST = 4096
_UNKNOWN = (" \u2047 ", "<unk>")  # as SentencePiece and the tokenizers library write it
# A length at which the model breaks has no perplexity.
_BROKEN: dict[str, Any] = {"perplexity": None, "loss": None, "by_position": []}


def measured(
    run: Run, folder: Path, layout: Layout, device: torch.device, show: Callable[[float], None]
) -> dict[str, Any]:
    """Everything a result holds that is known once the run in `folder` has been trained."""
    loaded = load(folder, device=device)
    dataset = open_dataset(run.corpus.folder, HELD_OUT, verify=False)
    lengths = lengths_of(run, loaded.model, dataset)
    precision = "bf16" if device.type == "cuda" else "fp32"
    raw, given_back = text_bytes(run, dataset)
    rows: dict[str, dict[str, Any]] = {}
    for index, length in enumerate(lengths):

        def show_part(share: float, index: int = index) -> None:
            show((index + share) / len(lengths))

        result = _scored(run, loaded.model, dataset, length, precision, show_part)
        row = _row(result.rows[0], raw, given_back, run.corpus.lossless) if result else _BROKEN
        rows[WHOLE if length is None else str(length)] = row
    if lengths == [None]:
        rows["512"] = rows[WHOLE]  # no document is longer: the same windows
    start = build_model(run.config.model, run.config.seed)
    return {
        "parameters": account(run.config.model).parameters,
        **speed(folder, run),
        "curve": curve(folder),
        "lengths": rows,
        "evaluation": {
            "split": dataset.split,
            "documents": int(np.searchsorted(np.cumsum(dataset.lengths), run.scored_tokens)) + 1,
            "tokens": run.scored_tokens,
            "raw_bytes": raw,
            "given_back_bytes": given_back,
            "lossless": run.corpus.lossless,
            "precision": precision,
            "text": run.corpus.held_out_text,
        },
        "data": {
            "train_tokens": run.corpus.train_tokens,
            "train_bytes": run.corpus.train_bytes,
            "held_out_tokens": run.corpus.held_out_tokens,
            "vocab_size": run.corpus.vocab_size,
        },
        "time_constants": {"start": time_constants(start), "end": time_constants(loaded.model)},
        "layout": {
            "compile": layout.compile,
            "micro_batch_tokens": layout.micro_batch_tokens,
            "tokens_per_second": layout.tokens_per_second,
        },
        "hardware": hardware(device),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "versions": versions(),
        "commit": source_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _scored(
    run: Run,
    model: LanguageModel,
    dataset: Dataset,
    length: int | None,
    precision: str,
    show: Callable[[float], None],
) -> Evaluation | None:
    """One length's scores, with less at a time where memory does not suffice; None where losses are not finite."""
    kind = model.embedding.weight.device.type
    piece, side_by_side = _PIECE[kind], _SIDE_BY_SIDE[kind]
    while True:
        try:
            return evaluate(
                model,
                dataset,
                [length],
                max_tokens=run.evaluate_tokens,
                piece=piece,
                batch_tokens=side_by_side,
                precision=precision,
                report=lambda done, total: show(done / total),
            )
        except torch.OutOfMemoryError:
            if side_by_side <= _LEAST:
                raise
            piece, side_by_side = min(piece, side_by_side // 2), side_by_side // 2
            torch.cuda.empty_cache()
        except ValueError as error:
            if "not finite" not in str(error):
                raise
            return None


def lengths_of(run: Run, model: LanguageModel, dataset: Dataset) -> list[int | None]:
    """The paper's lengths that a scored document reaches, and whole documents; without a bounded state only short
    ones."""
    counts, left = [0], run.scored_tokens
    for length in dataset.lengths.tolist():
        counts.append(min(length, left))
        left -= counts[-1]
    reached: list[int | None] = [length for length in PAPER_LENGTHS if length <= max(counts)]
    if model.bounded_state or not reached:
        return [*reached, None]
    limit = max(_UNBOUNDED_LIMIT, run.config.length)
    return [length for length in reached if length is not None and length <= limit]


def _row(row: LengthResult, raw: int, given_back: int, lossless: bool) -> dict[str, Any]:
    bits = row.loss * row.tokens / math.log(2)
    return {
        "perplexity": row.perplexity,
        "loss": row.loss,
        "standard_error": row.standard_error,
        "word_perplexity": row.word_perplexity,
        "bits_per_byte": bits / raw if raw and lossless else None,
        "bits_per_raw_byte": bits / raw if raw else None,
        "bits_per_given_back_byte": bits / given_back if given_back else None,
        "by_position": [
            {"start": part.start, "stop": part.stop, "tokens": part.tokens, "loss": part.loss}
            for part in row.by_position
        ],
    }


def text_bytes(run: Run, dataset: Dataset) -> tuple[int, int]:
    """Bytes of the scored documents: of their raw text, and of what their tokens decode to.

    A document that was cut counts with its share of its raw bytes.
    """
    return _text_bytes(str(dataset.folder), dataset.hash or "", run.scored_tokens)


@lru_cache(maxsize=8)
def _text_bytes(folder: str, data_hash: str, tokens: int) -> tuple[int, int]:
    dataset = open_dataset(folder, HELD_OUT, verify=False)
    tokenizer = dataset.tokenizer()
    raw, given_back, left = 0.0, 0, tokens
    for start, length, size in zip(dataset.starts, dataset.lengths, dataset.document_bytes, strict=True):
        count = min(int(length), left)
        if not count:
            break
        left -= count
        raw += float(size) * count / int(length)
        if not tokenizer.lossless:
            text = tokenizer.decode(dataset.tokens[start : start + count])
            given_back += len(_without_unknown(text).encode())
    return round(raw), round(raw) if tokenizer.lossless else given_back


def _without_unknown(text: str) -> str:
    """The text without the marks that stand for characters outside the vocabulary: those did not come back."""
    for mark in _UNKNOWN:
        text = text.replace(mark, "")
    return text


def speed(folder: Path, run: Run) -> dict[str, Any]:
    """Seconds in training steps over all starts of the run, and tokens a second: the median over its steps."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    speeds = [row["tokens_per_second"] for row in rows]
    return {
        "seconds": sum(run.config.batch_tokens / speed for speed in speeds),
        "tokens_per_second": statistics.median(speeds),
        "train_loss": statistics.fmean(row["loss"] for row in rows[-max(1, len(rows) // 20) :]),
    }


def trained_layout(folder: Path, run: Run) -> Layout:
    """The layout that a run was trained in, which need not be the one that was planned."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Layout(config["compile"], config["micro_batch_tokens"], speed(folder, run)["tokens_per_second"])


def curve(folder: Path) -> list[tuple[int, float]]:
    """(step, mean training loss since the point before), at most so many points."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    size = -(-len(rows) // _CURVE_POINTS)
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [(part[-1]["step"], round(statistics.fmean(row["loss"] for row in part), 4)) for part in parts]


@torch.no_grad()
def time_constants(model: LanguageModel) -> list[dict[str, Any]]:
    """For every state space, first to last: quantiles of −1/Re λ in tokens, and shares of modes that reach far."""
    found = []
    for number, layer in enumerate(model.sequence_layers(), 1):
        spaces = [module for module in layer.modules() if isinstance(module, DiagonalStateSpace)]
        for index, space in enumerate(spaces):
            _, log_a = space.discretized()
            tokens = (-1 / log_a.real).flatten().double().cpu().numpy()
            found.append(
                {
                    "layer": f"{number}{'abcdef'[index] if len(spaces) > 1 else ''}",
                    "quantiles": dict(zip(map(str, QUANTILES), _quantiles(tokens), strict=True)),
                    "share_over": {str(reach): float((tokens > reach).mean()) for reach in _REACHES},
                }
            )
    return found


def _quantiles(values: Any) -> Sequence[float]:
    return [float(value) for value in np.quantile(values, QUANTILES)]
