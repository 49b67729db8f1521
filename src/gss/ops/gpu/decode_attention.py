"""One token of each sequence through attention on chunks or a sliding window: it attends, its key and value join.

The fast path of `gss.nn.attention` for a token at a time; the products around it are those of GSS layers, in `decode`
and `decode_batch`. A program has a head of a sequence to itself, and no other reads or writes that part of the cache.
For several sequences that is enough programs, and each goes through all keys. For one it is not: there a chunk is cut
into slices with a program each, and `attended_output_one` puts them together as it reads them.

A window is a ring: a token takes the place of the one that has left it. Queries and keys are normed and turned by their
positions where the model says so.

The chunk's keys and values are bfloat16, at the 192M preset's sizes 2 MB for a sequence, of which a token needs half
on average. They are loaded after the wait for the kernel before, unlike weights: they are the step's own results.
"""

import triton
import triton.language as tl

from gss.ops.gpu.decode import ready


@triton.jit
def _vector(
    at, d, scale_at, frequency_at, position, epsilon, WIDTH: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr
):
    """A query or a key [d], normed by its root mean square and turned by its position, where asked for."""
    inside = d < WIDTH
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    size = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon) if NORM else 1.0
    x *= size * tl.load(scale_at + d, mask=inside, other=0.0) if NORM else 1.0
    if ROTARY:  # the pair (x_i, x_{i + d/2}) is turned
        half: tl.constexpr = WIDTH // 2
        other = (d + half) % WIDTH
        partner = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
        partner *= size * tl.load(scale_at + other, mask=inside, other=0.0) if NORM else 1.0
        turns = position.to(tl.float64) * tl.load(frequency_at + d % half)  # angles ÷ 2π
        angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
        x = x * tl.cos(angle) + partner * tl.where(d < half, -tl.sin(angle), tl.sin(angle))
    return x


@triton.jit
def attend(
    projected_at, query_scale_at, key_scale_at, frequency_at, keys_at, values_at, length_at,
    attended_at, peak_at, total_at, scale, epsilon,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, SLICE: tl.constexpr, WHOLE: tl.constexpr,
    RING: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
    WIDTH_PAD: tl.constexpr, KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of queries over keys [B, h, KEPT, d], the token's own among them; `length` [B] counts it.

    The grid is (B·h, slices). Queries, keys and values of the token are [B, 3, h, d]; its key and value are put into
    the cache, which starts anew with each chunk, or is a RING. Written: the attended values [B, h, d] if WHOLE; else,
    for each slice [slices, B, h, d], their sum with weights e^(score − peak), the peak, and the sum of those weights,
    [slices, B, h] each.
    """
    row, head, part = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    d = tl.arange(0, WIDTH_PAD)
    inside = d < WIDTH
    ready(OVERLAP)
    position = tl.load(length_at + row) - 1
    place = (position % KEPT).to(tl.int32)
    last = tl.minimum(position, KEPT - 1).to(tl.int32) if RING else place
    own = projected_at + (row * 3 * HEADS + head) * WIDTH
    query = _vector(own, d, query_scale_at, frequency_at, position, epsilon, WIDTH, NORM, ROTARY) * scale
    key = _vector(own + HEADS * WIDTH, d, key_scale_at, frequency_at, position, epsilon, WIDTH, NORM, ROTARY)
    key = key.to(keys_at.dtype.element_ty)
    value = tl.load(own + 2 * HEADS * WIDTH + d, mask=inside, other=0.0).to(values_at.dtype.element_ty)
    cached = tl.program_id(0).to(tl.int64) * KEPT * WIDTH
    first = part * SLICE
    if (place >= first) & (place < first + SLICE):
        tl.store(keys_at + cached + place * WIDTH + d, key, mask=inside)
        tl.store(values_at + cached + place * WIDTH + d, value, mask=inside)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.zeros((WIDTH_PAD,), tl.float32)
    for start in range(first, tl.minimum(first + SLICE, last + 1), KEYS):
        j = start + tl.arange(0, KEYS)
        at = cached + j[:, None] * WIDTH + d[None, :]
        earlier = ((j <= last) & (j != place))[:, None] & inside[None, :]
        is_own = (j == place)[:, None]
        keys = tl.where(is_own, key[None, :], tl.load(keys_at + at, mask=earlier, other=0.0)).to(tl.float32)
        values = tl.where(is_own, value[None, :], tl.load(values_at + at, mask=earlier, other=0.0)).to(tl.float32)
        score = tl.where(j <= last, tl.sum(keys * query[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 0))
        weight = tl.exp(score - higher)
        fading = tl.exp(peak - higher)
        total = total * fading + tl.sum(weight, 0)
        weighted = weighted * fading + tl.sum(weight[:, None] * values, 0)
        peak = higher
    rows = tl.num_programs(0)
    slot = part * rows + tl.program_id(0)
    if WHOLE:
        weighted = weighted / total
    else:
        tl.store(peak_at + slot, peak)
        tl.store(total_at + slot, total)
    tl.store(attended_at + slot * WIDTH + d, weighted.to(attended_at.dtype.element_ty), mask=inside)


@triton.jit
def attended_output_one(
    attended_at, peak_at, total_at, weight_at, bias_at, x_at,
    E: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
    COLUMNS: tl.constexpr, SLICES_PAD: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`decode.output_one` of what one sequence attends to, given in the slices of `attend`: [SLICES, h·d]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    inside = k < HEADS * WIDTH
    weight = tl.load(
        weight_at + row[:, None] * (HEADS * WIDTH) + k[None, :], mask=(row < E)[:, None] & inside[None, :], other=0.0
    )
    bias = tl.load(bias_at + row, mask=row < E, other=0.0)
    ready(OVERLAP)
    x = tl.load(x_at + row, mask=row < E, other=0.0)
    part = tl.arange(0, SLICES_PAD)[:, None]
    there = (part < SLICES) & inside[None, :]
    of_head = part * HEADS + (k // WIDTH)[None, :]
    peak = tl.load(peak_at + of_head, mask=there, other=float("-inf"))
    total = tl.load(total_at + of_head, mask=there, other=0.0)
    weighted = tl.load(attended_at + part * (HEADS * WIDTH) + k[None, :], mask=there, other=0.0)
    share = tl.exp(peak - tl.where(inside, tl.max(peak, 0), 0.0)[None, :])
    attended = tl.sum(share * weighted, 0) / tl.where(inside, tl.sum(share * total, 0), 1.0)
    tl.store(x_at + row, x + tl.sum(weight.to(tl.float32) * attended[None, :], 1) + bias, mask=row < E)
