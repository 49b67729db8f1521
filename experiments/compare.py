"""Two systems on the same documents: the ratio of their perplexities, with a standard error over documents.

Documents are the independent draws. A document that is hard for one system is hard for the other, so the error of the
difference is far below that of either level; it is found by leaving out one document at a time (the jackknife).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Documents = Sequence[tuple[float, int]]
"""For every document: the sum of −log p over its tokens in nats, and the number of tokens."""


class Comparison(NamedTuple):
    """What a system's perplexity is in terms of another's."""

    ratio: float
    """exp of the difference of the mean losses: under 1, the first system is better."""
    standard_error: float
    """Of the ratio; NaN for a single document."""
    documents: int

    @property
    def sigmas(self) -> float:
        """How many standard errors the ratio is away from 1."""
        return (self.ratio - 1) / self.standard_error if self.standard_error else math.nan

    def __str__(self) -> str:
        return f"{self.ratio:.4f} ± {self.standard_error:.4f} over {self.documents} documents"


def paired_ratio(ours: Documents, theirs: Documents) -> Comparison:
    """Our perplexity over theirs; both scored on the same documents, in the same order.

    >>> print(paired_ratio([(30.0, 10), (62.0, 20)], [(33.0, 10), (64.0, 20)]))
    0.8465 ± 0.0820 over 2 documents
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
