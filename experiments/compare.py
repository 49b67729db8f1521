"""Runs of `experiments.quality` on the same held-out documents: perplexity, and ratios with a standard error.

Settings are chosen on every other document (`choose`) and reported on the rest (`report`). Documents are treated as
independent samples. A document that is hard for one system is hard for the other, so the error of the difference is far
smaller than that of either level. It is estimated by the jackknife, leaving out one document at a time.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Run = dict[str, Any]
"""A result of `experiments.quality`."""
Documents = Sequence[tuple[float, int]]
"""For every document: the sum of −log p over its tokens in nats, and the number of tokens."""


class Comparison(NamedTuple):
    """The ratio of two systems' perplexities."""

    ratio: float
    """exp of the difference of the mean losses: under 1, the first system is better."""
    standard_error: float
    """Of the ratio; NaN for a single document."""
    documents: int

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.standard_error:.3f}"


def paired_ratio(ours: Documents, theirs: Documents) -> Comparison:
    """Our perplexity over theirs; both scored on the same documents, in the same order.

    >>> print(paired_ratio([(30.0, 10), (62.0, 20)], [(33.0, 10), (64.0, 20)]))
    0.846 ± 0.082
    """
    our_nats, our_counts = np.array(ours, dtype=np.float64).T
    their_nats, their_counts = np.array(theirs, dtype=np.float64).T
    if len(our_counts) != len(their_counts) or (our_counts != their_counts).any():
        raise ValueError("the two systems were not scored on the same tokens: their documents' token counts differ")
    tokens, difference = our_counts.sum(), our_nats - their_nats
    ratio = math.exp(difference.sum() / tokens)
    count = len(difference)
    if count < 2:
        return Comparison(ratio, math.nan, count)
    left_out = np.exp((difference.sum() - difference) / (tokens - our_counts))
    spread = (count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()
    return Comparison(ratio, math.sqrt(spread), count)


def half(documents: Documents, which: str) -> Documents:
    """The documents that settings are chosen on, or those that are reported."""
    return documents[0::2] if which == "choose" else documents[1::2]


def perplexity(run: Run, which: str, length: int = 4096) -> float | None:
    """Of one half of the documents; None where that length was not scored."""
    documents = half(run["documents"].get(str(length), []), which)
    return math.exp(sum(nats for nats, _ in documents) / sum(count for _, count in documents)) if documents else None


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in their seed alone, together; the best on the documents to choose first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = "+".join(part for part in run["system"].split("+") if not part.startswith("seed="))
        groups.setdefault(same, []).append(run)
    length = 4096 if any("4096" in run["documents"] for run in runs) else 512

    def score(group: list[Run]) -> float:
        known = [found for run in group if (found := perplexity(run, "choose", length)) is not None]
        return statistics.mean(known) if known else math.inf

    return sorted(groups.values(), key=score)


def paired(ours: Sequence[Run], theirs: Sequence[Run], which: str, length: int) -> Comparison:
    """Our perplexity over theirs, means over seeds, paired by document.

    With another edition of a vocabulary documents have a token more or less: runs are compared with those that were
    scored on the same tokens, and a document counts once for each edition that both sides have.
    """
    sides = [_by_tokens(runs, length) for runs in (ours, theirs)]
    shared = [tokens for tokens in sides[0] if tokens in sides[1]]
    return paired_ratio(*(half(_added([side[tokens] for tokens in shared]), which) for side in sides))


def _by_tokens(runs: Sequence[Run], length: int) -> dict[tuple[int, ...], Documents]:
    """Nats and targets of each document, as the mean over the runs that were scored on the same tokens."""
    groups: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    for run in runs:
        nats, counts = zip(*run["documents"][str(length)], strict=True)
        groups.setdefault(counts, []).append(nats)
    return {
        counts: [(statistics.mean(nats), count) for *nats, count in zip(*seeds, counts, strict=True)]
        for counts, seeds in groups.items()
    }


def _added(editions: Sequence[Documents]) -> Documents:
    """Nats and targets of each document in all editions together."""
    if not editions:
        raise ValueError("the two systems were not scored on the same tokens: no edition of the documents is common")
    return [(sum(nats for nats, _ in same), sum(count for _, count in same)) for same in zip(*editions, strict=True)]
