"""Teacher-forced perplexity by sequence length.

The paper's protocol: documents are cut into windows of a given length, each read from an empty state. Without a length,
every document is one window, with the state carried from end to end. The same target tokens count at every length, each
exactly once, so the columns of a table are comparable. A window longer than a piece is read in pieces with the state
carried, which is exact; memory is therefore bounded by the piece, not by the length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gss.data import Dataset, open_dataset, require_same
from gss.model import LanguageModel
from gss.nn.context import Context
from gss.paper import LENGTHS
from gss.precision import resolved, running
from gss.scoring import PIECE, ScoredPiece, score_sequences

if TYPE_CHECKING:
    from gss.lm import LM

_UNBOUNDED_LIMIT = 4096


@dataclass(frozen=True)
class Window:
    """Targets start … stop − 1 of a document, read from an empty state."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss of the targets at positions start … stop − 1 of their windows."""

    start: int
    stop: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class LengthResult:
    """The scores of a model at one length."""

    length: int | None
    """None: whole documents, with the state carried."""
    tokens: int
    loss: float
    """Nats per token."""
    standard_error: float
    """Of the loss, with documents as the independent samples; NaN for a single document."""
    word_perplexity: float
    """exp(total nats ÷ total words), comparable between vocabularies."""
    bits_per_byte: float
    by_position: tuple[PositionLoss, ...] = field(repr=False)
    by_document: tuple[tuple[float, int], ...] = field(repr=False, default=())
    """Nats and targets of every document, for comparing two models document by document."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def facts(self) -> dict[str, Any]:
        """The row as plain data, with its perplexity."""
        return {**asdict(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class Evaluation:
    """One row per length, over the same targets.

    >>> result = gss.evaluate(gss.load(run), corpus, [64], max_tokens=500)
    >>> result.tokens, result.rows[0].perplexity > 1
    (500, True)
    """

    rows: tuple[LengthResult, ...]
    documents: int
    tokens: int
    split: str


def windows(document_lengths: Sequence[int], length: int | None) -> list[Window]:
    """Every document's targets cut into windows of at most `length` (None: one window per document)."""
    cut = []
    for document, total in enumerate(document_lengths):
        size = length or total
        cut += [Window(document, start, min(start + size, total)) for start in range(0, total, size)]
    return cut


def reachable_lengths(
    model: LanguageModel, dataset: Dataset, max_tokens: int | None, trained: int | None = None
) -> list[int]:
    """The paper's lengths that a scored document reaches, or the longest document where even 512 is too long. At most
    4,096 or the training length for a model that keeps every token, whose cost grows with the square of the length."""
    longest = longest_document(dataset, max_tokens)
    limit = longest if model.bounded_state else min(longest, max(_UNBOUNDED_LIMIT, trained or 0))
    return [length for length in LENGTHS if length <= limit] or [limit]


def longest_document(dataset: Dataset, max_tokens: int | None = None) -> int:
    """Targets of the longest document among those that `max_tokens` leaves."""
    return max(_selected(dataset, max_tokens))


