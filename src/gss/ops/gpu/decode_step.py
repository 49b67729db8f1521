"""A step of a GSS model, pure or hybrid, as a list of kernel launches, for `gss.graph_decode` to capture as a graph.

The kernels are in `decode` (one sequence), `decode_batch` (several), `decode_attention` (the hybrid's, both) and
`decode_fold` (the end of a block); what they work on is in `decode_tensors`.
"""

import itertools
from typing import Any

import triton
from torch import Tensor

from gss.ops.gpu import decode, decode_attention, decode_batch, decode_fold
from gss.ops.gpu.decode_tensors import AttentionWeights, Buffers, Pair, Tile, Tiles, Weights

Pending = tuple[Tensor, int]
"""A product's bias and the number of its partial sums, all still to be added to the stream of several sequences."""


def launch_step(weights: Weights, buffers: Buffers, tiles: Tiles) -> None:
    """Read `buffers.tokens`; leave logits, the likeliest next tokens in their place, and everything moved on by one."""
    _, V, E, _, _, _, W = weights.sizes
    batch = buffers.batch
    decode.embed_rows[(batch,)](
        buffers.tokens, buffers.position, buffers.lengths, buffers.read, weights.embedding,
        buffers.position if weights.wavenumber is None else weights.wavenumber, buffers.x, V, E, W,
        BLOCKS=len(weights.attention), SINUSOIDS=weights.wavenumber is not None, E_PAD=_pad(E), **_launch(tiles),
    )  # fmt: skip
    launch_layers(weights, buffers, tiles)
    decode.choose_next[(batch,)](
        buffers.best, buffers.best_token, buffers.tokens, buffers.history, buffers.read, buffers.best.shape[1],
        TILES_PAD=_pad(buffers.best.shape[1]), **_launch(tiles),
    )  # fmt: skip


def launch_layers(weights: Weights, buffers: Buffers, tiles: Tiles) -> None:
    """Every layer, then the norm and the head."""
    layers, blocks = itertools.count(), itertools.count()
    if buffers.batch == 1:
        for kind in weights.kinds:
            if kind == "attention":
                one_attention(weights, buffers, tiles, next(blocks))
            else:
                one_layer(weights, buffers, tiles, next(layers))
        head_one(weights, buffers, tiles)
        return
    pending = None
    for kind in weights.kinds:
        if kind == "attention":
            pending = many_attention(weights, buffers, tiles, next(blocks), pending)
        else:
            pending = many_layer(weights, buffers, tiles, next(layers), pending)
    head_many(weights, buffers, tiles, pending)


def one_layer(weights: Weights, buffers: Buffers, tiles: Tiles, layer: int, only: str = "") -> None:
    """The kernels of a GSS layer for one sequence (`only` one of them, to time it)."""
    _, _, E, F, H, _, W = weights.sizes
    if only in ("", "gate"):
        tile = tiles.gate_one
        rows = tile.rows_of(E)
        grid = triton.cdiv(F + H, rows) + triton.cdiv(H, tiles.channels)
        decode.gate_inner_one[(grid,)](
            buffers.x, *_of(weights.norm, layer), *_of(weights.gate_inner, layer), buffers.gate, buffers.inner,
            buffers.inputs[layer], weights.taps[layer], buffers.echo[layer], buffers.base, buffers.read,
            weights.epsilon, E, F, H, weights.centred, weights.activation,
            E_PAD=_pad(E), W_PAD=_pad(W), ROWS=rows, CHANNELS=tiles.channels, **_launch(tiles, tile),
        )  # fmt: skip
    if only in ("", "context"):
        tile = tiles.context_one
        rows = tile.rows_of(H)
        decode.context_one[(triton.cdiv(F, rows),)](
            buffers.inner, *_of(weights.inner_norm, layer), buffers.base, weights.taps[layer], buffers.inputs[layer],
            buffers.read, *_of(weights.context, layer), buffers.gate, buffers.gated, weights.epsilon,
            F, H, weights.centred, H_PAD=_pad(H), ROWS=rows, **_launch(tiles, tile),
        )  # fmt: skip
    if only in ("", "output"):
        _add_product_one(buffers, tiles, buffers.gated, _of(weights.output, layer))


