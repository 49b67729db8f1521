"""How a Transformer block decodes: keys and values in buffers with room for the tokens to come."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gss.nn.decode_plans import RowBuffer
from gss.nn.decoding import DecodePlan, without_gaps
from gss.nn.state import LayerState
from gss.nn.windows import as_ring, in_order
from gss.ops.products import MOST_ROWS

if TYPE_CHECKING:
    from gss.nn.attention import TransformerBlock

# Not cuDNN's attention: it takes milliseconds to plan each new length, and here every length is new.
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# The least number of tokens for which a row of a cache has room.
_LEAST_ROOM = 64


class _Cache:
    """Keys and values [B, h, room, d] of some of a decoder's rows."""

    def __init__(self, rows: list[int], *buffers: Tensor) -> None:
        self.rows = rows
        self.buffers = [RowBuffer(buffer) for buffer in buffers]

    def add(self, rows: list[int], *buffers: Tensor) -> None:
        self.rows = self.rows + rows
        for held, new in zip(self.buffers, buffers, strict=True):
            held.add(new)

    def keep(self, places: Mapping[int, int]) -> None:
        """Keep the rows that have a new place."""
        order = without_gaps([row not in places for row in self.rows])
        self.rows = [places[self.rows[slot]] for slot in order]
        for held in self.buffers:
            held.keep(order)


class AttentionPlan(DecodePlan):
    """A Transformer block whose keys and values are written in place.

    Without chunks, rows of about the same length share a buffer that each of them at least half fills, so a row takes
    memory in proportion to its own length. The buffer of a full sliding window is a ring: a token overwrites one that
    has left the window. A few more are kept, so that tokens can be taken back.
    """

    def __init__(self, layer: "TransformerBlock", state: LayerState) -> None:
        self._layer, self._window, self._chunked = layer, layer.reach or sys.maxsize, layer.chunk is not None
        self._most = self._window + MOST_ROWS - 1 if layer.sliding else self._window  # tokens kept
        self._device, self._lengths = state["length"].device, list[int]()
        self._caches: dict[int, _Cache] = {}  # by the tokens for which they have room
        self.join(state)

    def step(self, x: Tensor) -> Tensor:
        lengths = torch.tensor(self._lengths, device=self._device)
        projected = self._layer.positioned(self._layer.project(x), lengths)
        attended = [self._attend_all(*token) for token in zip(*(t.split(1, dim=1) for t in projected), strict=True)]
        return self._layer.finish(x, attended[0] if len(attended) == 1 else torch.cat(attended, dim=1))

    def ahead(self) -> int:
        return self._window - self._lengths[0] % self._window if self._chunked else MOST_ROWS

    def rewind(self, count: int) -> None:
        self._lengths = [length - count for length in self._lengths]

    def _attend_all(self, *projected: Tensor) -> Tensor:
        """Query, key and value of the next token → the attention output, [B, 1, h, d] each."""
        self._make_room(1)
        together = [t.transpose(1, 2) for t in projected]  # [B, h, 1, d]
        in_order = list(range(len(self._lengths)))
        attended = torch.empty_like(together[0])
        for cache in self._caches.values():
            if cache.rows == in_order:
                attended = self._attend(cache, *together)
            else:
                attended[cache.rows] = self._attend(cache, *(t[cache.rows] for t in together))
        self._lengths = [length + 1 for length in self._lengths]
        return attended.transpose(1, 2)

    def _attend(self, cache: _Cache, query: Tensor, *new: Tensor) -> Tensor:
        """Query, key and value of the rows of a cache → their attention output, [B, h, 1, d] each."""
        room = cache.buffers[0].tensor.shape[2]
        last = [self._lengths[row] % room if self._chunked else self._lengths[row] for row in cache.rows]
        filled = min(room, max(last) + 1)
        visible = None
        if len(set(last)) == 1:
            for held, token in zip(cache.buffers, new, strict=True):
                held.tensor[:, :, last[0] % room] = token[:, :, 0]
        else:
            index, rows = (torch.tensor(each, device=self._device) for each in (last, range(len(last))))
            for held, token in zip(cache.buffers, new, strict=True):
                held.tensor[rows, :, index % room] = token[:, :, 0].to(held.tensor)
        if len(set(last)) > 1 or last[0] >= self._window:
            end = torch.tensor(last, device=self._device).unsqueeze(1)
            age = (end - torch.arange(filled, device=self._device)) % room
            visible = (age < (end + 1).clamp(max=self._window))[:, None, None]
        keys, values = (held.tensor[:, :, :filled].to(query.dtype) for held in cache.buffers)
        with sdpa_kernel(_ANY_LENGTH):
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)

    def state(self) -> LayerState:
        if not self._lengths:
            return {name: tensor[:0] for name, tensor in self._layer.initial_state(1).items()}
        held = self._layer.reach or max(self._lengths)
        shape = (len(self._lengths), held, self._layer.heads, self._layer.head_width)
        state: LayerState = {"length": torch.tensor(self._lengths, device=self._device)}
        for number, name in enumerate(("keys", "values")):
            for cache in self._caches.values():
                tensor = cache.buffers[number].tensor.transpose(1, 2)
                if self._layer.sliding:
                    tensor = in_order(tensor, state["length"][cache.rows], held)
                whole = state.setdefault(name, tensor.new_zeros(shape))
                whole[cache.rows, : tensor.shape[1]] = tensor[:, :held]
        return state

    def join(self, state: LayerState) -> None:
        lengths: list[int] = state["length"].tolist()
        first = len(self._lengths)
        self._lengths += lengths
        rooms = [self._room(length) for length in lengths]
        for room in sorted(set(rooms)):
            chosen = [row for row, its in enumerate(rooms) if its == room]
            held = [state[name] if len(chosen) == len(rooms) else state[name][chosen] for name in ("keys", "values")]
            if self._layer.sliding:
                held = [as_ring(tensor, state["length"][chosen], room) for tensor in held]
            self._put(room, [first + row for row in chosen], *(tensor[:, :room].transpose(1, 2) for tensor in held))

    def keep(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        self._keep({row: place for place, row in enumerate(rows)})

    def _keep(self, places: Mapping[int, int], among: Sequence[int] | None = None) -> None:
        for room in list(self._caches) if among is None else among:
            self._caches[room].keep(places)
            if not self._caches[room].rows:
                del self._caches[room]  # frees the memory of long rows

    def _room(self, length: int) -> int:
        """The tokens for which a row gets room: at least one more than it has."""
        return self._window if self._chunked else min(self._most, max(_LEAST_ROOM, 1 << length.bit_length()))

    def _put(self, room: int, rows: list[int], *tensors: Tensor) -> None:
        """Add the keys and values [B, h, S, d] of rows to the cache with room for this many tokens."""
        buffers = [F.pad(tensor, (0, 0, 0, room - tensor.shape[2])).contiguous() for tensor in tensors]  # copies
        if room in self._caches:
            self._caches[room].add(rows, *buffers)
        else:
            self._caches[room] = _Cache(rows, *buffers)

    def _make_room(self, count: int) -> None:
        """Double the room of rows in which `count` more tokens would not fit."""
        for room in [] if self._chunked else [room for room in self._caches if room < self._most]:
            cache = self._caches[room]
            full = [slot for slot, row in enumerate(cache.rows) if self._lengths[row] + count > room]
            if full:
                rows = [cache.rows[slot] for slot in full]
                self._put(min(2 * room, self._most), rows, *(held.tensor[full] for held in cache.buffers))
                self._keep({row: row for row in cache.rows if row not in rows}, [room])
