"""One token of each sequence through GSS2's matrix state, and the product of a gated feed-forward.

The fast path of `gss.nn.gss2` for a token at a time. A program has a head of a sequence to itself: the short
convolution of its queries, keys and values, the step of its state [2N, D] in place, its output, normed and gated. What
a step costs is the state, read and written once: at the presets' sizes 64 KB per head, and the products around it.
"""

import triton
import triton.language as tl

from gss.ops.gpu.decode import activated, ready


@triton.jit
def _convolved(projected_at, recent_at, taps_at, channel, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """swish of the short convolution at these channels; the recent tokens [TAPS − 1, CHANNELS] move on by one."""
    new = tl.load(projected_at + channel, mask=inside, other=0.0).to(tl.float32)
    y = new * tl.load(taps_at + channel, mask=inside, other=0.0)
    for back in tl.static_range(1, TAPS):
        held_at = recent_at + (TAPS - 1 - back) * CHANNELS + channel
        held = tl.load(held_at, mask=inside, other=0.0)
        y += held * tl.load(taps_at + back * CHANNELS + channel, mask=inside, other=0.0)
        tl.store(held_at, new, mask=inside)
        new = held
    return activated(y, "swish")


@triton.jit
def keyed_step(
    projected_at, recent_at, taps_at, state_at, step_at, energy_at, skip_at, scale_at, gated_at, query_scale,
    HEADS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr,
    N_PAD: tl.constexpr, D_PAD: tl.constexpr, OVERLAP: tl.constexpr,
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
    q_re = _convolved(projected, recent, taps_at, query, modes, channels, TAPS)
    q_im = _convolved(projected, recent, taps_at, query + N, modes, channels, TAPS)
    k_re = _convolved(projected, recent, taps_at, key, modes, channels, TAPS)
    k_im = _convolved(projected, recent, taps_at, key + N, modes, channels, TAPS)
    v = _convolved(projected, recent, taps_at, HEADS * 4 * N + head * D + d, values, channels, TAPS)
    gate = tl.load(projected + channels + head * D + d, mask=values, other=0.0).to(tl.float32)
    of_query = query_scale * tl.rsqrt(tl.sum(q_re * q_re + q_im * q_im, 0) / (2 * N) + 1e-6)
    of_key = energy * tl.rsqrt(tl.sum(k_re * k_re + k_im * k_im, 0) / (2 * N) + 1e-6)
    at = state_at + tl.program_id(0).to(tl.int64) * (2 * N * D) + n[:, None] * D + d[None, :]
    there = modes[:, None] & values[None, :]
    old_re, old_im = tl.load(at, mask=there, other=0.0), tl.load(at + N * D, mask=there, other=0.0)
    re = old_re * step_re - old_im * step_im + (k_re * of_key)[:, None] * v[None, :]
    im = old_re * step_im + old_im * step_re + (k_im * of_key)[:, None] * v[None, :]
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
