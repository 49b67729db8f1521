"""How far back a model looks: the loss on the same targets after more and more of their own document.

A block consists of consecutive targets of a document. It is read after 1, 2, 4, … true tokens up to the longest
context, in two ways: from an empty state at the first true token; and after another document's tokens, which fill the
window up to the longest context, so that length and position stay the same and only the share of true tokens changes.
The other document's tokens are followed directly by the true ones. Everything is read exactly, in pieces with the state
carried.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gss.data import Dataset
from gss.evaluation import PositionLoss, evaluate, longest_document, opened, standard_error
from gss.lm import LM
from gss.model import LanguageModel
from gss.nn.state import ModelState
from gss.precision import resolved, running
from gss.scoring import PIECE, score_sequences

MOST = 1 << 20  # the longest context that is chosen by default
UNBOUNDED_LIMIT = 16_384  # the longest context for a model that keeps every token, whose cost grows with its square
SHARE = 0.05  # the share of the whole gain from context that may be missing at the effective context
_ENOUGH = 8  # documents that must reach the longest context
_RESAMPLES = 1000

Numbers = npt.NDArray[np.int64]


class Block(NamedTuple):
    """Targets of a document from `start` on, and the place in another document whose tokens replace their context."""

    document: int
    start: int
    other: int
    other_start: int


@dataclass(frozen=True)
class ContextLoss:
    """The loss of the targets after `context` true tokens, with standard errors over documents."""

    context: int
    loss: float
    standard_error: float
    excess: float  # over the loss with the longest context, on the same targets
    excess_error: float  # of the excess, paired by document


@dataclass(frozen=True)
class ContextProbe:
    """How the loss of the same targets depends on what comes before them."""

    split: str
    documents: int
    blocks: int
    tokens: int  # targets, each scored once for every context
    by_position: tuple[PositionLoss, ...] = field(repr=False)
    """Over whole documents with the state carried; over windows of the longest context if the state is unbounded."""
    fresh: tuple[ContextLoss, ...]  # read from an empty state at the first true token
    replaced: tuple[ContextLoss, ...]  # read after another document's tokens, with the same window for every context
    effective_context: int | None
    """The smallest context from which on `replaced` is within 5% of its whole gain (from the shortest context to the
    longest); None if that gain is below two standard errors."""
    effective_interval: tuple[int, int]  # the central 95% of effective contexts when documents are resampled
    effective_error: float  # their standard deviation, in doublings


def contexts_up_to(longest: int, shortest: int = 1) -> list[int]:
    """The shortest context, doubled repeatedly, up to the longest."""
    if not 1 <= shortest < longest:
        raise ValueError(f"contexts must satisfy 1 <= shortest < longest, not {shortest} and {longest}")
    count = math.ceil(math.log2(longest / shortest))
    return [*(shortest << doubling for doubling in range(count)), longest]


def shared_longest(lengths: Sequence[int] | Numbers, targets: int) -> int:
    """The largest power of two, up to 1M, that eight documents (or half of fewer than 16) have before the targets."""
    ordered = sorted((int(length) for length in lengths), reverse=True)
    wanted = min(_ENOUGH, max(2, len(ordered) // 2))
    room = ordered[wanted - 1] - targets if len(ordered) >= wanted else 0
    if room < 2:
        needed = f"scoring {targets:,} targets after some context needs {wanted} documents of {targets + 2:,} tokens"
        raise ValueError(f"documents are too short, or too few: {needed}: use fewer targets or longer documents")
    return int(min(MOST, 1 << (room.bit_length() - 1)))


def choose_blocks(
    lengths: Sequence[int] | Numbers, longest: int, targets: int, per_document: int, max_documents: int
) -> list[Block]:
    """Blocks of targets with the longest context before them, spread over each of the first documents with room.

    The replacement context of a block comes from the next of these documents, that of the last from the first.
    """
    places: list[tuple[int, list[int]]] = []
    for document, length in enumerate(lengths):
        starts = range(longest, int(length) - targets + 1, targets)
        if len(starts) and len(places) < max_documents:
            chosen = np.linspace(0, len(starts) - 1, min(per_document, len(starts))).round().astype(int).tolist()
            places.append((document, [starts[index] for index in chosen]))
    if len(places) < 2:
        found = f"{len(places)} of them have {longest:,} tokens before {targets:,} targets (longest: {max(lengths):,})"
        raise ValueError(f"documents are too short: {found}, but two are needed; give a smaller --longest")
    blocks = []
    for (document, starts_of), (other, others) in zip(places, places[1:] + places[:1], strict=True):
        blocks += [Block(document, start, other, others[i % len(others)]) for i, start in enumerate(starts_of)]
    return blocks


def probe_context(
    model: LM | LanguageModel,
    dataset: Dataset | str | Path,
    *,
    longest: int | None = None,
    shortest: int = 1,
    targets: int = 512,
    per_document: int = 2,
    max_documents: int = 32,
    split: str = "valid",
    unbounded_limit: int = UNBOUNDED_LIMIT,
    position_tokens: int = MOST,
    piece: int = PIECE,
    batch_tokens: int = 16_384,
    precision: str = "auto",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ContextProbe:
    """Measure how the loss of a fixed set of targets depends on the true tokens before them.

    longest             the longest context; None: that of `shared_longest`
    targets             consecutive targets in a block
    per_document        the most blocks per document; `max_documents`: the most documents
    unbounded_limit     the longest context for a model that keeps every token, on the same targets
    position_tokens     tokens of whole documents that are scored by position
    report              called with the number of tokens read so far and in total

    The other arguments are those of `gss.evaluate`.
    """
    eos_first = isinstance(model, LM) and model.eos_first
    model, dataset = opened(model, dataset, split)
    if min(targets, per_document, max_documents, position_tokens, piece, batch_tokens) < 1:
        raise ValueError("targets, blocks, documents, position_tokens, piece and batch_tokens must be at least 1")
    longest = longest or shared_longest(dataset.lengths, targets)
    window = longest if model.bounded_state else min(longest, unbounded_limit)
    contexts = contexts_up_to(window, shortest)
    blocks = choose_blocks(dataset.lengths, longest, targets, per_document, max_documents)
    position_tokens = min(position_tokens, int(dataset.lengths.sum()))
    total = len(blocks) * (2 * sum(contexts) + window + 2 * len(contexts) * targets) + position_tokens
    sums = np.zeros((2, len(blocks), len(contexts)))
    rows, done, training = max(1, batch_tokens // min(piece, window)), 0, model.training
    model.eval()
    try:
        for first in range(0, len(blocks), rows):
            part = blocks[first : first + rows]
            own = _ids(dataset, [(b.document, b.start - window, b.start + targets) for b in part])
            other = _ids(dataset, [(b.other, b.other_start - window, b.other_start) for b in part])
            with running(model, resolved(precision, model)):
                for way, before in enumerate((other[:, :0], other)):
                    sums[way, first : first + len(part)] = block_losses(model, own, before, contexts, targets, piece)
            done += (total - position_tokens) // len(blocks) * len(part)
            report(done, total)
        length = None if model.bounded_state else min(window, longest_document(dataset, position_tokens))
        whole = evaluate(
            model, dataset, [length], max_tokens=position_tokens, piece=piece, batch_tokens=batch_tokens,
            precision=precision, eos_first=eos_first, report=lambda scored, _: report(done + scored, total),
        )  # fmt: skip
    finally:
        model.train(training)
    if not np.isfinite(sums).all():
        raise ValueError("the model's losses are not finite: its weights or checkpoint are broken")
    _, blocks_each = np.unique([block.document for block in blocks], return_counts=True)
    counts = blocks_each * targets
    # Blocks are in the order of their documents.
    fresh, replaced = np.add.reduceat(sums, blocks_each.cumsum() - blocks_each, axis=1)
    value, interval, error = effective_context(contexts, replaced, counts)
    return ContextProbe(
        split=dataset.split, documents=len(counts), blocks=len(blocks), tokens=int(counts.sum()),
        by_position=whole.rows[0].by_position, fresh=_rows(contexts, fresh, counts),
        replaced=_rows(contexts, replaced, counts), effective_context=value, effective_interval=interval,
        effective_error=error,
    )  # fmt: skip


@torch.no_grad()
def block_losses(
    model: LanguageModel, own: Numbers, other: Numbers, contexts: list[int], targets: int, piece: int
) -> npt.NDArray[np.float64]:
    """The summed losses [B, contexts] of the last `targets` ids of `own` [B, window + targets] after each context of
    true ids. The first ids of `other` [B, window] fill the rest of the window, unless `other` is empty.
    """
    device, window = model.device, own.shape[1] - targets
    state: ModelState | None = None
    read = 0
    sums = np.zeros((len(own), len(contexts)))
    for column in reversed(range(len(contexts))):  # longest first: the replaced part only grows, so it is read once
        context = contexts[column]
        wanted = min(window - context, other.shape[1])
        for first in range(read, wanted, piece):
            ids = torch.from_numpy(other[:, first : min(first + piece, wanted)]).to(device)
            _, state = model.hidden(ids, state)
        read = wanted
        skip = [context - 1] * len(own)
        for part in score_sequences(model, list(own[:, window - context :]), skip=skip, piece=piece, state=state):
            sums[:, column] -= part.log_probability.sum(1).numpy()
    return sums


def effective_context(
    contexts: Sequence[int], losses: npt.NDArray[np.float64], counts: Numbers
) -> tuple[int | None, tuple[int, int], float]:
    """The effective context, the central 95% of those of resampled documents, and their spread in doublings.

    losses [documents, contexts] are sums over each document's targets, counts the numbers of targets.
    """
    documents = len(counts)
    weights = np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), _RESAMPLES)
    weights = np.concatenate([np.ones((1, documents), np.int64), weights])  # the first is the documents as they are
    means = weights @ losses / (weights @ counts)[:, None]
    excess = means - means[:, -1:]
    gain = excess[:, :1]
    within = excess <= SHARE * gain
    lasting = np.logical_and.accumulate(within[:, ::-1], axis=1)[:, ::-1]
    # Without a gain, the longest context is no better than the shortest.
    found = np.where(gain[:, 0] > 0, np.asarray(contexts)[lasting.argmax(1)], contexts[0])
    low, high = np.quantile(found[1:], [0.025, 0.975], method="inverted_cdf").tolist()
    known = gain[0, 0] > 2 * standard_error(losses[:, 0] - losses[:, -1], counts)
    return int(found[0]) if known else None, (int(low), int(high)), float(np.log2(found[1:]).std())


def _rows(contexts: list[int], losses: npt.NDArray[np.float64], counts: Numbers) -> tuple[ContextLoss, ...]:
    rows = []
    for context, column in zip(contexts, losses.T, strict=True):
        excess = column - losses[:, -1]
        mean, difference = (float(values.sum() / counts.sum()) for values in (column, excess))
        errors = standard_error(column, counts), standard_error(excess, counts)
        rows.append(ContextLoss(context, mean, errors[0], difference, errors[1]))
    return tuple(rows)


def _ids(dataset: Dataset, places: list[tuple[int, int, int]]) -> Numbers:
    """Tokens start … stop − 1 of each (document, start, stop), as rows."""
    begins = dataset.starts
    rows = [dataset.tokens[begins[document] + start : begins[document] + stop] for document, start, stop in places]
    return np.stack(rows).astype(np.int64)
