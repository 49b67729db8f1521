"""One token of each sequence through the mixers: attention, GSS2's matrix state, and the fold of a GSS block.

These are the fast paths of `gss.nn.attention` and `gss.nn.gss2` token by token, and of `gss.nn.decode_plans` at the end
of a block. The products around them are those of GSS layers, in `decode` and `decode_batch`.

**Attention** on chunks or over a sliding window. A program handles one head of one sequence, and no other program reads
or writes that part of the cache. Several sequences give enough programs, and each goes through all keys. A single
sequence does not: its chunk is cut into slices with one program each, and `attended_output_one` combines them as it
reads them. A window is a ring buffer: a token takes the place of the one that has left the window. Queries and keys are
normalized and rotated by their positions if the model does so. The chunk's keys and values are bfloat16, 2 MB per
sequence at the sizes of the 192M preset, half of which a token needs on average. Unlike weights, they are loaded after
the wait for the previous kernel, because they are results of this step.

**GSS2.** A program handles one head of one sequence: the short convolution of its queries, keys and values, the step of
its state [2N, D] in place, and its output, normalized and gated. A step costs reading and writing the state once, 64 KB
per head at the presets' sizes, and the products around it.

**The fold** of a block of W inputs into the states of a GSS layer, and the contribution of the new states to the next
block's outputs (`final_state` and `carried_output` of `gss.ops.state_space` at once), for eigenvalues that all channels
share. With a = exp(log Ā),

    s ← a^W s + Σ_j a^(W−1−j) u_j          carried_k = Re Σ_n C_n a_n^(k+1) s_n,   k < W

(a^(W−j) s for a sequence that joined at place j of the block, which has zeros for the inputs that it missed.)
Both sums are matrix products with tables of powers computed once in float64. The state is float64: if it were rounded,
every fold would rotate and shrink slow modes, or lose small inputs, in the same wrong way. It is read and written once:
at batch 64 of the 192M preset, 2 × 2.15 GB, 1.0 ms at 4.2 TB/s, and 69 GFLOP, for 64 tokens.
"""

import triton
import triton.language as tl

