"""Several documents in one row: each is laid out as a row of its own where tokens mix, and put back after.

What acts on each token alone (dense layers, norms: nearly all the work) runs on the packed rows as they are. Only
the mixing, a convolution or attention, sees documents apart, so none reaches another. Documents are grouped by
length rounded up to a power of two: at most half of what is laid out is padding.

Layers know nothing of this. The model gives them `Documents` in place of a state, which is what they are: what came
before each token. A layer hands it to its mixer as it would a state, and `each_document_alone` around the mixer acts.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Documents:
    """Where documents lie in packed rows, from a mask `starts` [B, L] that is true at each one's first token.

    The first column counts as a start whether marked or not: nothing is carried into packed rows.
    """

    def __getitem__(self, name: str) -> "Documents":
        """In place of the tensor of that name in a layer's state."""
        return self

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


def each_document_alone(mixer: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a mixer, (self, x, state, keep_state) → (y, state): given `Documents` for a state, it reads each of
    them from its start, and returns an empty state. x is a tensor [B, L, …], or a tuple of several of one shape.
    """

    @functools.wraps(mixer)
    def mix(self: Any, x: Any, state: Any = None, keep_state: bool = True) -> Any:
        if not isinstance(state, Documents):
            return mixer(self, x, state, keep_state)
        if isinstance(x, Tensor):
            return state.mix(lambda rows: mixer(self, rows, None, False)[0], x), {}
        return state.mix(lambda rows: mixer(self, rows.unbind(2), None, False)[0], torch.stack(x, dim=2)), {}

    return mix
