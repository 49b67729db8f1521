"""A step of a GSS model as a list of kernel launches: what `gss.graph_decode` captures in a CUDA graph.

Here are the tensors that the kernels work on, the tiles that they are cut into and the launches in their order;
the kernels are in `decode` (one sequence), `decode_batch` (several) and `decode_fold` (the end of a block), and the
hybrid's Transformer blocks in `decode_attention`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from gss.ops.gpu import decode, decode_batch, decode_fold
from gss.ops.gpu.decode_attention import AttentionWeights, Cache, read_token


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one kernel is cut up; sizes are powers of two, and larger than the work is harmless."""

    rows: int
    """Rows of the weight (of the state, in the fold) a program."""
    depth: int = 64
    """Columns of the weight at a time (modes, in the fold), where a program does not take all at once."""
    warps: int = 4
    """Warps a program."""
    stages: int = 3
    """Loads in flight in the loop over columns."""
    columns: int = 64
    """Most sequences a program, in the kernels for several: 16, 32 or 64."""


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
    fold: Tile = Tile(rows=64, depth=16)
    splits: int = 8
    """Parts of the gate's width that a batch's output product is cut into."""
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
class Weights:
    """A model as the kernels read it: weights in bfloat16, the rest float32; D GSS layers, blocks of W tokens."""

    kinds: tuple[str, ...]  # of all layers in their order: gss or attention
    attention: tuple[AttentionWeights, ...]
    embedding: Tensor  # [V, E], in the model's own precision
    head: Tensor  # [V, E]
    final_norm: tuple[Tensor, Tensor]  # scale and shift, [E]
    norm: tuple[Tensor, Tensor]  # [D, E]
    inner_norm: tuple[Tensor, Tensor]  # [D, H]
    gate_inner: tuple[Tensor, Tensor]  # [D, F + H, E] and the bias [D, F + H]
    context: tuple[Tensor, Tensor]  # [D, F, H], [D, F]
    output: tuple[Tensor, Tensor]  # [D, E, F], [D, E]
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
        device = weights.head.device

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        between = torch.float32 if batch == 1 else torch.bfloat16
        head_rows = _rows(tiles.head_one, E) if batch == 1 else tiles.head_many.rows
        self.batch = batch
        self.tokens, self.position = room(batch, dtype=torch.int64), room(batch, dtype=torch.int64)
        self.read = room(1, dtype=torch.int32)  # the place in the block of the last token
        self.joined = room(batch, dtype=torch.int32)  # where in the block each sequence came
        self.history = room(W, batch, dtype=torch.int64)  # the tokens chosen after each place
        self.x, self.normed = room(batch, E), room(batch, E, dtype=torch.bfloat16)
        self.gate, self.gated = room(batch, F, dtype=between), room(batch, F, dtype=between)
        self.inner, self.base = room(batch, H), room(batch, H)
        self.partial = room(_slices(F, tiles)[1], batch, E)
        self.logits = room(batch, V)
        self.best = room(batch, triton.cdiv(V, head_rows))
        self.best_token = room(*self.best.shape, dtype=torch.int32)
        self.state = room(D, 2, batch, H, N)
        self.inputs, self.echo = room(D, W, batch, H), room(D, W, batch, H)
        self.caches = [Cache(block, batch) for block in weights.attention]

    def by_row(self) -> tuple[Tensor, ...]:
        """What is of one sequence each from step to step, the sequences first."""
        held = (self.state.movedim(2, 0), self.inputs.movedim(2, 0), self.echo.movedim(2, 0))
        cached = (tensor for cache in self.caches for tensor in cache.by_row())
        return (self.tokens, self.position, self.joined, *held, *cached)


def launch_step(weights: Weights, buffers: Buffers, tiles: Tiles) -> None:
    """Read `buffers.tokens`; leave logits, the likeliest next tokens in their place, and everything moved on by one."""
    _, V, E, _, _, _, W = weights.sizes
    batch = buffers.batch
    decode.embed_rows[(batch,)](
        buffers.tokens, buffers.position, buffers.read, weights.embedding,
        buffers.position if weights.wavenumber is None else weights.wavenumber, buffers.x,
        V, E, W, SINUSOIDS=weights.wavenumber is not None, E_PAD=_pad(E), **_launch(tiles),
    )  # fmt: skip
    launch_layers(weights, buffers, tiles)
    decode.choose_next[(batch,)](
        buffers.best, buffers.best_token, buffers.tokens, buffers.history, buffers.read, buffers.best.shape[1],
        TILES_PAD=_pad(buffers.best.shape[1]), **_launch(tiles),
    )  # fmt: skip


