"""One token of several sequences through a GSS model: products of weights with a few columns, on tensor cores.

The fast path of `gss.nn.gss` and `gss.nn.decode_plans` for batches; `decode` has the one for a single row, and the
parts that both share. The 376 MB of weights are read once for up to 64 rows, so the floor is still 90 µs at 4.2 TB/s. A
batch of 64 adds 1 MB of activations per layer (read from the cache by every program that needs them), 2 MB of the
block's inputs per layer on average, and 8 MB of logits. 25 GFLOP take 33 µs.

Weights are the left operand of every product, so their many rows fill the 16 to 64 rows of the tensor cores, and the
batch is the narrow side: 16, 32 or 64 columns, masked. More than 64 rows take another round. There are four kernels per
layer: the norm is separate here, because recomputing it would make every program read the partial sums that the split
output product leaves. Activations between kernels are bfloat16; sums, norms, the residual stream and the state float32.
"""

import triton
import triton.language as tl

from gss.ops.gpu.decode import activated, earlier_outputs, normed, ready, shown

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:  # Triton's interpreter takes bfloat16 numbers for integers here
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def dot(a, b, total):
    """a·b + total, summed in float32, where a is bfloat16; a float32 b is split into two bfloat16 numbers."""
    if b.dtype == tl.float32:
        high = b.to(tl.bfloat16)
        total = _dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), total)
        total = _dot(a, high, total)
    else:
        total = _dot(a, b, total)
    return total


@triton.jit
def normed_rows(x, inside, scale, shift, epsilon, SIZE: tl.constexpr, CENTRED: tl.constexpr):
    """`decode.normed` of each row."""
    if CENTRED:
        x = tl.where(inside, x - (tl.sum(x, 1) / SIZE)[:, None], 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + epsilon)[:, None] * scale[None, :] + shift[None, :]


