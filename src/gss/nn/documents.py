"""Several documents in one row: for operations that mix tokens, each document becomes a row of its own.

Operations on single tokens (dense layers, norms: nearly all the work) run on the packed rows as they are. Only the
mixers, convolutions or attention, see the documents as separate rows, so no document reaches another. Documents are
grouped by length rounded up to a power of two, so at most half of the layout is padding.

Layers need no code for this: the model passes them `Documents` in place of a state, a layer passes it on to its mixer
like a state, and `each_document_alone` around the mixer handles it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Documents:
    """The places of documents in packed rows, from a mask `starts` [B, L] that is true at their first tokens.

    The first column always counts as a start, since packed rows carry no state. If several `ranks` hold a stretch of
    each row, these are the documents in the stretch of `rank`, of which the first may have begun in another stretch.
    """

    def __getitem__(self, name: str) -> "Documents":
        """In place of the tensor of that name in a layer's state."""
        return self

    def __init__(self, starts: Tensor, rank: int = 0, ranks: int = 1) -> None:
        starts = starts.clone()
        starts[:, 0] = True
        stretches = starts.unflatten(1, (ranks, -1))
        self._unbroken = ~stretches.any(2)  # [B, ranks]: where no document starts
        self.position = _since(starts).unflatten(1, (ranks, -1))[:, rank]  # [B, L], within its document
        self._starts = starts = stretches[:, rank].clone()
        starts[:, 0] = True
        document = starts.flatten().cumsum(0) - 1
        within = _since(starts).flatten()
        lengths = torch.bincount(document)
        begun = self.position[starts] > 0  # which documents continue from another stretch
        exponent = torch.ceil(torch.log2(lengths.double())).long()
        groups = [(exponent == power) & ~begun for power in exponent[~begun].unique()]
        self._buckets: list[tuple[Tensor, Tensor, int, int, Tensor | None]] = []
        for chosen in [*groups, begun] if begun.any() else groups:
            members = chosen[document].nonzero().squeeze(1)  # which packed tokens
            length = 1 << int(exponent[chosen].max())
            row = chosen.cumsum(0) - 1
            slots = row[document[members]] * length + within[members]  # where each is laid out
            goes_on = members[within[members] == 0] // starts.shape[1] if chosen is begun else None  # the rows it is in
            self._buckets.append((members, slots, int(chosen.sum()), length, goes_on))
        self._order = torch.argsort(torch.cat([members for members, *_ in self._buckets]))

    def mix(self, mixer: Callable[[Tensor, Any], Tensor], x: Tensor, before: Any = None) -> Tensor:
        """A causal map of [documents, length, …] and their states, applied to each document of packed rows [B, L, …]
        alone; `before` is the state [B, …] of those that began in another stretch.
        """
        flat = x.flatten(0, 1)
        mixed = []
        for members, slots, count, length, goes_on in self._buckets:
            rows = flat.new_zeros(count * length, *flat.shape[1:]).index_copy(0, slots, flat[members])
            state = None if goes_on is None else tree_map(lambda tensor, rows=goes_on: tensor[rows], before)
            mixed.append(mixer(rows.unflatten(0, (count, length)), state).flatten(0, 1)[slots])
        return torch.cat(mixed)[self._order].unflatten(0, x.shape[:2])

    def last(self, x: Tensor) -> Tensor:
        """The rows with zeros before each one's last document."""
        document = self._starts.cumsum(1)
        return x * (document == document[:, -1:]).to(x.dtype).reshape(*document.shape, *[1] * (x.ndim - 2))

    def survivors(self, rank: int, state: Tensor) -> Tensor:
        """A state [B, …] from before a rank's stretch, with zeros where no document goes on to the end of it."""
        return state * self._unbroken[:, rank].to(state.dtype).reshape(-1, *[1] * (state.ndim - 1))


def _since(starts: Tensor) -> Tensor:
    """[B, L]: how many tokens each one is after the last start."""
    column = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return column - torch.where(starts, column, 0).cummax(dim=1).values


def each_document_alone(mixer: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a mixer, (self, x, state, keep_state) → (y, state), with x [B, L, …]: given `Documents` as the state,
    it reads each of them from its start and returns an empty state.
    """

    @functools.wraps(mixer)
    def mix(self: Any, x: Tensor, state: Any = None, keep_state: bool = True) -> Any:
        if not isinstance(state, Documents):
            return mixer(self, x, state, keep_state)
        return state.mix(lambda rows, _: mixer(self, rows, None, False)[0], x), {}

    return mix