def launch_layers(weights: Weights, buffers: Buffers, tiles: Tiles) -> None:
    """Every layer, then the norm and the head."""
    layer, blocks = 0, iter(zip(weights.attention, buffers.caches, strict=True))
    pending = False  # for several sequences, whether the last GSS layer's sums are still to be added to the stream
    for kind in weights.kinds:
        if kind == "attention":
            if pending:
                buffers.x += buffers.partial.sum(0) + weights.output[1][layer - 1]
                pending = False
            read_token(*next(blocks), buffers.x)
        elif buffers.batch == 1:
            one_layer(weights, buffers, tiles, layer)
            layer += 1
        else:
            many_layer(weights, buffers, tiles, layer, pending)
            layer, pending = layer + 1, True
    head_one(weights, buffers, tiles) if buffers.batch == 1 else head_many(weights, buffers, tiles, pending)


def one_layer(weights: Weights, buffers: Buffers, tiles: Tiles, layer: int, only: str = "") -> None:
    """The kernels of a layer for one sequence (`only` one of them, to time it)."""
    _, _, E, F, H, _, W = weights.sizes
    if only in ("", "gate"):
        tile = tiles.gate_one
        rows = _rows(tile, E)
        grid = triton.cdiv(F + H, rows) + triton.cdiv(H, tiles.channels)
        decode.gate_inner_one[(grid,)](
            buffers.x, *_of(weights.norm, layer), *_of(weights.gate_inner, layer), buffers.gate, buffers.inner,
            buffers.inputs[layer], weights.taps[layer], buffers.echo[layer], buffers.base, buffers.read,
            weights.epsilon, E, F, H, weights.centred, weights.activation,
            E_PAD=_pad(E), W_PAD=_pad(W), ROWS=rows, CHANNELS=tiles.channels, **_launch(tiles, tile),
        )  # fmt: skip
    if only in ("", "context"):
        tile = tiles.context_one
        rows = _rows(tile, H)
        decode.context_one[(triton.cdiv(F, rows),)](
            buffers.inner, *_of(weights.inner_norm, layer), buffers.base, weights.taps[layer], buffers.inputs[layer],
            buffers.read, *_of(weights.context, layer), buffers.gate, buffers.gated, weights.epsilon,
            F, H, weights.centred, H_PAD=_pad(H), ROWS=rows, **_launch(tiles, tile),
        )  # fmt: skip
    if only in ("", "output"):
        tile = tiles.output_one
        decode.output_one[(triton.cdiv(E, tile.rows),)](
            buffers.gated, *_of(weights.output, layer), buffers.x,
            E, F, ROWS=tile.rows, COLUMNS=min(tile.depth, _pad(F)), **_launch(tiles, tile),
        )  # fmt: skip


def head_one(weights: Weights, buffers: Buffers, tiles: Tiles) -> None:
    """Norm and head for one sequence."""
    _, V, E, *_ = weights.sizes
    rows = _rows(tiles.head_one, E)
    decode.head_one[(triton.cdiv(V, rows),)](
        buffers.x, *weights.final_norm, weights.head, buffers.logits, buffers.best, buffers.best_token,
        weights.epsilon, E**-0.5, V, E, weights.centred, E_PAD=_pad(E), ROWS=rows, **_launch(tiles, tiles.head_one),
    )  # fmt: skip


def _slices(width: int, tiles: Tiles) -> tuple[int, int]:
    """How the sum over a gate's width is cut, in whole tiles: columns a slice, and slices, few where it is narrow."""
    depth = tiles.output_many.depth
    part = triton.cdiv(triton.cdiv(width, tiles.splits), depth) * depth
    return part, triton.cdiv(width, part)