@triton.jit
def add_and_norm(
    x_at, partial_at, bias_at, scale_at, shift_at, normed_at, inputs_at, taps_at, carried_at, base_at, read_at,
    epsilon, factor, B, E: tl.constexpr, H: tl.constexpr, CENTRED: tl.constexpr, SPLITS: tl.constexpr,
    E_PAD: tl.constexpr, W_PAD: tl.constexpr, CHANNELS: tl.constexpr, DRAFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x [B, E] += the partial sums [SPLITS, B, E] of the product before and its bias; factor·norm(x). One program per
    row; those beyond the rows do the next layer's `earlier_outputs`, which needs none of it."""
    row = tl.program_id(0)
    k = tl.arange(0, E_PAD)
    if row < B:
        scale = tl.load(scale_at + k, mask=k < E, other=0.0)
        shift = tl.load(shift_at + k, mask=k < E, other=0.0)
        ready(OVERLAP)
        x = tl.load(x_at + row * E + k, mask=k < E, other=0.0)
        if SPLITS > 0:
            x += tl.load(bias_at + k, mask=k < E, other=0.0)
            for split in tl.static_range(SPLITS):
                x += tl.load(partial_at + (split * B + row) * E + k, mask=k < E, other=0.0)
            tl.debug_barrier()  # a narrow row is held by several warps, and one of them writes over it
            tl.store(x_at + row * E + k, x, mask=k < E)
        x = normed(x, k < E, scale, shift, epsilon, E, CENTRED) * factor
        tl.store(normed_at + row * E + k, x.to(normed_at.dtype.element_ty), mask=k < E)
    else:
        ready(OVERLAP)
        read = tl.load(read_at)
        earlier_outputs(row - B, inputs_at, taps_at, carried_at, base_at, read, B * H, H, W_PAD, CHANNELS, DRAFT)


@triton.jit
def product(
    left_at, right_at, row, column, rows, columns, start, K: tl.constexpr, LENGTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """left · rightᵀ over LENGTH of the K columns of both, from `start` (a multiple of it): [ROWS, COLUMNS] float32."""
    k = start + tl.arange(0, DEPTH)
    left = left_at + row.to(tl.int64)[:, None] * K + k[None, :]
    right = right_at + column[:, None] * K + k[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for at in range(0, LENGTH, DEPTH):
        if K % LENGTH == 0 and LENGTH % DEPTH == 0:
            a = tl.load(left + at, mask=(row < rows)[:, None], other=0.0)
            b = tl.load(right + at, mask=(column < columns)[:, None], other=0.0)
        else:
            inside = ((at + tl.arange(0, DEPTH) < LENGTH) & (at + k < K))[None, :]
            a = tl.load(left + at, mask=(row < rows)[:, None] & inside, other=0.0)
            b = tl.load(right + at, mask=(column < columns)[:, None] & inside, other=0.0)
        total = dot(a, tl.trans(b), total)
    return total


@triton.jit
def gate_inner_many(
    normed_at, weight_at, bias_at, gate_at, inner_at,
    B, E: tl.constexpr, F: tl.constexpr, H: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """φ(W₂ x + b₂) [B, F] and φ(W₁ x + b₁) [B, H] of normed rows [B, E]; the batch is the grid's axis 1.

    With H = 0 a product as a Transformer block has it.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(bias_at + row, mask=row < F + H, other=0.0)
    ready(OVERLAP)
    total = product(weight_at, normed_at, row, column, F + H, B, 0, E, E, ROWS, COLUMNS, DEPTH)
    y = activated(total + bias[:, None], ACTIVATION)
    gated = (row[:, None] < F) & (column[None, :] < B)
    tl.store(gate_at + column[None, :] * F + row[:, None], y.to(gate_at.dtype.element_ty), mask=gated)
    mixed = (row[:, None] >= F) & (row[:, None] < F + H) & (column[None, :] < B)
    tl.store(inner_at + column[None, :] * H + (row[:, None] - F), y, mask=mixed)


@triton.jit
def context_many(
    inner_at, scale_at, shift_at, base_at, taps_at, inputs_at, read_at, weight_at, bias_at, gate_at, gated_at, epsilon,
    B, F: tl.constexpr, H: tl.constexpr, CENTRED: tl.constexpr,
    H_PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DRAFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`decode.context_one` of rows: [B, F]; the inner norm and y are recomputed by every program of a batch's tile.

    In a DRAFT (`decode.earlier_outputs`), y has the inputs of the tokens before it in the draft, too.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    h = tl.arange(0, H_PAD)
    inside = (row[:, None] < F) & (h[None, :] < H)
    weight = tl.load(weight_at + row[:, None] * H + h[None, :], mask=inside, other=0.0)
    scale = tl.load(scale_at + h, mask=h < H, other=0.0)
    shift = tl.load(shift_at + h, mask=h < H, other=0.0)
    first_tap = tl.load(taps_at + h, mask=h < H, other=0.0)
    bias = tl.load(bias_at + row, mask=row < F, other=0.0)
    ready(OVERLAP)
    places = column[:, None] * H + h[None, :]
    inside = (column[:, None] < B) & (h[None, :] < H)
    inner = tl.load(inner_at + places, mask=inside, other=0.0)
    u = normed_rows(inner, inside, scale, shift, epsilon, H, CENTRED)
    y = tl.load(base_at + places, mask=inside, other=0.0) + first_tap[None, :] * u
    read = tl.load(read_at)
    if DRAFT:
        within = inside & (read + column < DRAFT)[:, None]
        if tl.program_id(0) == 0:
            tl.store(inputs_at + read * H + places, u, mask=within)
        for earlier in range(0, B - 1):
            given = tl.sum(tl.where((column == earlier)[:, None], u, 0.0), 0)
            later = within & (column > earlier)[:, None]
            taps = tl.load(taps_at + places - earlier * H, mask=later, other=0.0)
            y = tl.where(later, y + taps * given[None, :], y)  # what was given may be NaN
    else:
        if tl.program_id(0) == 0:
            tl.store(inputs_at + read * (B * H) + places, u, mask=inside)
        y = y.to(weight.dtype)
    context = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + bias[:, None]
    context = dot(weight, tl.trans(y), context)
    places = column[None, :] * F + row[:, None]
    inside = (row[:, None] < F) & (column[None, :] < B)
    gate = tl.load(gate_at + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(gated_at + places, (context * gate).to(gated_at.dtype.element_ty), mask=inside)


@triton.jit
def output_many(
    gated_at, weight_at, partial_at,
    B, E: tl.constexpr, F: tl.constexpr, SLICE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Partial sums [splits, B, E] of the output product, each over SLICE of the gate's width: the grid's axis 1."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    ready(OVERLAP)
    total = product(weight_at, gated_at, row, column, E, B, split * SLICE, F, SLICE, ROWS, COLUMNS, DEPTH)
    places = (split * B + column[None, :]) * E + row[:, None]
    tl.store(partial_at + places, total, mask=(row[:, None] < E) & (column[None, :] < B))


@triton.jit
def head_many(
    normed_at, weight_at, logits_at, best_at, best_token_at,
    B, V, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`decode.head_one` of rows normed and scaled already: logits [B, V], the tiles' best [B, tiles]."""
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ready(OVERLAP)
    logits = product(weight_at, normed_at, row, column, V, B, 0, E, E, ROWS, COLUMNS, DEPTH)
    places = column.to(tl.int64)[None, :] * V + row[:, None]
    tl.store(logits_at + places, logits, mask=(row[:, None] < V) & (column[None, :] < B))
    logits = shown(tl.where((row < V)[:, None], logits, float("-inf")))
    best, place = tl.max(logits, 0, return_indices=True)
    tiles = tl.num_programs(0)
    tl.store(best_at + column * tiles + tile, best, mask=column < B)
    tl.store(best_token_at + column * tiles + tile, tile * ROWS + place, mask=column < B)
