"""Attention to a window of earlier tokens, and the two plain Transformers that use it: `slide` and `xl`.

A token never attends to itself, and can attend to nothing at all: the softmax has one more logit, a sink of 0 with a
value of zero. Queries and keys have length 1; the logit is (q·k + b)·|s| with s learned per head and b per head
and bucket of distances (T5's). Keys come in blocks: the tokens of a window look at the window before and their own,
2W keys, so no mask is larger than W × 2W however long the sequence.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gss.config import ModelConfig
from gss.nn.context import across_ranks, by_recent
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.documents import each_document_alone
from gss.nn.state import LayerState, Outputs, SequenceLayer, Slot, state_dtype
from gss.nn.windows import Windows

BUCKETS = 32
MOST_DISTANCE = 128

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of some tokens, [B, tokens, h, d] each."""


def distance_buckets(distance: Tensor) -> Tensor:
    """T5's one-directional buckets of distances ≥ 0: half of them exact, then logarithmic, the last from 128."""
    exact = BUCKETS // 2
    ratio = distance.clamp(min=exact).double() / exact
    logarithmic = exact + (ratio.log() / math.log(MOST_DISTANCE / exact) * (BUCKETS - exact)).long()
    return torch.where(distance < exact, distance, logarithmic.clamp(max=BUCKETS - 1))