def evaluate(
    model: "LM | LanguageModel",
    dataset: Dataset | str | Path,
    lengths: Sequence[int | None] = LENGTHS,
    *,
    split: str = "valid",
    max_tokens: int | None = None,
    piece: int = PIECE,
    batch_tokens: int = 16_384,
    precision: str = "auto",
    context: Context | None = None,
    eos_first: bool | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score a model at each length (None: whole documents with the state carried).

    dataset         from `gss.data.open_dataset`; or the folder of a corpus, whose split `split` is scored
    max_tokens      score only the first documents, up to this many targets; the last one is cut. None: all
    piece           tokens read at a time; more is faster and takes more memory
    batch_tokens    tokens per batch when windows are short
    precision       fp32, bf16 (autocast), or auto: bf16 for a float32 model on a GPU that supports it
    context         ranks that share long sequences, a piece each; all of them call this and get the result
    eos_first       start every window with the end-of-document id instead of the token before it, as the rows of runs
                    with this setting start. None: as the run of an `LM` was trained; no for a bare model
    report          called with the number of targets scored so far and in total

    >>> lm = gss.load(run)
    >>> result = gss.evaluate(lm, corpus, [64, None])
    >>> [row.length for row in result.rows]
    [64, None]
    """
    if eos_first is None:
        eos_first = not isinstance(model, LanguageModel) and model.eos_first
    model, dataset = opened(model, dataset, split)
    counts = _selected(dataset, max_tokens)
    _check(lengths, counts, piece, batch_tokens)
    precision = resolved(precision, model)
    training = model.training
    model.eval()
    try:
        done, total = 0, len(lengths) * sum(counts)
        rows = []
        for length in lengths:
            tally = _Tally(len(counts), length or max(counts))
            for batch in _batches(windows(counts, length), piece, batch_tokens):
                with running(model, precision):
                    ids = [_ids(dataset, window, eos_first) for window in batch]
                    for part in score_sequences(model, ids, piece=piece, context=context):
                        tally.add(batch[: len(part.counted)], part)
                done += sum(window.stop - window.start for window in batch)
                report(done, total)
            rows.append(tally.result(length, counts, dataset))
    finally:
        model.train(training)
    return Evaluation(tuple(rows), len(counts), sum(counts), dataset.split)


def opened(model: "LM | LanguageModel", dataset: Dataset | str | Path, split: str) -> tuple[LanguageModel, Dataset]:
    """The bare model, and the data, which must have the model's vocabulary where that is known."""
    if not isinstance(dataset, Dataset):
        dataset = open_dataset(dataset, split)
    if isinstance(model, LanguageModel):
        return model, dataset
    require_same(dataset.tokenizer(), model.tokenizer.hash, "the run")
    return model.model, dataset


def _selected(dataset: Dataset, max_tokens: int | None) -> list[int]:
    """The number of targets of each document that count; documents beyond the limit are left out."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    left = int(dataset.lengths.sum()) if max_tokens is None else max_tokens
    counts = []
    for length in dataset.lengths.tolist():
        if not left:
            break
        counts.append(min(length, left))
        left -= counts[-1]
    return counts


def _check(lengths: Sequence[int | None], counts: list[int], piece: int, batch_tokens: int) -> None:
    if not lengths:
        raise ValueError("no lengths to evaluate at: give at least one, for example 512")
    for length in lengths:
        if length is not None and length < 1:
            raise ValueError(f"a length must be at least 1, not {length}")
        if length is not None and length > max(counts):
            raise ValueError(
                f"no document is as long as {length:,} tokens (the longest has {max(counts):,} to score): "
                "give shorter lengths or longer documents"
            )
    if min(piece, batch_tokens) < 1:
        raise ValueError("piece and batch_tokens must be at least 1")


def _batches(cut: list[Window], piece: int, batch_tokens: int) -> Iterator[list[Window]]:
    """Batches of windows, longest first, so that there is little padding."""
    ordered = sorted(cut, key=lambda window: window.start - window.stop)
    first = 0
    while first < len(ordered):
        longest = ordered[first].stop - ordered[first].start
        rows = max(1, batch_tokens // min(piece, longest))
        yield ordered[first : first + rows]
        first += rows


def _ids(dataset: Dataset, window: Window, eos_first: bool) -> npt.NDArray[np.int64]:
    """The targets of a window, preceded by the id before them: the end-of-document id at a document's start."""
    begin = int(dataset.starts[window.document])
    before = dataset.tokens[begin + window.start - 1] if window.start and not eos_first else dataset.eos_id
    return np.concatenate([[before], dataset.tokens[begin + window.start : begin + window.stop]]).astype(np.int64)


class _Tally:
    """Sums of losses by document and by position; positions in bins that double: 0, 1, 2–3, 4–7, …"""

    def __init__(self, documents: int, longest: int) -> None:
        self.by_document = torch.zeros(documents, dtype=torch.float64)
        self.by_position = torch.zeros(2, longest.bit_length() + 1, dtype=torch.float64)  # losses, targets

    def add(self, batch: list[Window], part: ScoredPiece) -> None:
        losses = -part.log_probability
        document = torch.tensor([window.document for window in batch])
        self.by_document.index_add_(0, document, losses.sum(1))
        position = torch.arange(part.first, part.first + losses.shape[1])
        bins = torch.ceil(torch.log2(position.double() + 1)).long()
        self.by_position.index_add_(1, bins, torch.stack([losses.sum(0), part.counted.sum(0).double()]))

    def result(self, length: int | None, counts: list[int], dataset: Dataset) -> LengthResult:
        tokens = sum(counts)
        nats = self.by_document.sum().item()
        if not math.isfinite(nats):
            raise ValueError("the model's losses are not finite: its weights or checkpoint are broken")
        # A document that was cut counts with a proportional share of its words and bytes.
        share = np.array(counts) / dataset.lengths[: len(counts)]
        words = float((share * dataset.document_words[: len(counts)]).sum())
        size = float((share * dataset.document_bytes[: len(counts)]).sum())
        return LengthResult(
            length=length,
            tokens=tokens,
            loss=nats / tokens,
            standard_error=standard_error(self.by_document.numpy(), np.array(counts)),
            word_perplexity=math.exp(min(nats / words, 700.0)) if words else math.nan,
            bits_per_byte=nats / math.log(2) / size if size else math.nan,
            by_position=tuple(self._positions()),
            by_document=tuple(zip(self.by_document.tolist(), counts, strict=True)),
        )

    def _positions(self) -> Iterator[PositionLoss]:
        for index, (loss, count) in enumerate(self.by_position.T.tolist()):
            if count:
                start = 1 << (index - 1) if index else 0
                yield PositionLoss(start, max(1, 2 * start), int(count), loss / count)


def standard_error(nats: Any, counts: Any) -> float:
    """The standard error of Σ nats / Σ tokens, from the spread of documents around it."""
    if len(counts) < 2:
        return math.nan
    residual = nats - counts * (nats.sum() / counts.sum())
    spread = math.sqrt(float((residual**2).sum()) * len(counts) / (len(counts) - 1))
    return spread / float(counts.sum())