def one_attention(weights: Weights, buffers: Buffers, tiles: Tiles, index: int) -> None:
    """The kernels of a Transformer block for one sequence."""
    block = weights.attention[index]
    E, tile = weights.sizes[2], tiles.attended_one
    _product_one(weights, buffers, tiles, block.norm, block.query_key_value, buffers.projected, "none")
    _attend(block, buffers, tiles, index)
    slices = tiles.attention_slices(block.chunk, 1)[1]
    rows = tile.rows_of(block.width)
    decode_attention.attended_output_one[(triton.cdiv(E, rows),)](
        buffers.attended, buffers.peak, buffers.total, *block.output, buffers.x,
        E, block.heads, block.width // block.heads, slices,
        COLUMNS=_pad(block.width), SLICES_PAD=_pad(slices), ROWS=rows, **_launch(tiles, tile),
    )  # fmt: skip
    _product_one(weights, buffers, tiles, block.feedforward_norm, block.inner, buffers.hidden, weights.activation)
    _add_product_one(buffers, tiles, buffers.hidden, block.outer)


def head_one(weights: Weights, buffers: Buffers, tiles: Tiles) -> None:
    """Norm and head for one sequence."""
    _, V, E, *_ = weights.sizes
    rows = tiles.head_one.rows_of(E)
    decode.head_one[(triton.cdiv(V, rows),)](
        buffers.x, *weights.final_norm, weights.head, buffers.logits, buffers.best, buffers.best_token,
        weights.epsilon, E**-0.5, V, E, weights.centred, E_PAD=_pad(E), ROWS=rows, **_launch(tiles, tiles.head_one),
    )  # fmt: skip


def _product_one(
    weights: Weights, buffers: Buffers, tiles: Tiles, norm: Pair, dense: Pair, out: Tensor, activation: str
) -> None:
    """A product of the stream, normed."""
    tile, (F, E) = tiles.gate_one, dense[0].shape
    rows = tile.rows_of(E)
    decode.product_one[(triton.cdiv(F, rows),)](
        buffers.x, *norm, *dense, out, weights.epsilon, E, F, weights.centred, activation,
        E_PAD=_pad(E), ROWS=rows, **_launch(tiles, tile),
    )  # fmt: skip


def _add_product_one(buffers: Buffers, tiles: Tiles, given: Tensor, dense: Pair) -> None:
    """A product that is added to the stream."""
    tile, (E, F) = tiles.output_one, dense[0].shape
    decode.output_one[(triton.cdiv(E, tile.rows),)](
        given, *dense, buffers.x,
        E, F, ROWS=tile.rows, COLUMNS=min(tile.depth, _pad(F)), **_launch(tiles, tile),
    )  # fmt: skip


