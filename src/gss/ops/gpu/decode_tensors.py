"""What a step of decoding works on: a model's weights, what changes from step to step, the tiles of the kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""A weight and its bias, or a norm's scale and shift."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one kernel is cut up; sizes are powers of two, and larger than the work is harmless."""

    rows: int
    """Rows of the weight (of the state, in the fold; keys at a time, in attention) a program."""
    depth: int = 64
    """Columns of the weight at a time (modes, in the fold), where a program does not take all at once."""
    warps: int = 4
    """Warps a program."""
    stages: int = 3
    """Loads in flight in the loop over columns."""
    columns: int = 64
    """Most sequences a program, in the kernels for several: 16, 32 or 64."""

    def rows_of(self, width: int) -> int:
        """The rows, fewer where a row is so wide that registers would not hold them."""
        return max(1, min(self.rows, 2**12 * self.warps // triton.next_power_of_2(width)))

    def columns_of(self, batch: int) -> int:
        """The sequences a program, of so many in all."""
        return max(16, min(self.columns, triton.next_power_of_2(batch)))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of every kernel; `for_batch` has the fastest found for the 192M preset on an H200."""

    gate_one: Tile = Tile(rows=8, warps=2)
    context_one: Tile = Tile(rows=16)
    output_one: Tile = Tile(rows=4, depth=4096)
    head_one: Tile = Tile(rows=16)
    gate_many: Tile = Tile(rows=64, depth=128, stages=4)
    context_many: Tile = Tile(rows=64, columns=16)
    output_many: Tile = Tile(rows=64, depth=128, stages=4)
    head_many: Tile = Tile(rows=128, depth=64, stages=4)
    attend: Tile = Tile(rows=64)
    attended_one: Tile = Tile(rows=8, warps=8)
    fold: Tile = Tile(rows=64, depth=16)
    splits: int = 8
    """Parts that a sum over a width is cut into: a batch's output product, the keys that one sequence attends to."""
    channels: int = 32
    """Rows of the state space a program of `earlier_outputs`."""
    fold_precision: str = "bf16x3"
    """Of the fold's products, in Triton's names: tf32x3 has float32's accuracy, nearly; bf16x3 16 bits of it."""
    overlap: bool = True
    """Whether a kernel loads weights before the one before has ended; needs compute capability 9."""
    norm_early: bool = True
    """Whether a batch's norm, which has no weights to load, starts as early."""

    def with_(self, **changes: Any) -> "Tiles":
        """The same with some tiles replaced."""
        return replace(self, **changes)

    def slices(self, width: int) -> tuple[int, int]:
        """How a batch's sum over a width is cut, in whole tiles: columns a slice, and slices, few if it is narrow."""
        return _cut(width, self.splits, self.output_many.depth)

    def attention_slices(self, chunk: int, batch: int) -> tuple[int, int]:
        """How a chunk's keys are cut: keys a slice, and slices; not at all for several sequences."""
        return _cut(chunk, self.splits if batch == 1 else 1, self.attend.rows)

    @staticmethod
    def for_batch(batch: int, capability: tuple[int, int] = (9, 0)) -> "Tiles":
        """The tiles for so many sequences on a device of this compute capability."""
        if batch == 1:
            tiles = Tiles(fold=Tile(rows=16, depth=32, stages=2), fold_precision="tf32x3")
        elif batch <= 16:
            deep = Tile(rows=64, depth=256)
            tiles = Tiles(gate_many=deep, output_many=deep, head_many=deep)
        else:
            tiles = Tiles()
        if capability != (8, 0) and not 9 <= capability[0] < 12:  # under 100 KB of shared memory a program
            names = ("gate_many", "output_many", "head_many", "fold")
            tiles = tiles.with_(**{name: replace(getattr(tiles, name), stages=2) for name in names})
        return tiles.with_(overlap=capability >= (9, 0))


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """A Transformer block: weights in bfloat16, norms and biases in float32."""

    norm: Pair
    query_key_value: Pair  # [3·h·d, E]
    output: Pair  # [E, h·d]
    feedforward_norm: Pair
    inner: Pair  # [F, E]
    outer: Pair  # [E, F]
    heads: int
    chunk: int

    @property
    def width(self) -> int:
        """Of all heads together."""
        return self.output[0].shape[1]

    @property
    def hidden(self) -> int:
        """Of the feed-forward."""
        return self.outer[0].shape[1]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model as the kernels read it: weights in bfloat16, the rest float32; D GSS layers, blocks of W tokens."""

    kinds: tuple[str, ...]  # of all layers in their order: gss or attention
    attention: tuple[AttentionWeights, ...]
    embedding: Tensor  # [V, E], in the model's own precision
    head: Tensor  # [V, E]
    final_norm: Pair  # scale and shift, [E]
    norm: Pair  # [D, E]
    inner_norm: Pair  # [D, H]
    gate_inner: Pair  # [D, F + H, E] and the bias [D, F + H]
    context: Pair  # [D, F, H], [D, F]
    output: Pair  # [D, E, F], [D, E]
    taps: Tensor  # [D, W, H], the skip in tap 0
    into: Tensor  # [D, 2, W + 1, N]: a^(W−j)
    readout: Tensor  # [D, 2, H, N]
    out_of: Tensor  # [D, 2, N, W]: a^(k+1), the imaginary plane negated
    wavenumber: Tensor | None  # [E / 2] float64: turns a token of sinusoidal positions
    activation: str
    centred: bool
    epsilon: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """D, V, E, F, H, N, W."""
        depth, width, gate_width = self.output[0].shape
        return (depth, self.head.shape[0], width, gate_width, *self.readout.shape[2:], self.taps.shape[1])


class Buffers:
    """What changes from step to step, B sequences."""

    def __init__(self, weights: Weights, batch: int, tiles: Tiles) -> None:
        D, V, E, F, H, N, W = weights.sizes
        blocks = weights.attention
        device = weights.head.device

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def most(size: Callable[[AttentionWeights], int]) -> int:
            return max(map(size, blocks), default=0)

        between = torch.float32 if batch == 1 else torch.bfloat16
        head_rows = tiles.head_one.rows_of(E) if batch == 1 else tiles.head_many.rows
        self.batch = batch
        self.tokens, self.position = room(batch, dtype=torch.int64), room(batch, dtype=torch.int64)
        self.read = room(1, dtype=torch.int32)  # the place in the block of the last token
        self.joined = room(batch, dtype=torch.int32)  # where in the block each sequence came
        self.history = room(W, batch, dtype=torch.int64)  # the tokens chosen after each place
        self.x, self.normed = room(batch, E), room(batch, E, dtype=torch.bfloat16)
        self.gate, self.gated = room(batch, F, dtype=between), room(batch, F, dtype=between)
        self.inner, self.base = room(batch, H), room(batch, H)
        summed = (F, *(width for block in blocks for width in (block.width, block.hidden)))
        self.partial = room(max(tiles.slices(size)[1] for size in summed), batch, E)
        self.logits = room(batch, V)
        self.best = room(batch, triton.cdiv(V, head_rows))
        self.best_token = room(*self.best.shape, dtype=torch.int32)
        self.state = room(D, 2, batch, H, N)
        self.inputs, self.echo = room(D, W, batch, H), room(D, W, batch, H)
        self.lengths = room(len(blocks), batch, dtype=torch.int64)  # how many tokens each cache has read
        self.keys, self.values = (
            [room(batch, b.heads, b.chunk, b.width // b.heads, dtype=torch.bfloat16) for b in blocks] for _ in range(2)
        )
        parts = most(lambda block: tiles.attention_slices(block.chunk, batch)[1])
        across, heads = most(lambda block: block.width), most(lambda block: block.heads)
        self.projected = room(batch, 3 * across, dtype=between)
        self.attended = room(parts, batch, across, dtype=between)
        self.peak, self.total = room(parts, batch, heads), room(parts, batch, heads)
        self.hidden = room(batch, most(lambda block: block.hidden), dtype=between)

    def by_row(self) -> tuple[Tensor, ...]:
        """What is of one sequence each from step to step, the sequences first."""
        held = (self.state.movedim(2, 0), self.inputs.movedim(2, 0), self.echo.movedim(2, 0))
        return (self.tokens, self.position, self.joined, self.lengths.T, *held, *self.keys, *self.values)


def _cut(size: int, most: int, tile: int) -> tuple[int, int]:
    """A size in at most so many equal parts of whole tiles: the size of a part, and how many there are."""
    part = triton.cdiv(triton.cdiv(size, most), tile) * tile
    return part, triton.cdiv(size, part)
