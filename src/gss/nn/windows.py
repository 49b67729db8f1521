"""Indices of tokens in windows of W, for layers whose memory advances one window at a time.

A cache holds 2W slots per row: the previous window, then the current one as far as it has been read, then zeros. A
piece of any length is placed after the tokens that its row has read; rows may be at different places in their windows.
This module knows only indices, not attention, parameters or the contents of slots.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Windows:
    """A piece of `length` tokens in windows, for rows that have read `position` [B] tokens (None: none).

    Slots are counted from the start of a row's current window: token i of row b is in slot offset_b + i.
    """

    def __init__(self, window: int, length: int, position: Tensor | None = None) -> None:
        self.window, self.length, self.position = window, length, position
        self.single = position is not None and length == 1
        """Whether there is one token per row, which is then computed alone, wherever in its window it is."""
        self.offset: Tensor | None = None
        self.index: Tensor | None = None
        """[B, L], every token's slot; None if all rows begin in slot 0."""
        shift = 0
        if position is not None:
            self.offset = position % window
            shift = window - 1 if self.single else int(self.offset.max())
            if self.single or shift:
                self.index = self.offset.unsqueeze(1) + torch.arange(length, device=position.device)
        self.slots = shift + length
        """The slots that the piece spans; for a single token, those of the current window."""
        self.done = length // window * window
        """The slots, counted from the window before the piece, that no later piece needs in any row."""

    @property
    def parts(self) -> list[slice]:
        """The slots of each window, in order; the last may be shorter than a window."""
        return [slice(s, min(s + self.window, self.slots)) for s in range(0, self.slots, self.window)]

    def spread(self, x: Tensor) -> Tensor:
        """[B, L, …] in its slots, with zeros elsewhere; a single token stays as it is."""
        if self.index is None or self.single:
            return x
        return x.new_zeros(x.shape[0], self.slots, *x.shape[2:]).scatter(1, expand_index(self.index, x), x)

    def collect(self, y: Tensor) -> Tensor:
        """The inverse of `spread`: the tokens from their slots."""
        return y if self.index is None or self.single else y.gather(1, expand_index(self.index, y))

    def join(self, cached: Tensor | None, new: Tensor) -> Tensor:
        """[B, W + slots, …]: the cache, in the precision of `new`, with all new tokens [B, L, …] in their slots."""
        if cached is None:
            return F.pad(new, (0, 0, 0, 0, self.window, 0))
        if self.index is None:
            return torch.cat([cached[:, : self.window].to(new.dtype), new], dim=1)
        room = sized(cached.to(new.dtype), self.window + self.slots)
        return room.scatter(1, expand_index(self.index + self.window, new), new)

    def kept(self, part: slice, caches: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...] | None]:
        """For each group of caches [B, 2W, …]: a mask [B, slots, 1, 1] of the slots of a window that the piece fills,
        and the caches' contents of that window. None if the piece fills all slots.
        """
        if self.index is None:
            return [None] * len(caches)
        slot = torch.arange(part.start, part.stop, device=self.index.device)
        fresh = ((slot >= self.index[:, :1]) & (slot <= self.index[:, -1:]))[:, :, None, None]
        start = self.window + part.start
        return [(fresh, *(sized(cached[:, start:], len(slot)) for cached in group)) for group in caches]

    def remaining(self, joined: Tensor) -> Tensor:
        """The cache after the piece, [B, 2W, …], from [B, W + slots, …] without the first `done` slots.

        It starts with the window before the one of each row's next token.
        """
        if self.index is None or self.offset is None:
            return sized(joined, 2 * self.window)
        start = (self.offset + self.length) // self.window * self.window - self.done
        kept = start.unsqueeze(1) + torch.arange(2 * self.window, device=joined.device)
        padded = sized(joined, 3 * self.window)
        return padded.gather(1, expand_index(kept, joined))

    def read(self, like: Tensor) -> Tensor:
        """The tokens that each row has read after the piece, [B]; the rows are those of `like` [B, …]."""
        new = like.new_full(like.shape[:1], self.length, dtype=torch.int64)
        return new if self.position is None else self.position + new

    def filled(self, part: slice) -> bool | Tensor:
        """Which rows [B] this piece takes to the end of a window; a bool if it is the same for all."""
        if self.index is None or part.stop - part.start < self.window:
            return part.stop - part.start == self.window
        return self.index[:, -1] + 1 >= part.stop

    def has_previous(self, part: slice) -> bool | Tensor:
        """Which rows [B] have a window before this one; a bool if it is the same for all."""
        if part.start > 0 or self.position is None:
            return part.start > 0
        return self.position >= self.window


def expand_index(index: Tensor, like: Tensor) -> Tensor:
    """[B, L] as an index into dimension 1 of [B, S, …]."""
    return index.reshape(*index.shape, *[1] * (like.ndim - 2)).expand(*index.shape, *like.shape[2:])


def sized(x: Tensor, size: int) -> Tensor:
    """[B, S, h, d] cut or padded with zeros to `size` slots."""
    return x[:, :size] if x.shape[1] >= size else F.pad(x, (0, 0, 0, 0, 0, size - x.shape[1]))


def as_ring(held: Tensor, lengths: Tensor, room: int) -> Tensor:
    """The last W tokens of rows [B, W, h, d], the newest last, as [B, room, h, d] with position p in slot p % room."""
    back = (lengths.unsqueeze(1) - 1 - torch.arange(room, device=held.device)) % room
    known = back < lengths.clamp(max=held.shape[1]).unsqueeze(1)
    tokens = held.gather(1, expand_index((held.shape[1] - 1 - back).clamp(min=0), held))
    return torch.where(known[..., None, None], tokens, 0)


def in_order(ring: Tensor, lengths: Tensor, window: int) -> Tensor:
    """The inverse of `as_ring`: the last W tokens, [B, W, h, d], zeros before a row's first."""
    position = lengths.unsqueeze(1) - window + torch.arange(window, device=ring.device)
    tokens = ring.gather(1, expand_index(position % ring.shape[1], ring))
    return torch.where((position >= 0)[..., None, None], tokens, 0)