def many_layer(
    weights: Weights, buffers: Buffers, tiles: Tiles, layer: int, pending: Pending | None = None, only: str = ""
) -> Pending | None:
    """The kernels of a GSS layer for several sequences (`only` one of them, to time it); what it leaves pending."""
    _, _, _, F, H, _, _ = weights.sizes
    batch = buffers.batch
    if only in ("", "norm"):
        _add_and_norm(weights, buffers, tiles, _of(weights.norm, layer), pending, layer=layer)
    if only in ("", "gate"):
        _product_many(buffers, tiles, _of(weights.gate_inner, layer), buffers.gate, weights.activation, H)
    if only in ("", "context"):
        tile = tiles.context_many
        across = max(16, min(tile.columns_of(batch), 2**14 // _pad(H)))
        rows = max(16, min(tile.rows, 2**15 // _pad(H)))
        decode_batch.context_many[(triton.cdiv(F, rows), triton.cdiv(batch, across))](
            buffers.inner, *_of(weights.inner_norm, layer), buffers.base, weights.taps[layer], buffers.inputs[layer],
            buffers.read, *_of(weights.context, layer), buffers.gate, buffers.gated, weights.epsilon,
            batch, F, H, weights.centred, H_PAD=_depth(H), ROWS=rows, COLUMNS=across, **_launch(tiles, tile),
        )  # fmt: skip
    if only in ("", "output"):
        pending = _sums_many(buffers, tiles, buffers.gated, _of(weights.output, layer))
    return pending


def many_attention(
    weights: Weights, buffers: Buffers, tiles: Tiles, index: int, pending: Pending | None = None
) -> Pending:
    """The kernels of a Transformer block for several sequences; what it leaves pending."""
    block = weights.attention[index]
    _add_and_norm(weights, buffers, tiles, block.norm, pending)
    _product_many(buffers, tiles, block.query_key_value, buffers.projected, "none")
    _attend(block, buffers, tiles, index)
    pending = _sums_many(buffers, tiles, buffers.attended, block.output)
    _add_and_norm(weights, buffers, tiles, block.feedforward_norm, pending)
    _product_many(buffers, tiles, block.inner, buffers.hidden, weights.activation)
    return _sums_many(buffers, tiles, buffers.hidden, block.outer)


def head_many(weights: Weights, buffers: Buffers, tiles: Tiles, pending: Pending | None = None) -> None:
    """Norm and head for several sequences."""
    _, V, E, *_ = weights.sizes
    tile = tiles.head_many
    columns = tile.columns_of(buffers.batch)
    _add_and_norm(weights, buffers, tiles, weights.final_norm, pending, factor=E**-0.5)
    decode_batch.head_many[(triton.cdiv(V, tile.rows), triton.cdiv(buffers.batch, columns))](
        buffers.normed, weights.head, buffers.logits, buffers.best, buffers.best_token,
        buffers.batch, V, E, ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, **_launch(tiles, tile),
    )  # fmt: skip


def _add_and_norm(
    weights: Weights,
    buffers: Buffers,
    tiles: Tiles,
    norm: Pair,
    pending: Pending | None,
    factor: float = 1.0,
    layer: int | None = None,
) -> None:
    """Add what is pending to the stream, norm it for what follows; beside it what earlier tokens give a GSS layer."""
    _, _, E, _, H, _, W = weights.sizes
    here = layer or 0
    bias, slices = pending or (norm[1], 0)
    grid = buffers.batch + (0 if layer is None else triton.cdiv(buffers.batch * H, tiles.channels))
    decode_batch.add_and_norm[(grid,)](
        buffers.x, buffers.partial, bias, *norm, buffers.normed,
        buffers.inputs[here], weights.taps[here], buffers.echo[here], buffers.base, buffers.read,
        weights.epsilon, factor, buffers.batch, E, H, weights.centred, SPLITS=slices,
        E_PAD=_pad(E), W_PAD=_pad(W), CHANNELS=tiles.channels, **_launch(tiles, early=tiles.norm_early),
    )  # fmt: skip


def _product_many(buffers: Buffers, tiles: Tiles, dense: Pair, out: Tensor, activation: str, channels: int = 0) -> None:
    """A product of the normed stream; the last `channels` of its rows are `buffers.inner`."""
    tile, (rows, E) = tiles.gate_many, dense[0].shape
    columns = tile.columns_of(buffers.batch)
    decode_batch.gate_inner_many[(triton.cdiv(rows, tile.rows), triton.cdiv(buffers.batch, columns))](
        buffers.normed, *dense, out, buffers.inner, buffers.batch, E, rows - channels, channels, activation,
        ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, **_launch(tiles, tile),
    )  # fmt: skip


def _sums_many(buffers: Buffers, tiles: Tiles, given: Tensor, dense: Pair) -> Pending:
    """The partial sums of a product that is to be added to the stream."""
    weight, bias = dense
    tile, (E, F) = tiles.output_many, weight.shape
    columns = tile.columns_of(buffers.batch)
    part, slices = tiles.slices(F)
    decode_batch.output_many[(triton.cdiv(E, tile.rows), slices, triton.cdiv(buffers.batch, columns))](
        given, weight, buffers.partial,
        buffers.batch, E, F, SLICE=part, ROWS=tile.rows, COLUMNS=columns, DEPTH=tile.depth, **_launch(tiles, tile),
    )  # fmt: skip
    return bias, slices


def _attend(block: AttentionWeights, buffers: Buffers, tiles: Tiles, index: int) -> None:
    """Attention of the token that `buffers.projected` has, one sequence or several."""
    part, slices = tiles.attention_slices(block.chunk, buffers.batch)
    width = block.width // block.heads
    decode_attention.attend[(buffers.batch * block.heads, slices)](
        buffers.projected, buffers.keys[index], buffers.values[index], buffers.lengths[index],
        buffers.attended, buffers.peak, buffers.total, width**-0.5,
        block.heads, width, block.chunk, part, WHOLE=buffers.batch > 1,
        WIDTH_PAD=_pad(width), KEYS=tiles.attend.rows_of(2 * width), **_launch(tiles, tiles.attend),
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


def _of(pair: Pair, layer: int) -> Pair:
    return pair[0][layer], pair[1][layer]


def _pad(size: int) -> int:
    return triton.next_power_of_2(size)


def _depth(size: int) -> int:
    """Padded for a matrix product over it, which has at least 16 terms."""
    return max(16, _pad(size))


def _launch(tiles: Tiles, tile: Tile | None = None, early: bool = True) -> dict[str, Any]:
    options: dict[str, Any] = {"OVERLAP": tiles.overlap, "num_warps": tile.warps if tile else 4}
    if tile:
        options["num_stages"] = tile.stages
    return options | ({"launch_pdl": True} if tiles.overlap and early else {})
