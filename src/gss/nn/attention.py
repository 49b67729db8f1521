"""The Transformer block: causal attention over everything, over a sliding window, or on independent chunks.

The state is the keys and values that later tokens can still see (all of them, the last W or the current chunk's) and
how many tokens each row has read; rows may be at different positions, so every index below is a row's own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gss.config import ModelConfig
from gss.nn.attention_plan import AttentionPlan
from gss.nn.context import across_ranks, by_recent
from gss.nn.decoding import Block, DecodePlan, GPUPlan
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.documents import each_document_alone
from gss.nn.state import LayerState, Outputs, SequenceLayer, Slot
from gss.nn.windows import expand_index, sized
from gss.ops import fast
from gss.ops.norm import normalize
from gss.ops.positions import rotated

Attended = tuple[Tensor, Tensor, Tensor]
"""Attention outputs, and the keys and values of past and new tokens, as far as later ones may need them."""
# Queries that attend to a cache at a time, which bounds the size of the mask.
_QUERY_BLOCK = 1024


class TransformerBlock(SequenceLayer):
    """x + attention(norm x), then a feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention = config.attention
        self.heads = attention.heads
        self.head_width = attention.head_width or config.width // attention.heads
        self.chunk, self.sliding = attention.chunk, attention.sliding
        self.rotary_base = attention.rotary_base if config.positions == "rotary" else None
        self.norm = norm(config.width, config)
        self.query_key_value = dense(config.width, self.heads * self.head_width, config, blocks=3)
        self.query_norm = norm(self.head_width, config) if attention.qk_norm else None
        self.key_norm = norm(self.head_width, config) if attention.qk_norm else None
        self.output = dense(self.heads * self.head_width, config.width, config, last=True)
        self.dropout = nn.Dropout(config.dropout)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        attended, after = self.attend(self.project(x), state, keep_state)
        return self.finish(x, attended), after

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values: [B, L, 3, h, d]."""
        projected = self.query_key_value(normalize(self.norm, x)).unflatten(-1, (3, self.heads, self.head_width))
        if self.query_norm is None or self.key_norm is None:
            return projected
        queries, keys, values = projected.unbind(2)
        return torch.stack([self.query_norm(queries).to(values), self.key_norm(keys).to(values), values], dim=2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block's output from its input and what each token attends to, [B, L, h, d]."""
        return self.feedforward(x + self.dropout(self.output(attended.flatten(2))))

    def positioned(self, projected: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, L, h, d] from `project`'s, the first two turned by their positions in a model
        with rotary ones; `position` [B] is the first token's (None: 0).
        """
        queries, keys, values = projected.unbind(2)
        if self.rotary_base is not None:
            queries, keys = rotated(projected[:, :, :2], position, self.rotary_base).unbind(2)
        return queries, keys, values

    @property
    def reach(self) -> int | None:
        """Tokens that are kept for later ones; None: all."""
        return self.chunk or self.sliding

    @across_ranks(by_recent)
    @each_document_alone
    def attend(self, projected: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        """What each token attends to, [B, L, h, d], from `project`'s [B, L, 3, h, d]; and the state after them."""
        batch, length = projected.shape[:2]
        queries, keys, values = self.positioned(projected, state["length"] if state else None)
        over = self._over_chunks if self.chunk else self._over_window if self.sliding else self._over_everything
        attended, keys, values = over(queries, keys, values, state)
        if not keep_state:
            return attended, {}
        position = keys.new_zeros(batch, dtype=torch.int64) if state is None else state["length"]
        if self.chunk:
            # The chunk of the last token; when that token filled it, later ones find it full and write over it.
            start = (position % self.chunk + length - 1) // self.chunk * self.chunk
            kept = expand_index(_positions(start, self.chunk), keys)
            keys, values = keys.gather(1, kept), values.gather(1, kept)
        # Copies, which do not keep the queries and the tokens that have left the window alive.
        own = torch.clone if self.sliding else Tensor.contiguous
        return attended, {"keys": own(keys), "values": own(values), "length": position + length}

    def state_slots(self) -> dict[str, Slot]:
        cache = Slot((self.reach, self.heads, self.head_width))
        return {"keys": cache, "values": cache, "length": Slot((), integer=True)}

    def mixing_flops(self, length: int) -> float:
        most = min(self.reach or length, length)
        keys = (most + 1) / 2  # that a token sees, on average
        if self.sliding:
            keys += (most - keys) * (length - most) / length  # later tokens see the whole window
        return 4 * self.heads * self.head_width * keys

    def decode_plan(self, state: LayerState, block: Block) -> DecodePlan | None:
        from gss.nn.cpu_plans import CompiledAttentionPlan

        return (CompiledAttentionPlan if CompiledAttentionPlan.fits(self) else AttentionPlan)(self, state)

    def gpu_plan(self, block: int) -> GPUPlan | None:
        from gss.nn.gpu_plans import TransformerPlan

        return TransformerPlan(self) if TransformerPlan.fits(self) else None

    def _over_everything(self, queries: Tensor, keys: Tensor, values: Tensor, state: LayerState | None) -> Attended:
        if state is None:
            return _causal_attention(queries, keys, values), keys, values
        index = _positions(state["length"], keys.shape[1])
        keys, values = _placed(state, keys, values, index, state["keys"].shape[1] + keys.shape[1])
        return _masked_attention(queries, keys, values, index), keys, values

    def _over_chunks(self, queries: Tensor, keys: Tensor, values: Tensor, state: LayerState | None) -> Attended:
        assert self.chunk is not None
        length = keys.shape[1]
        if state is None:
            capacity = -(-length // self.chunk) * self.chunk
            if length < self.chunk:  # a short prompt pays for its own tokens only
                attended = _causal_attention(queries, keys, values)
                return attended, sized(keys, capacity), sized(values, capacity)
            queries, keys, values = (sized(t, capacity) for t in (queries, keys, values))
            cut = (t.unflatten(1, (-1, self.chunk)).flatten(0, 1) for t in (queries, keys, values))
            return _causal_attention(*cut).reshape(queries.shape)[:, :length], keys, values
        # A row may be anywhere in its current chunk: its new tokens go after the cached ones, and slots are counted
        # from the start of the chunk. Slots after the last token are never attended to.
        index = _positions(state["length"] % self.chunk, length)
        capacity = (-(-(length - 1) // self.chunk) + 1) * self.chunk
        keys, values = _placed(state, keys, values, index, capacity)
        if length == 1:
            return _masked_attention(queries, keys, values, index), keys, values
        at = expand_index(index, queries)
        placed = torch.zeros_like(keys).scatter(1, at, queries)
        cut = (t.unflatten(1, (-1, self.chunk)).flatten(0, 1) for t in (placed, keys, values))
        attended = _causal_attention(*cut).reshape(placed.shape).gather(1, at)
        return attended, keys, values

    def _over_window(self, queries: Tensor, keys: Tensor, values: Tensor, state: LayerState | None) -> Attended:
        """A token sees itself and the W − 1 before it. The cache holds the last W of each row, the newest last."""
        assert self.sliding is not None
        window, length = self.sliding, keys.shape[1]
        nothing = keys.new_zeros(len(keys), window, *keys.shape[2:])
        old_keys, old_values = (state["keys"], state["values"]) if state else (nothing, nothing)
        keys, values = torch.cat([old_keys.to(keys), keys], dim=1), torch.cat([old_values.to(values), values], dim=1)
        kept = keys[:, length:], values[:, length:]
        if length > 1 and _flash_can(queries, keys, values) and _has_whole_windows(state, window, length):
            empty = 0 if state else window  # slots before the first token of a sequence
            return _flash_window(queries, keys[:, empty:], values[:, empty:], window), *kept
        first = min(window, length)
        if state is None:
            seen = slice(window, window + first)
            parts = [_causal_attention(queries[:, :first], keys[:, seen], values[:, seen])]
        else:
            token = torch.arange(first, device=keys.device)
            oldest = torch.maximum(token + 1, (window - state["length"]).unsqueeze(1))
            newest = (token + window).expand_as(oldest)
            seen = slice(0, window + first)
            parts = [_masked_attention(queries[:, :first], keys[:, seen], values[:, seen], newest, oldest)]
        if length > window:  # in blocks of W, each over itself and the previous one
            parts.append(_banded_attention(queries[:, window:], keys[:, window:], values[:, window:], window))
        return torch.cat(parts, dim=1), *kept


def _positions(first: Tensor, length: int) -> Tensor:
    """[B, L]: consecutive positions from each row's first."""
    return first.unsqueeze(1) + torch.arange(length, device=first.device)


def _placed(state: LayerState, keys: Tensor, values: Tensor, index: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """A state's keys and values in `capacity` slots, with the new ones written at `index`."""
    old_keys, old_values = (sized(state[name].to(keys.dtype), capacity) for name in ("keys", "values"))
    at = expand_index(index, keys)
    return old_keys.scatter(1, at, keys), old_values.scatter(1, at, values)


def _causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)


def _masked_attention(
    queries: Tensor, keys: Tensor, values: Tensor, newest: Tensor, oldest: Tensor | None = None
) -> Tensor:
    """Each query sees the slots of the cache from its `oldest` (None: the first) to its `newest`, [B, L]."""
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    slots = torch.arange(keys.shape[2], device=keys.device)
    parts = []
    for start in range(0, queries.shape[1], _QUERY_BLOCK):
        block = slice(start, start + _QUERY_BLOCK)
        visible = slots <= newest[:, block, None]  # [B, L, S]
        if oldest is not None:
            visible &= slots >= oldest[:, block, None]
        query = queries[:, block].transpose(1, 2)
        mask = visible.unsqueeze(1)
        parts.append(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _has_whole_windows(state: LayerState | None, window: int, length: int) -> bool:
    """Whether the cache is full or, without a cache, the piece is longer than a window; this waits for the device."""
    if state is None:
        return length > window
    return not torch.compiler.is_compiling() and bool((state["length"] >= window).all())


def _flash_can(*tensors: Tensor) -> bool:
    return all(fast.usable(t.device) and t.dtype in (torch.bfloat16, torch.float16) for t in tensors)


def _flash_window(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """`_banded_attention` without masks, by the flash kernel, whose windows `scaled_dot_product_attention` lacks."""
    sizes = queries.shape[1], keys.shape[1]
    return torch.ops.aten._flash_attention_forward(
        queries, keys, values, None, None, *sizes, 0.0, True, False, window_size_left=window - 1, window_size_right=0
    )[0]


def _banded_attention(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Queries [B, R, h, d] over keys [B, W + R, h, d], the last R of which are their own: each sees W, itself last.

    In blocks of W queries over 2W keys, so that no mask is larger than W × 2W.
    """
    batch, rest = queries.shape[:2]
    missing = -rest % window
    queries, keys, values = (sized(t, t.shape[1] + missing).unflatten(1, (-1, window)) for t in (queries, keys, values))
    keys, values = (torch.cat([t[:, :-1], t[:, 1:]], dim=2).flatten(0, 1).transpose(1, 2) for t in (keys, values))
    token, slot = torch.arange(window, device=keys.device), torch.arange(2 * window, device=keys.device)
    visible = (slot > token.unsqueeze(1)) & (slot <= token.unsqueeze(1) + window)
    query = queries.flatten(0, 1).transpose(1, 2)
    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible).transpose(1, 2)
    return attended.unflatten(0, (batch, -1)).flatten(1, 2)[:, :rest]
