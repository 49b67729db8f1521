"""The Transformer block: causal attention over everything, or on independent chunks as in the hybrid.

The state is the keys and values that later tokens can still see (all of them, or the current chunk's) and how many
tokens each row has read; rows may be at different positions, so every index below is a row's own.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gss.config import ModelConfig
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.documents import Documents
from gss.nn.state import LayerState, SequenceLayer, Slot
from gss.nn.stepping import CacheStepper, Stepper
from gss.ops.norm import normed

# Queries that attend to a cache at a time: bounds the mask to this many rows of the cache's length.
_QUERY_BLOCK = 1024


class TransformerBlock(SequenceLayer):
    """x + attention(norm x), then a feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention = config.attention
        self.heads = attention.heads
        self.head_width = attention.head_width or config.width // attention.heads
        self.chunk = attention.chunk
        self.norm = norm(config.width, config)
        self.query_key_value = dense(config.width, self.heads * self.head_width, config, blocks=3)
        self.output = dense(self.heads * self.head_width, config.width, config)
        self.feedforward = FeedForward(config)

    def state_slots(self) -> dict[str, Slot]:
        cache = Slot((self.chunk, self.heads, self.head_width))
        return {"keys": cache, "values": cache, "length": Slot((), integer=True)}

    def mixing_flops(self, length: int) -> float:
        keys = (min(self.chunk or length, length) + 1) / 2  # that a token sees, on average
        return 4 * self.heads * self.head_width * keys

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        keep_state: bool = True,
        documents: Documents | None = None,
    ) -> tuple[Tensor, LayerState]:
        projected = self.project(x)
        attend = self._attend_everything if self.chunk is None else self._attend_chunks
        after: LayerState = {}
        if documents is None:
            attended, after = attend(projected, state, keep_state)
        else:
            attended = documents.mix(lambda rows: attend(rows, None, False)[0], projected)
        return self.finish(x, attended), after

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values: [B, L, 3, h, d]."""
        return self.query_key_value(normed(self.norm, x)).unflatten(-1, (3, self.heads, self.head_width))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output from its input and what each token attends to, [B, L, h, d]."""
        return self.feedforward(x + self.output(attended.flatten(2)))

    def stepper(self, state: LayerState, block: int) -> Stepper:
        return _Steps(self, state)

    def _attend_everything(
        self, projected: Tensor, state: LayerState | None, keep_state: bool
    ) -> tuple[Tensor, LayerState]:
        queries, keys, values = projected.unbind(2)  # [B, L, h, d] each
        batch, length = keys.shape[:2]
        if state is None:
            position = torch.zeros(batch, dtype=torch.int64, device=keys.device)
            attended = _causal_attention(queries, keys, values)
        else:
            position = state["length"]
            index = _positions(position, length)
            capacity = state["keys"].shape[1] + length
            keys = _placed(state["keys"], keys, index, capacity)
            values = _placed(state["values"], values, index, capacity)
            attended = _masked_attention(queries, keys, values, index)
        if not keep_state:
            return attended, {}
        # Without the queries, which lie between them.
        return attended, {"keys": keys.contiguous(), "values": values.contiguous(), "length": position + length}

    def _attend_chunks(
        self, projected: Tensor, state: LayerState | None, keep_state: bool
    ) -> tuple[Tensor, LayerState]:
        assert self.chunk is not None
        queries, keys, values = projected.unbind(2)
        batch, length = keys.shape[:2]
        if state is None:
            position = torch.zeros(batch, dtype=torch.int64, device=keys.device)
            capacity = -(-length // self.chunk) * self.chunk
            queries, keys, values = (_with_room(t, capacity) for t in (queries, keys, values))
            attended = self._within_chunks(queries, keys, values)[:, :length]
        else:
            # A row stands somewhere in its current chunk: its new tokens go after the cached ones, and the row is
            # laid out from its chunk's start. What lies beyond its last token is never attended to.
            position = state["length"]
            index = _positions(position % self.chunk, length)
            capacity = (-(-(length - 1) // self.chunk) + 1) * self.chunk
            keys = _placed(state["keys"], keys, index, capacity)
            values = _placed(state["values"], values, index, capacity)
            if length == 1:
                attended = _masked_attention(queries, keys, values, index)
            else:
                placed = _placed(torch.zeros_like(state["keys"]), queries, index, capacity)
                attended = self._within_chunks(placed, keys, values).gather(1, _expand(index, queries))
        if not keep_state:
            return attended, {}
        # The chunk of the last token; when that token filled it, later ones find it full and write over it.
        start = (position % self.chunk + length - 1) // self.chunk * self.chunk
        kept = _expand(_positions(start, self.chunk), keys)
        return attended, {
            "keys": keys.gather(1, kept),
            "values": values.gather(1, kept),
            "length": position + length,
        }

    def _within_chunks(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention inside each chunk of [B, n·chunk, h, d]."""
        cut = (t.unflatten(1, (-1, self.chunk)).flatten(0, 1) for t in (queries, keys, values))
        return _causal_attention(*cut).reshape(queries.shape)


class _Steps:
    def __init__(self, block: TransformerBlock, state: LayerState) -> None:
        self._block = block
        self._cache = CacheStepper(state["keys"], state["values"], state["length"], block.chunk)

    def step(self, x: Tensor) -> Tensor:
        return self._block.finish(x, self._cache.attend(self._block.project(x)))

    def state(self) -> LayerState:
        return self._cache.state()

    def join(self, state: LayerState) -> None:
        self._cache.join(state)

    def keep(self, rows: Sequence[int]) -> None:
        self._cache.keep(rows)


def _positions(first: Tensor, length: int) -> Tensor:
    """[B, L]: consecutive positions from each row's first."""
    return first.unsqueeze(1) + torch.arange(length, device=first.device)


def _expand(index: Tensor, like: Tensor) -> Tensor:
    """[B, L] as an index into dimension 1 of [B, S, h, d]."""
    return index[:, :, None, None].expand(-1, -1, *like.shape[2:])


def _placed(cached: Tensor, new: Tensor, index: Tensor, capacity: int) -> Tensor:
    """A cache with room for `capacity` positions and the new rows written at theirs; the given one is untouched."""
    return _with_room(cached.to(new.dtype), capacity).scatter(1, _expand(index, new), new)


def _with_room(x: Tensor, capacity: int) -> Tensor:
    """[B, S, h, d] padded with zeros to `capacity` positions."""
    return F.pad(x, (0, 0, 0, 0, 0, capacity - x.shape[1])) if capacity > x.shape[1] else x


def _causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)


def _masked_attention(queries: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """Each query sees the cache up to its own position."""
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    slots = torch.arange(keys.shape[2], device=keys.device)
    parts = []
    for start in range(0, queries.shape[1], _QUERY_BLOCK):
        block = slice(start, start + _QUERY_BLOCK)
        visible = (slots <= index[:, block, None]).unsqueeze(1)  # [B, 1, L, S]
        query = queries[:, block].transpose(1, 2)
        parts.append(F.scaled_dot_product_attention(query, keys, values, attn_mask=visible).transpose(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
