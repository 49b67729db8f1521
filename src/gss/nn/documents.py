"""Several documents in one row: each is laid out as a row of its own where tokens mix, and put back after.

What acts on each token alone (dense layers, norms: nearly all the work) runs on the packed rows as they are. Only
the mixing, a convolution or attention, sees documents apart, so none reaches another. Documents are grouped by
length rounded up to a power of two: at most half of what is laid out is padding.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Documents:
    """Where documents lie in packed rows, from a mask `starts` [B, L] that is true at each one's first token.

    The first column counts as a start whether marked or not: nothing is carried into packed rows.
    """

    def __init__(self, starts: Tensor) -> None:
        length = starts.shape[1]
        starts = starts.clone()
        starts[:, 0] = True
        column = torch.arange(length, device=starts.device).expand_as(starts)
        self.position = column - torch.where(starts, column, 0).cummax(dim=1).values  # [B, L], within its document
        document = starts.flatten().cumsum(0) - 1
        lengths = torch.bincount(document)
        exponent = torch.ceil(torch.log2(lengths.double())).long()
        self._buckets: list[tuple[Tensor, Tensor, int, int]] = []
        for power in exponent.unique().tolist():
            chosen = exponent == power
            members = chosen[document].nonzero().squeeze(1)  # which packed tokens
            row = chosen.cumsum(0) - 1
            slots = (row[document[members]] << power) + self.position.flatten()[members]  # where each is laid out
            self._buckets.append((members, slots, int(chosen.sum()), 1 << power))
        self._order = torch.argsort(torch.cat([members for members, *_ in self._buckets]))

    def mix(self, mixer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A causal map of [documents, length, …] applied to each document of packed rows [B, L, …] alone."""
        flat = x.flatten(0, 1)
        mixed = []
        for members, slots, count, length in self._buckets:
            rows = flat.new_zeros(count * length, *flat.shape[1:]).index_copy(0, slots, flat[members])
            mixed.append(mixer(rows.unflatten(0, (count, length))).flatten(0, 1)[slots])
        return torch.cat(mixed)[self._order].unflatten(0, x.shape[:2])