def unit(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Vectors [..., h, d] of length 1, or |scale| [h], in float32 or better."""
    directions = F.normalize(x.to(state_dtype(x.dtype)), dim=-1)
    return directions if scale is None else directions * scale.abs().unsqueeze(-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """[B, Q, h, d] over [B, K, h, d]; `bias` [B or 1, h or 1, Q or 1, K] is added to q·k, or is a bool mask."""
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(values.dtype)
    queries, keys, values = (t.to(values.dtype).transpose(1, 2) for t in (queries, keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0).transpose(1, 2)


class WindowAttention(nn.Module):
    """Which earlier tokens a token sees, and with what bias.

    Sliding, a token sees exactly the W tokens before it. With `whole_previous` it sees the whole window before its
    own and the earlier tokens of its own: W to 2W − 1 of them, as with Transformer-XL's cache.
    """

    bucket: Tensor
    unseen: Tensor

    def __init__(self, heads: int, window: int, whole_previous: bool = False) -> None:
        super().__init__()
        self.heads, self.window, self.whole_previous = heads, window, whole_previous
        self.scale = nn.Parameter(torch.ones(heads))  # s
        self.table = nn.Parameter(torch.empty(BUCKETS, heads))  # b
        nn.init.xavier_uniform_(self.table)
        # The distance from query to key, by key slot − query slot + W − 1.
        distance = torch.arange(2 * window - 1, -window, -1)  # [3W − 1]
        unseen = (distance < 1) | (distance > (2 * window if whole_previous else window))
        self.register_buffer("bucket", distance_buckets(distance.clamp(min=0)), persistent=False)
        self.register_buffer("unseen", unseen, persistent=False)

    def bias(self, windows: Windows, slots: int, dtype: torch.dtype | None = None) -> Tensor:
        """The bias of q·k, including the sink: [1, h, slots, W + slots], or [B, h, 1, 2W] for single tokens."""
        # b·|s| for every distance, −∞ where it is not seen: [h, 3W − 1]
        by_distance = (self.table[self.bucket] * self.scale.abs()).T.masked_fill(self.unseen, -torch.inf)
        if windows.single:
            assert windows.offset is not None
            start = self.window - 1 - windows.offset
            column = start.unsqueeze(1) + torch.arange(2 * self.window, device=start.device)
            bias = by_distance[:, column].transpose(0, 1).unsqueeze(2)
        else:
            # Every row is the one above it shifted by one: strided windows over one vector, the last row first.
            diagonals = by_distance[:, self.window - slots : 2 * self.window + slots - 1]
            bias = diagonals.unfold(1, self.window + slots, 1).flip(1).unsqueeze(0)
        return F.pad(bias[..., :-1], (0, 1)).to(dtype)  # no query sees the last slot: it becomes the sink

    def in_window(
        self, queries: Tensor, own: KeysValues, before: KeysValues, bias: Tensor, previous: bool | Tensor
    ) -> Tensor:
        """Queries [B, Q, h, d] of one window over its own tokens and those of the window `before`.

        `previous` [B] says which rows have a window before; a bool if it is the same for all.
        """
        if previous is False:
            keys, values = (_with_sink(tensor) for tensor in own)
            return attend(queries, keys, values, bias[..., self.window :])
        keys, values = (_with_sink(old.to(new.dtype), new) for old, new in zip(before, own, strict=True))
        attended = attend(queries, keys, values, bias)
        if not isinstance(previous, Tensor):
            return attended
        # A mask per row would need a bias per row; a second pass over half of the keys costs less.
        alone = self.in_window(queries, own, before, bias, False)
        return torch.where(previous[:, None, None, None], attended, alone)

    def in_windows(self, queries: Tensor, keys: Tensor, values: Tensor, windows: Windows) -> Tensor:
        """Queries [B, slots, h, d] of all windows at once (or single tokens [B, 1, h, d]) over [B, W + slots, h, d]."""
        first, *rest = windows.parts
        previous = windows.has_previous(first)
        bias = self.bias(windows, first.stop)
        if not rest:
            own = (keys[:, self.window :], values[:, self.window :])
            before = (keys[:, : self.window], values[:, : self.window])
            return self.in_window(queries, own, before, bias, previous)
        missing = (1 + len(rest)) * self.window - windows.slots
        if missing:
            queries, keys, values = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (queries, keys, values))
        queries, keys, values = (t.unflatten(1, (-1, self.window)) for t in (queries, keys, values))
        alone = self.in_window(queries[:, 0], (keys[:, 1], values[:, 1]), (keys[:, 0], values[:, 0]), bias, False)
        begun = 0 if isinstance(previous, Tensor) else 1  # the first window with one before it
        keys, values = (_with_sink(t[:, begun:-1], t[:, begun + 1 :], slots=2).flatten(0, 1) for t in (keys, values))
        attended = attend(queries[:, begun:].flatten(0, 1), keys, values, bias).unflatten(0, (len(queries), -1))
        if isinstance(previous, Tensor):
            alone = torch.where(previous[:, None, None, None], attended[:, 0], alone)
        return torch.cat([alone, attended[:, 1 - begun :].flatten(1, 2)], dim=1)[:, : windows.slots]

    def keys_seen(self, length: int) -> float:
        """Keys that a token of a sequence sees, on average."""
        if self.whole_previous:
            full, left = divmod(length, self.window)
            own = full * self.window * (self.window - 1) / 2 + left * (left - 1) / 2
        else:
            early = min(length, self.window)
            own = early * (early - 1) / 2
        return (own + max(0, length - self.window) * self.window) / length


def _with_sink(*runs: Tensor, slots: int = 1) -> Tensor:
    """Concatenate keys or values along the dimension `slots`, with zeros in the last slot, which no query sees."""
    *before, last = runs
    kept = last.shape[slots] - 1
    sink = torch.zeros_like(last.narrow(slots, kept, 1))
    return torch.cat([*before, last.narrow(slots, 0, kept), sink], dim=slots)


class WindowBlock(nn.Module):
    """A Transformer block of this family: x + dense(attention(norm(x))), then a feed-forward.

    With `reads_state` it also attends to a recurrent state, with separate queries; both results are concatenated before
    the dense layer.
    """

    def __init__(self, config: ModelConfig, *, whole_previous: bool = False, reads_state: bool = False) -> None:
        super().__init__()
        self.heads = config.attention.heads
        self.head_width = config.attention.head_width or config.width // self.heads
        inner = self.heads * self.head_width
        self.norm = norm(config.width, config)
        self.dropout = nn.Dropout(config.dropout)
        self.projection = dense(config.width, inner, config, blocks=4 if reads_state else 3)  # Q, K, V (, Q2)
        self.attention = WindowAttention(self.heads, config.attention.window, whole_previous)
        self.state_scale = nn.Parameter(torch.ones(self.heads)) if reads_state else None
        self.output = dense(inner * (2 if reads_state else 1), config.width, config, last=True)
        self.feedforward = FeedForward(config)

    def project(self, x: Tensor) -> Tensor:
        """x [B, L, E] → queries, keys, values and, with `reads_state`, queries of the state: [B, L, 3 or 4, h, d]."""
        return self.projection(self.dropout(self.norm(x))).unflatten(-1, (-1, self.heads, self.head_width))

    def scaled(self, projected: Tensor) -> list[Tensor]:
        """The results of `project` one by one, [B, L, h, d] each, with queries scaled and keys of length 1."""
        queries, keys, values, *second = projected.unbind(2)
        queries, keys = unit(queries, self.attention.scale).to(values.dtype), unit(keys).to(values.dtype)
        return [queries, keys, values, *(unit(query, self.state_scale) for query in second)]

    def forward(
        self,
        x: Tensor,
        memory: KeysValues,
        bias: Tensor,
        before: KeysValues,
        previous: bool | Tensor,
        kept: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, KeysValues]:
        """The outputs of one window's tokens, which also attend to `memory`; and the window's keys and values.

        `before` and `previous` are as in `in_window`, `kept` as `Windows.kept` gives it.
        """
        queries, keys, values, state_queries = self.scaled(self.project(x))
        if kept is not None:
            fresh, old_keys, old_values = kept
            keys = torch.where(fresh, keys, old_keys.to(keys))
            values = torch.where(fresh, values, old_values.to(values))
        attended = self.attention.in_window(queries, (keys, values), before, bias, previous)
        return self.finish(x, attended, attend(state_queries, *memory)), (keys, values)

    def finish(self, x: Tensor, *attended: Tensor) -> Tensor:
        """The block's output from its input and the attention outputs, [B, L, h, d] each."""
        return self.feedforward(x + self.output(torch.cat([part.flatten(2) for part in attended], dim=-1)))

    def cache_slot(self) -> Slot:
        """The slot of the keys, or the values, of two windows."""
        return Slot((2 * self.attention.window, self.heads, self.head_width))


class SlideLayer(SequenceLayer):
    """One block on windows, all of them at once. The window slides: a token sees exactly the W tokens before it."""

    whole_previous = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.block = WindowBlock(config, whole_previous=self.whole_previous)
        self.reach = 2 * config.attention.window

    def state_slots(self) -> dict[str, Slot]:
        cache = self.block.cache_slot()
        return {"keys": cache, "values": cache, "length": Slot((), integer=True)}

    def mixing_flops(self, length: int) -> float:
        return 4 * self.block.heads * self.block.head_width * self.block.attention.keys_seen(length)

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        attended, after = self._attend(self.block.project(x), state, keep_state)
        return self.block.finish(x, attended), after

    @across_ranks(by_recent)
    @each_document_alone
    def _attend(self, projected: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        """The attention output [B, L, h, d] from the block's projections, and the state after them."""
        queries, keys, values = self.block.scaled(projected)
        cached: dict[str, Tensor | None] = {**state} if state else dict.fromkeys(self.state_slots())
        windows = Windows(self.block.attention.window, queries.shape[1], cached["length"])
        keys, values = windows.join(cached["keys"], keys), windows.join(cached["values"], values)
        attended = windows.collect(self.block.attention.in_windows(windows.spread(queries), keys, values, windows))
        if not keep_state:
            return attended, {}
        precise = state_dtype(self.block.attention.scale.dtype)
        return attended, {
            "keys": windows.remaining(keys[:, windows.done :]).to(precise),
            "values": windows.remaining(values[:, windows.done :]).to(precise),
            "length": windows.read(queries),
        }


class XLLayer(SlideLayer):
    """Transformer-XL's cache: a token sees all of the window before its own, and its own window up to itself.

    Windows are counted from the start of the sequence. Trained in lanes with rows of one window, this is Transformer-XL
    as published, in which gradients stop at the cache; in longer rows they flow from window to window.
    """

    whole_previous = True
