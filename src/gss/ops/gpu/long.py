"""A long signal convolved with the paper's kernel in training: rows, the states between them, and nothing else.

What `gss.ops.rows.mix` composes from general pieces, for signals that begin from nothing and whose last state nobody
wants, as one operation with its gradient written out. Rows of T samples are convolved alone; a row's final state is
a product with a table of powers, states pass from row to row, and their echo in the next row is a product with the
same table. Between the products one kernel a direction goes along a channel's rows with all its modes in registers.

In formulas, for the rows u_r of a channel, a = e^λ and w = C·B̄·a:
    v_r = Σ_j u_r[j]·a^(T−1−j),   s_r = a^T·s_{r−1} + v_{r−1},   y_r[k] += Re(w·s_r·a^k).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops.gpu.fft import convolve, correlation, row_length, spectrum, taps_of_spectrum
from gss.ops.gpu.powers import largest_of, table_of
from gss.ops.gpu.taps import from_modes, gradients_of, half_product, modes_and_drive
from gss.ops.gpu.transpose import contiguous


@torch.library.custom_op("gss::mix_long", mutates_args=())
def mix_long(
    signal: Tensor, log_decay: Tensor, frequency: Tensor, readout: Tensor, skip: Tensor, exponentiated: bool
) -> tuple[Tensor, Tensor]:
    """y = D·u + K∗u for u [B, H, L] of 16 bits; and the states at rows' starts, for the gradient alone."""
    row = row_length(signal.shape[-1])
    modes, drive = modes_and_drive(log_decay, frequency, exponentiated)
    table = table_of(modes, row)[0]
    y = convolve(signal, *spectrum(from_modes(drive, table, readout, skip)))
    batch, channels, length = signal.shape
    count = modes.shape[0]
    carried = rows_of(length, row) - 1
    sums, scale = projected(signal, table, row, carried, reverse=True)
    states = torch.empty(batch * channels, carried, 2 * count, device=signal.device)
    packed, packed_scale = room(batch * channels * carried, 2 * count, signal)
    _pass_kernel[(batch * channels,)](
        sums, scale, modes, drive, readout, states, packed, packed_scale, channels, row,
        ROWS=carried, MODES=count, BN=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    add_rows(y, half_product(packed, table), packed_scale, row, first=1)
    return y, states


@torch.library.custom_op("gss::mix_long_backward", mutates_args=())
def mix_long_backward(
    grad: Tensor,
    states: Tensor,
    signal: Tensor,
    log_decay: Tensor,
    frequency: Tensor,
    readout: Tensor,
    skip: Tensor,
    exponentiated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mix_long` by the signal and the four parameters."""
    batch, channels, length = signal.shape
    row = row_length(length)
    carried = rows_of(length, row) - 1
    grad = contiguous(grad)
    modes, drive = modes_and_drive(log_decay, frequency, exponentiated)
    count = modes.shape[0]
    table = table_of(modes, row)[0]
    taps = from_modes(drive, table, readout, skip)
    grad_signal = convolve(grad, *spectrum(taps), transpose=True)
    grad_taps = taps_of_spectrum(correlation(signal, grad, row))

    echoes, echo_scale = projected(grad, table, row, carried, first=1)
    ramped, ramped_scale = projected(grad, table, row, carried, first=1, ramp=True)
    inputs, input_scale = projected(signal, table, row, carried, reverse=True, ramp=True)
    packed, packed_scale = room(batch * channels * carried, 2 * count, signal)
    partial = torch.empty(3, batch, channels, 2, count, device=signal.device)
    _pass_backward_kernel[(batch * channels,)](
        echoes, echo_scale, ramped, ramped_scale, inputs, input_scale, states,
        modes, drive, readout, packed, packed_scale, partial, channels, row,
        ROWS=carried, MODES=count, BN=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    add_rows(grad_signal, half_product(packed, table), packed_scale, row, reverse=True)

    by_weight = partial[0].sum(0)  # of w, a channel
    by_turn, by_log = partial[1:].double().sum((1, 2))  # of a^T, and of λ through the tables' powers
    return grad_signal, *gradients_of(
        grad_taps, modes, drive, table, readout, exponentiated, by_weight, by_turn, by_log, row
    )


@mix_long.register_fake
def _(signal, log_decay, frequency, readout, skip, exponentiated):
    batch, channels, length = signal.shape
    carried = rows_of(length, row_length(length)) - 1
    states = signal.new_empty(batch * channels, carried, 2 * log_decay.shape[0], dtype=torch.float32)
    return torch.empty_like(signal), states


@mix_long_backward.register_fake
def _(grad, states, signal, log_decay, frequency, readout, skip, exponentiated):
    return tuple(torch.empty_like(t) for t in (signal, log_decay, frequency, readout, skip))


def _save(ctx, inputs, output):
    *tensors, ctx.exponentiated = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return *mix_long_backward(grad, *ctx.saved_tensors, ctx.exponentiated), None


mix_long.register_autograd(_backward, setup_context=_save)


def rows_of(length: int, row: int) -> int:
    """How many rows a signal has."""
    return -(-length // row)


def room(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """For rows of float16, and a scale each."""
    packed = torch.empty(rows, width, dtype=torch.float16, device=like.device)
    return packed, torch.empty(rows, device=like.device)


def projected(
    signal: Tensor, table: Tensor, row: int, count: int, first: int = 0, reverse: bool = False, ramp: bool = False
) -> tuple[Tensor, Tensor]:
    """Σ_j x[j]·a^j of `count` rows of each channel from its `first` on, [rows, 2N] over a scale a row.

    With `reverse`, of rows read backwards; with `ramp`, weighted by j.
    """
    batch, channels, length = signal.shape
    packed, scale = room(batch * channels * count, row, signal)
    _pack_rows_kernel[(batch * channels * count,)](
        signal, packed, scale, length, count, first, T=row, REVERSE=reverse, RAMP=ramp, num_warps=8
    )
    return half_product(packed, table.T), scale


def add_rows(target: Tensor, rows: Tensor, scale: Tensor, row: int, first: int = 0, reverse: bool = False) -> None:
    """Add scaled rows to those of each channel of a signal, from its `first` on."""
    batch, channels, length = target.shape
    _add_rows_kernel[(rows.shape[0], triton.cdiv(row, 1024))](
        target, rows, scale, length, rows.shape[0] // (batch * channels), first,
        T=row, REVERSE=reverse, BLOCK=1024, num_warps=4,
    )  # fmt: skip


@triton.jit
def _pack_rows_kernel(
    signal, packed, scale, length, count, first, T: tl.constexpr, REVERSE: tl.constexpr, RAMP: tl.constexpr
):
    """A row of the signal in float16 over its largest; the last one may be short."""
    program = tl.program_id(0).to(tl.int64)
    start = (program % count + first) * T
    own = tl.minimum(T, length - start)
    j = tl.arange(0, T)
    position = start + (own - 1 - j if REVERSE else j)
    x = tl.load(signal + (program // count) * length + position, mask=j < own, other=0.0).to(tl.float32)
    if RAMP:
        x = x * j.to(tl.float32)
    largest = largest_of(x, x)
    tl.store(packed + program * T + j, (x / largest).to(tl.float16))
    tl.store(scale + program, largest)


@triton.jit
def _add_rows_kernel(
    target, rows, scale, length, count, first, T: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = (program % count + first) * T + (T - 1 - j if REVERSE else j)
    mask = (position < length) & (j < T)
    at = target + (program // count) * length + position
    added = tl.load(rows + program * T + j, mask=mask, other=0.0) * tl.load(scale + program)
    tl.store(at, (tl.load(at, mask=mask, other=0.0).to(tl.float32) + added).to(target.dtype.element_ty), mask=mask)


@triton.jit
def times(a_re, a_im, b_re, b_im):
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def power(re, im, exponent):
    """e^((re + i·im)·k) for pairs in float64, in float32."""
    turns = im * exponent * 0.15915494309189535
    angle = (turns - tl.floor(turns + 0.5)) * 6.283185307179586
    size = tl.exp(re * exponent)
    return (size * tl.cos(angle)).to(tl.float32), (size * tl.sin(angle)).to(tl.float32)


@triton.jit
def factors(modes, drive, readout, channel, row, MODES: tl.constexpr, BN: tl.constexpr):
    """a^T and w = C·B̄·a of a channel's modes, float32."""
    n = tl.arange(0, BN)
    mask = n < MODES
    re = tl.load(modes + 2 * n, mask=mask, other=0.0)
    im = tl.load(modes + 2 * n + 1, mask=mask, other=0.0)
    turn_re, turn_im = power(re, im, row)
    step_re, step_im = power(re, im, 1)
    b_re = tl.load(drive + 2 * n, mask=mask, other=0.0).to(tl.float32)
    b_im = tl.load(drive + 2 * n + 1, mask=mask, other=0.0).to(tl.float32)
    at = readout + (channel * MODES + n) * 2
    w_re, w_im = times(tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0), b_re, b_im)
    w_re, w_im = times(w_re, w_im, step_re, step_im)
    return turn_re, turn_im, w_re, w_im, n, mask


@triton.jit
def load_sums(sums, scale, index, n, mask, MODES: tl.constexpr):
    """A row of sums, real parts and imaginary parts."""
    at = sums + index * 2 * MODES + n
    own = tl.load(scale + index)
    return tl.load(at, mask=mask, other=0.0) * own, tl.load(at + MODES, mask=mask, other=0.0) * own


@triton.jit
def _pass_kernel(
    sums, scale, modes, drive, readout, states, packed, packed_scale, channels, row,
    ROWS: tl.constexpr, MODES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """States at the starts of rows 1, 2, …, and w·s packed for the product that gives their echo."""
    program = tl.program_id(0).to(tl.int64)
    turn_re, turn_im, w_re, w_im, n, mask = factors(modes, drive, readout, program % channels, row, MODES, BN)
    re = tl.zeros((BN,), tl.float32)
    im = tl.zeros((BN,), tl.float32)
    for r in range(ROWS):
        index = program * ROWS + r
        v_re, v_im = load_sums(sums, scale, index, n, mask, MODES)
        re, im = times(re, im, turn_re, turn_im)
        re += v_re
        im += v_im
        at = index * 2 * MODES + n
        tl.store(states + at, re, mask=mask)
        tl.store(states + at + MODES, im, mask=mask)
        echo_re, echo_im = times(re, im, w_re, w_im)
        largest = largest_of(echo_re, echo_im)
        tl.store(packed + at, (echo_re / largest).to(tl.float16), mask=mask)
        tl.store(packed + at + MODES, (-echo_im / largest).to(tl.float16), mask=mask)
        tl.store(packed_scale + index, largest)


@triton.jit
def _pass_backward_kernel(
    echoes, echo_scale, ramped, ramped_scale, inputs, input_scale, states,
    modes, drive, readout, packed, packed_scale, partial, channels, row,
    ROWS: tl.constexpr, MODES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The adjoint, from the last row to the first: with P, R the sums of an echo's gradient, plain and weighted by k,
    and Q those of the inputs weighted, by w: Σ conj(P·s); by s: conj(P·w) and what comes from the next row; by v the
    same, packed for the product that gives the signal's gradient; by λ: Σ conj(w·s·R) + v's gradient·conj(Q).
    """
    program = tl.program_id(0).to(tl.int64)
    turn_re, turn_im, w_re, w_im, n, mask = factors(modes, drive, readout, program % channels, row, MODES, BN)
    total_re = tl.zeros((BN,), tl.float32)
    total_im = tl.zeros((BN,), tl.float32)
    by_w_re = tl.zeros((BN,), tl.float32)
    by_w_im = tl.zeros((BN,), tl.float32)
    by_turn_re = tl.zeros((BN,), tl.float32)
    by_turn_im = tl.zeros((BN,), tl.float32)
    by_log_re = tl.zeros((BN,), tl.float32)
    by_log_im = tl.zeros((BN,), tl.float32)
    for step in range(ROWS):
        index = program * ROWS + ROWS - 1 - step
        at = index * 2 * MODES + n
        s_re = tl.load(states + at, mask=mask, other=0.0)
        s_im = tl.load(states + at + MODES, mask=mask, other=0.0)
        # `total` is still the gradient by the next row's state: conj(s)·total is its turn's, conj(turn)·total ours.
        re, im = times(s_re, -s_im, total_re, total_im)
        by_turn_re += re
        by_turn_im += im
        total_re, total_im = times(total_re, total_im, turn_re, -turn_im)
        p_re, p_im = load_sums(echoes, echo_scale, index, n, mask, MODES)
        re, im = times(p_re, p_im, w_re, w_im)
        total_re += re
        total_im -= im
        re, im = times(p_re, p_im, s_re, s_im)
        by_w_re += re
        by_w_im -= im
        r_re, r_im = load_sums(ramped, ramped_scale, index, n, mask, MODES)
        re, im = times(s_re, s_im, w_re, w_im)
        re, im = times(re, im, r_re, r_im)
        by_log_re += re
        by_log_im -= im
        q_re, q_im = load_sums(inputs, input_scale, index, n, mask, MODES)
        re, im = times(total_re, total_im, q_re, -q_im)
        by_log_re += re
        by_log_im += im
        largest = largest_of(total_re, total_im)
        tl.store(packed + at, (total_re / largest).to(tl.float16), mask=mask)
        tl.store(packed + at + MODES, (total_im / largest).to(tl.float16), mask=mask)
        tl.store(packed_scale + index, largest)
    out = partial + program * 2 * MODES + n
    plane = tl.num_programs(0).to(tl.int64) * 2 * MODES
    tl.store(out, by_w_re, mask=mask)
    tl.store(out + MODES, by_w_im, mask=mask)
    tl.store(out + plane, by_turn_re, mask=mask)
    tl.store(out + plane + MODES, by_turn_im, mask=mask)
    tl.store(out + 2 * plane, by_log_re, mask=mask)
    tl.store(out + 2 * plane + MODES, by_log_im, mask=mask)