def many_layer(
    weights: Weights, buffers: Buffers, tiles: Tiles, layer: int, pending: bool = True, only: str = ""
) -> None:
    """The kernels of a layer for several sequences (`only` one of them, to time it).

    `pending`: the layer before has left its sums to be added to the stream, as this one will.
    """
    _, _, E, F, H, _, _ = weights.sizes
    batch = buffers.batch
    if only in ("", "norm"):
        _add_and_norm(weights, buffers, tiles, _of(weights.norm, layer), layer, 1.0, pending)
    if only in ("", "gate"):
        tile = tiles.gate_many
        columns = _columns(tile, batch)
        decode_batch.gate_inner_many[(triton.cdiv(F + H, tile.rows), triton.cdiv(batch, columns))](
            buffers.normed, *_of(weights.gate_inner, layer), buffers.gate, buffers.inner,
            batch, E, F, H, weights.activation, ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth,
            **_launch(tiles, tile),
        )  # fmt: skip
    if only in ("", "context"):
        tile = tiles.context_many
        across = max(16, min(_columns(tile, batch), 2**14 // _pad(H)))
        rows = max(16, min(tile.rows, 2**15 // _pad(H)))
        decode_batch.context_many[(triton.cdiv(F, rows), triton.cdiv(batch, across))](
            buffers.inner, *_of(weights.inner_norm, layer), buffers.base, weights.taps[layer], buffers.inputs[layer],
            buffers.read, *_of(weights.context, layer), buffers.gate, buffers.gated, weights.epsilon,
            batch, F, H, weights.centred, H_PAD=_depth(H), ROWS=rows, COLUMNS=across, **_launch(tiles, tile),
        )  # fmt: skip
    if only in ("", "output"):
        tile = tiles.output_many
        columns = _columns(tile, batch)
        part, slices = _slices(F, tiles)
        decode_batch.output_many[(triton.cdiv(E, tile.rows), slices, triton.cdiv(batch, columns))](
            buffers.gated, weights.output[0][layer], buffers.partial,
            batch, E, F, SLICE=part, ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, **_launch(tiles, tile),
        )  # fmt: skip


def head_many(weights: Weights, buffers: Buffers, tiles: Tiles, pending: bool = True) -> None:
    """Norm and head for several sequences."""
    D, V, E, *_ = weights.sizes
    tile = tiles.head_many
    columns = _columns(tile, buffers.batch)
    _add_and_norm(weights, buffers, tiles, weights.final_norm, D, E**-0.5, pending)
    decode_batch.head_many[(triton.cdiv(V, tile.rows), triton.cdiv(buffers.batch, columns))](
        buffers.normed, weights.head, buffers.logits, buffers.best, buffers.best_token,
        buffers.batch, V, E, ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, **_launch(tiles, tile),
    )  # fmt: skip


def _add_and_norm(
    weights: Weights,
    buffers: Buffers,
    tiles: Tiles,
    norm: tuple[Tensor, Tensor],
    layer: int,
    factor: float,
    pending: bool,
) -> None:
    """Finish the layer before, if there is one to finish, and norm for the next."""
    D, _, E, F, H, _, W = weights.sizes
    here = min(layer, D - 1)
    grid = buffers.batch + (triton.cdiv(buffers.batch * H, tiles.channels) if layer < D else 0)
    decode_batch.add_and_norm[(grid,)](
        buffers.x, buffers.partial, weights.output[1][max(layer - 1, 0)], *norm, buffers.normed,
        buffers.inputs[here], weights.taps[here], buffers.echo[here], buffers.base, buffers.read,
        weights.epsilon, factor, buffers.batch, E, H, weights.centred, SPLITS=_slices(F, tiles)[1] if pending else 0,
        E_PAD=_pad(E), W_PAD=_pad(W), CHANNELS=tiles.channels, **_launch(tiles, early=tiles.norm_early),
    )  # fmt: skip


def launch_fold(weights: Weights, buffers: Buffers, tiles: Tiles, late: bool = False) -> None:
    """Fold a full block of inputs into the states and compute what they give the next block.

    `late`: some sequences joined within the block, as `buffers.joined` says.
    """
    D, _, _, _, H, N, W = weights.sizes
    rows, tile = buffers.batch * H, tiles.fold
    precision = "ieee" if triton.knobs.runtime.interpret else tiles.fold_precision  # the interpreter knows no bf16x3
    decode_fold.fold_block[(triton.cdiv(rows, tile.rows), D)](
        buffers.state, buffers.inputs, buffers.joined, weights.into, weights.readout, weights.out_of, buffers.echo,
        rows, H, N, W, late, W_PAD=_depth(W), ROWS=tile.rows, MODES=tile.depth, PRECISION=precision,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _of(pair: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    return pair[0][layer], pair[1][layer]


def _pad(size: int) -> int:
    return triton.next_power_of_2(size)


def _depth(size: int) -> int:
    """Padded for a matrix product over it, which has at least 16 terms."""
    return max(16, _pad(size))


def _rows(tile: Tile, width: int) -> int:
    """The tile's rows, fewer where a row is so wide that registers would not hold them."""
    return max(1, min(tile.rows, 2**12 * tile.warps // _pad(width)))


def _columns(tile: Tile, batch: int) -> int:
    return max(16, min(tile.columns, _pad(batch)))


def _launch(tiles: Tiles, tile: Tile | None = None, early: bool = True) -> dict[str, Any]:
    options: dict[str, Any] = {"OVERLAP": tiles.overlap, "num_warps": tile.warps if tile else 4}
    if tile:
        options["num_stages"] = tile.stages
    return options | ({"launch_pdl": True} if tiles.overlap and early else {})
