"""Folding a block of W inputs into the states of a layer, and what the new states give the next block's outputs.

The fast path of `gss.ops.recurrence` (`final_state` and `carried_output` at once) for eigenvalues that all channels
share: with a = exp(log Ā),

    s ← a^W s + Σ_j a^(W−1−j) u_j          carried_k = Re Σ_n C_n a_n^(k+1) s_n,   k < W

(a^(W−j) s for a sequence that joined at place j of the block, and has zeros for the inputs that it missed.)
Both sums are matrix products with tables of powers taken in float64 once. a^W s itself is float64, rounded once with
what is added to it: rounded on the way, it would turn and shrink slow modes the same wrong way at every fold. The
state is read and written once: at batch 64 of the 192M preset 2 × 1.07 GB, 0.5 ms at 4.2 TB/s, and 69 GFLOP, for 64
tokens.
"""

import triton
import triton.language as tl


@triton.jit
def fold_block(
    state_at, inputs_at, joined_at, power_at, into_at, readout_at, out_of_at, carried_at,
    rows, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr, LATE: tl.constexpr,
    W_PAD: tl.constexpr, ROWS: tl.constexpr, MODES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows are (sequence, channel) pairs, B·H of them; the grid has tiles of them.

    state [2, B·H, N] (real, imaginary; updated), inputs [W, B·H], power [2, W + 1, N] = a^(W−j) in float64 and
    into the same in float32, readout [2, H, N] = C·B̄, out_of [2, N, W] = (Re, −Im) of a^(k+1), carried [W, B·H]
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
        old_re = tl.load(state_at + at, mask=known & here, other=0.0).to(tl.float64)
        old_im = tl.load(state_at + imaginary + at, mask=known & here, other=0.0).to(tl.float64)
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
        re = (power_re * old_re - power_im * old_im + tl.dot(inputs, into_re, input_precision=PRECISION)).to(tl.float32)
        im = (power_re * old_im + power_im * old_re + tl.dot(inputs, into_im, input_precision=PRECISION)).to(tl.float32)
        tl.store(state_at + at, re, mask=known & here)
        tl.store(state_at + imaginary + at, im, mask=known & here)
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