from gss.ops.gpu.decode import activated, ready


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
    WIDTH_PAD: tl.constexpr, KEYS: tl.constexpr, DRAFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of queries over keys [B, h, KEPT, d], the token's own among them; `length` [B] counts it.

    The grid is (B·h, slices). Queries, keys and values of the token are [B, 3, h, d]; its key and value are put into
    the cache, which starts anew with each chunk, or is a RING. Written: the attended values [B, h, d] if WHOLE; else,
    for each slice [slices, B, h, d], their sum with weights e^(score − peak), the peak, and the sum of those weights,
    [slices, B, h] each.

    In a DRAFT, whole and on chunks, B successive tokens of one sequence attend to its cache and to each other. A token
    that would begin another chunk, and so write over keys that are needed if it is taken back, gets NaN.
    """
    row, head, part = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    d = tl.arange(0, WIDTH_PAD)
    inside = d < WIDTH
    ready(OVERLAP)
    position = tl.load(length_at + row) - 1
    place = (position % KEPT).to(tl.int32)
    last = tl.minimum(position, KEPT - 1).to(tl.int32) if RING else place
    if DRAFT:
        last = ((position - row) % KEPT).to(tl.int32) - 1  # in the cache; the draft's own come after
        place = last + 1 + row
    own = projected_at + (row * 3 * HEADS + head) * WIDTH
    query = _vector(own, d, query_scale_at, frequency_at, position, epsilon, WIDTH, NORM, ROTARY) * scale
    key = _vector(own + HEADS * WIDTH, d, key_scale_at, frequency_at, position, epsilon, WIDTH, NORM, ROTARY)
    key = key.to(keys_at.dtype.element_ty)
    value = tl.load(own + 2 * HEADS * WIDTH + d, mask=inside, other=0.0).to(values_at.dtype.element_ty)
    cached = (head if DRAFT else tl.program_id(0)).to(tl.int64) * KEPT * WIDTH
    first = part * SLICE
    if (place >= first) & (place < tl.minimum(first + SLICE, KEPT)):
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
    if DRAFT:
        for token in range(0, row + 1):
            of_token = projected_at + ((token * 3 + 1) * HEADS + head) * WIDTH
            at = position - row + token
            its_key = _vector(of_token, d, key_scale_at, frequency_at, at, epsilon, WIDTH, NORM, ROTARY)
            its_value = tl.load(of_token + HEADS * WIDTH + d, mask=inside, other=0.0)
            score = tl.sum(its_key.to(keys_at.dtype.element_ty).to(tl.float32) * query, 0)
            higher = tl.maximum(peak, score)
            weight = tl.exp(score - higher)
            fading = tl.exp(peak - higher)
            total = total * fading + weight
            weighted = weighted * fading + weight * its_value.to(values_at.dtype.element_ty).to(tl.float32)
            peak = higher
        total = tl.where(place < KEPT, total, float("nan"))
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


@triton.jit
def _convolved(
    projected_at, recent_at, taps_at, channel, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr, MAP: tl.constexpr
):  # fmt: skip
    """φ of the short convolution at these channels; the recent tokens [TAPS − 1, CHANNELS] move on by one."""
    new = tl.load(projected_at + channel, mask=inside, other=0.0).to(tl.float32)
    y = new * tl.load(taps_at + channel, mask=inside, other=0.0)
    for back in tl.static_range(1, TAPS):
        held_at = recent_at + (TAPS - 1 - back) * CHANNELS + channel
        held = tl.load(held_at, mask=inside, other=0.0)
        y += held * tl.load(taps_at + back * CHANNELS + channel, mask=inside, other=0.0)
        tl.debug_barrier()  # several warps may hold the same channel, and one of them writes over it
        tl.store(held_at, new, mask=inside)
        new = held
    return activated(y, MAP)


@triton.jit
def keyed_step(
    projected_at, recent_at, taps_at, state_at, step_at, energy_at, skip_at, scale_at, gated_at, query_scale,
    HEADS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr,
    MAP: tl.constexpr, N_PAD: tl.constexpr, D_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of a token's queries, keys, values and gates [B, h·(4N + 2D)]: the gated output [B, h·D]. All else moves on.

    State [B, h, 2N, D], recent tokens [B, TAPS − 1, h·(4N + D)], e^λ [2, h, N], the energies of keys [h, N].
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    n, d = tl.arange(0, N_PAD), tl.arange(0, D_PAD)
    modes, values = n < N, d < D
    channels: tl.constexpr = HEADS * (4 * N + D)
    step_re = tl.load(step_at + head * N + n, mask=modes, other=0.0)[:, None]
    step_im = tl.load(step_at + (HEADS + head) * N + n, mask=modes, other=0.0)[:, None]
    energy = tl.load(energy_at + head * N + n, mask=modes, other=0.0)
    skip = tl.load(skip_at + head)
    scale = tl.load(scale_at + head * D + d, mask=values, other=0.0)
    ready(OVERLAP)
    projected = projected_at + row * (channels + HEADS * D)
    recent = recent_at + row * (TAPS - 1) * channels
    query, key = head * 2 * N + n, (HEADS + head) * 2 * N + n
    q_re = _convolved(projected, recent, taps_at, query, modes, channels, TAPS, MAP)
    q_im = _convolved(projected, recent, taps_at, query + N, modes, channels, TAPS, MAP)
    k_re = _convolved(projected, recent, taps_at, key, modes, channels, TAPS, MAP)
    k_im = _convolved(projected, recent, taps_at, key + N, modes, channels, TAPS, MAP)
    v = _convolved(projected, recent, taps_at, HEADS * 4 * N + head * D + d, values, channels, TAPS, "swish")
    gate = tl.load(projected + channels + head * D + d, mask=values, other=0.0).to(tl.float32)
    of_query = query_scale * tl.rsqrt(tl.sum(q_re * q_re + q_im * q_im, 0) / (2 * N) + 1e-6)
    of_key = energy * tl.rsqrt(tl.sum(k_re * k_re + k_im * k_im, 0) / (2 * N) + 1e-6)
    at = state_at + tl.program_id(0).to(tl.int64) * (2 * N * D) + n[:, None] * D + d[None, :]
    there = modes[:, None] & values[None, :]
    old_re, old_im = tl.load(at, mask=there, other=0.0), tl.load(at + N * D, mask=there, other=0.0)
    re = old_re * step_re - old_im * step_im + (k_re * of_key)[:, None] * v[None, :]
    im = old_re * step_im + old_im * step_re + (k_im * of_key)[:, None] * v[None, :]
    tl.debug_barrier()
    tl.store(at, re, mask=there)
    tl.store(at + N * D, im, mask=there)
    y = tl.sum(re * (q_re * of_query)[:, None] + im * (q_im * of_query)[:, None], 0) + skip * v
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + 1e-6) * scale * activated(gate, "swish")
    tl.store(gated_at + row * (HEADS * D) + head * D + d, y.to(gated_at.dtype.element_ty), mask=values)


@triton.jit
def gate_hidden(hidden_at, gated_at, F, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """φ(a) ∗ b [B, F] of hidden rows [a, b] of 2F; the grid is (tiles, B)."""
    row = tl.program_id(1)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ready(OVERLAP)
    inner = tl.load(hidden_at + row * 2 * F + k, mask=k < F, other=0.0).to(tl.float32)
    gate = tl.load(hidden_at + row * 2 * F + F + k, mask=k < F, other=0.0).to(tl.float32)
    tl.store(gated_at + row * F + k, (activated(inner, ACTIVATION) * gate).to(gated_at.dtype.element_ty), mask=k < F)


@triton.jit
def fold_block(
    state_at, inputs_at, joined_at, power_at, into_at, readout_at, out_of_at, carried_at,
    rows, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr, LATE: tl.constexpr,
    W_PAD: tl.constexpr, ROWS: tl.constexpr, MODES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows are (sequence, channel) pairs, B·H of them; the grid has tiles of them.

    state [2, B·H, N] (real, imaginary; updated) and power [2, W + 1, N] = a^(W−j) in float64, inputs [W, B·H], into as
    power in float32, readout [2, H, N] = C·B̄, out_of [2, N, W] = (Re, −Im) of a^(k+1), carried [W, B·H]
    (written); if LATE, joined [B].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, W_PAD)
    known = (row < rows)[:, None]
    within = (place < W)[None, :]
    block = place[None, :] * rows + row[:, None]  # [ROWS, W]
    inputs = tl.load(inputs_at + block, mask=known & within, other=0.0)
    carried = tl.zeros((ROWS, W_PAD), dtype=tl.float32)
    imaginary = tl.full((), N, tl.int64) * rows
    if LATE:
        joined = tl.load(joined_at + row // H, mask=row < rows, other=0)
    for first in range(0, N, MODES):
        n = first + tl.arange(0, MODES)
        here = (n < N)[None, :]
        at = row.to(tl.int64)[:, None] * N + n[None, :]
        old_re = tl.load(state_at + at, mask=known & here, other=0.0)
        old_im = tl.load(state_at + imaginary + at, mask=known & here, other=0.0)
        if LATE:
            past = joined[:, None] * N + n[None, :]
            power_re = tl.load(power_at + past, mask=known & here, other=0.0)
            power_im = tl.load(power_at + (W + 1) * N + past, mask=known & here, other=0.0)
        else:
            power_re = tl.load(power_at + n, mask=n < N, other=0.0)[None, :]
            power_im = tl.load(power_at + (W + 1) * N + n, mask=n < N, other=0.0)[None, :]
        table = (place[:, None] + 1) * N + n[None, :]
        inside = (place < W)[:, None] & here
        into_re = tl.load(into_at + table, mask=inside, other=0.0)
        into_im = tl.load(into_at + (W + 1) * N + table, mask=inside, other=0.0)
        re = power_re * old_re - power_im * old_im + tl.dot(inputs, into_re, input_precision=PRECISION)
        im = power_re * old_im + power_im * old_re + tl.dot(inputs, into_im, input_precision=PRECISION)
        tl.store(state_at + at, re, mask=known & here)
        tl.store(state_at + imaginary + at, im, mask=known & here)
        re, im = re.to(tl.float32), im.to(tl.float32)
        at = (row % H)[:, None] * N + n[None, :]
        c_re = tl.load(readout_at + at, mask=known & here, other=0.0)
        c_im = tl.load(readout_at + H * N + at, mask=known & here, other=0.0)
        table = n[:, None] * W + place[None, :]
        inside = (n < N)[:, None] & within
        out_re = tl.load(out_of_at + table, mask=inside, other=0.0)
        out_im = tl.load(out_of_at + N * W + table, mask=inside, other=0.0)
        carried = tl.dot(c_re * re - c_im * im, out_re, carried, input_precision=PRECISION)
        carried = tl.dot(c_re * im + c_im * re, out_im, carried, input_precision=PRECISION)
    tl.store(carried_at + block, carried, mask=known & within)
