"""Log-probabilities of tokens, the basis of evaluation, lm-eval and `LM.score`.

Sequences of any length are read in pieces with the state carried, which is exact, so memory is bounded by the piece.
Logits exist for a few tokens at a time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gss.model import LanguageModel
from gss.nn.context import Context, shared_pieces
from gss.nn.state import ModelState

PIECE = 4096
"""Tokens of a sequence that are read at a time."""
_LOGIT_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}  # logits held at a time: a GPU needs more of them to be busy


def token_scores(model: LanguageModel, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For targets [N] after activations [N, E]: log-probabilities in nats, float64, and whether no other token has a
    larger logit; on the CPU, from a few rows of logits at a time.
    """
    rows = max(1, _LOGIT_ELEMENTS.get(hidden.device.type, 1 << 25) // model.config.vocab_size)
    logs, likeliest = [], []
    for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = model.logits(part)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = wide.gather(1, target.unsqueeze(1)).squeeze(1)
        logs.append((own - wide.logsumexp(-1)).double())
        likeliest.append(logits.argmax(-1) == target)
    return torch.cat(logs).cpu(), torch.cat(likeliest).cpu()  # moved once, so that a GPU is waited for once


class ScoredPiece(NamedTuple):
    """A piece of several sequences; those that have ended are no longer among its rows."""

    first: int
    """Position of its first target: the sequences' second ids are targets 0."""
    counted: Tensor
    """[B, L] bool: which targets are asked for."""
    log_probability: Tensor
    """[B, L] nats, float64; 0 where a target does not count."""
    likeliest: Tensor
    """[B, L] bool; True where a target does not count."""


@torch.no_grad()
def score_sequences(
    model: LanguageModel,
    sequences: Sequence[npt.ArrayLike],
    *,
    skip: Sequence[int] | None = None,
    piece: int = PIECE,
    state: ModelState | None = None,
    context: Context | None = None,
) -> Iterator[ScoredPiece]:
    """Score every id of some sequences but the first, by those before it; longest sequences first.

    `skip` says for each sequence how many targets are read but not scored; the first ids continue from `state`.
    The ranks of a `context` read a piece each at the same time, and all get all scores; what is left at the end, less
    than a piece for each, they all read.
    """
    rows = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    counts = np.array([len(row) - 1 for row in rows])
    assert all(counts[:-1] >= counts[1:]), "the longest sequence comes first"
    skipped = np.zeros_like(counts) if skip is None else np.asarray(skip)
    device = model.device
    for first, length, sharing in shared_pieces(int(counts[0]), piece, context):
        live = int((counts > first).sum())
        if state is not None and live < state.batch:
            state = state.select(range(live))
        ids = np.zeros((live, length + 1), dtype=np.int64)  # filled up at the end, which nothing before it sees
        for row in range(live):
            part = rows[row][first : first + length + 1]
            ids[row, : len(part)] = part
        position = np.arange(first, first + length)
        counted = torch.from_numpy((position >= skipped[:live, None]) & (position < counts[:live, None]))
        tokens = torch.from_numpy(ids).to(device)
        keep = first + length < int(counts[0])
        hidden, state = model.hidden(tokens[:, :-1], state, keep, context=sharing)
        own, targets = (sharing.own(t) if sharing else t for t in (counted, tokens[:, 1:]))
        chosen = own.flatten().nonzero().squeeze(1).to(device)
        scores, hits = token_scores(model, hidden.flatten(0, 1)[chosen], targets.flatten()[chosen])
        logs = torch.zeros(own.shape, dtype=torch.float64).masked_scatter_(own, scores)
        likeliest = torch.ones_like(own).masked_scatter_(own, hits)
        if sharing:
            logs, likeliest = (sharing.whole(t.to(device)).cpu() for t in (logs, likeliest))
        yield ScoredPiece(first, counted, logs, likeliest)
