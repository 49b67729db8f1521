"""A long signal convolved with the paper's kernel, in rows, with the states before, between and after them.

Each row of T samples is convolved as if nothing came before it. The past reaches it through the state at its start, as
a carried state reaches a piece, so the cost per token does not grow with the length. A row's final state is a product
with a table of powers, states pass from row to row, and their contribution to the next row is a product with the same
table. Between these products, one kernel per direction scans a channel's rows with all its modes in registers.

In formulas, for the rows u_r of a channel, each of T_r samples (all but the last of T), a = e^λ and w = C·B̄·a:
    v_r = Σ_j u_r[j]·a^(T_r−1−j),   s_{r+1} = a^T_r·s_r + v_r,   y_r[k] += Re(w·s_r·a^k).
A signal that starts from an empty state has no s_0, and the last v is only needed if the final state is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops import fast
from gss.ops.gpu.fft import convolve, correlation, row_length, spectrum, taps_of_spectrum
from gss.ops.gpu.powers import largest_of, load_pair, pack_row, packed_rows, store_pair, table_of, times
from gss.ops.gpu.taps import from_modes, gradients_of, half_product, modes_and_drive
from gss.ops.gpu.transpose import contiguous


@fast.operation("gss::mix_long")
def mix_long(
    signal: Tensor,
    log_decay: Tensor,
    frequency: Tensor,
    readout: Tensor,
    skip: Tensor,
    exponentiated: bool,
    state: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = D·u + K∗u for u [B, H, L] of 16 bits, going on from a state [B, H, N, 2] (None: zeros); the next state, empty
    unless it is to be kept; and, for the gradient alone, the states at rows' starts and a row's taps.
    """
    batch, channels, length = signal.shape
    modes, drive = modes_and_drive(log_decay, frequency, exponentiated)
    count = modes.shape[0]
    row, rows, first, known = _rows(length, state is not None, keep_state)
    table = table_of(modes, row)
    taps = from_modes(drive, table, readout, skip)
    y = convolve(signal, *spectrum(taps))
    states = torch.empty(batch * channels, rows - first, 2 * count, device=signal.device)
    after = torch.empty(*_kept(signal, count, keep_state), device=signal.device)
    if rows > first or known:
        sums, scale = _projected(signal, table, row, known, reverse=True)
        packed, packed_scale = packed_rows(batch * channels * (rows - first), 2 * count, signal)
        _pass_kernel[(batch * channels,)](
            sums, scale, modes, drive, readout, None if state is None else state.contiguous(), after,
            states, packed, packed_scale, channels, row, length - (rows - 1) * row, rows, known,
            **_constants(rows, count), FIRST=first, KEEP=keep_state, num_warps=4,
        )  # fmt: skip
        _add_rows(y, packed, table, packed_scale, row, first)
    return y, after, states, taps


@fast.operation("gss::mix_long_backward")
def mix_long_backward(
    grad: Tensor,
    grad_after: Tensor,
    states: Tensor,
    taps: Tensor,
    signal: Tensor,
    log_decay: Tensor,
    frequency: Tensor,
    readout: Tensor,
    exponentiated: bool,
    carried: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mix_long` with respect to the signal, the four parameters and, if `carried`, the state."""
    batch, channels, length = signal.shape
    keep_state = grad_after.numel() > 0
    row, rows, first, known = _rows(length, carried, keep_state)
    grad = contiguous(grad)
    modes, drive = modes_and_drive(log_decay, frequency, exponentiated)
    count = modes.shape[0]
    table = table_of(modes, row)
    grad_signal = convolve(grad, *spectrum(taps), transpose=True)
    grad_taps = taps_of_spectrum(correlation(signal, grad, row))
    grad_state = torch.empty(*_kept(signal, count, carried), device=signal.device)
    by_weight = by_log = None
    if rows > first or known:
        carried_sums, carried_scale = _projected(grad, table, row, rows - first, first)
        ramped, ramped_scale = _projected(grad, table, row, rows - first, first, ramp=True)
        inputs, input_scale = _projected(signal, table, row, known, reverse=True, ramp=True)
        packed, packed_scale = packed_rows(batch * channels * known, 2 * count, signal)
        partial = torch.empty(2, batch, channels, 2, count, device=signal.device)
        _pass_backward_kernel[(batch * channels,)](
            carried_sums, carried_scale, ramped, ramped_scale, inputs, input_scale, states, grad_after.contiguous(),
            grad_state, modes, drive, readout, packed, packed_scale, partial,
            channels, row, length - (rows - 1) * row, rows, known,
            **_constants(rows, count), FIRST=first, KEEP=keep_state, num_warps=4,
        )  # fmt: skip
        _add_rows(grad_signal, packed, table, packed_scale, row, reverse=True)
        by_weight = partial[0].sum(0)  # of w, per channel
        by_log = partial[1].double().sum((0, 1))  # of λ through the powers
    of_parameters = gradients_of(grad_taps, modes, drive, table, readout, exponentiated, by_weight, by_log)
    return grad_signal, *of_parameters, grad_state


@mix_long.register_fake
def _(signal, log_decay, frequency, readout, skip, exponentiated, state, keep_state):
    batch, channels, length = signal.shape
    row, rows, first, _ = _rows(length, state is not None, keep_state)
    count = log_decay.shape[0]
    after = signal.new_empty(_kept(signal, count, keep_state), dtype=torch.float32)
    states = signal.new_empty(batch * channels, rows - first, 2 * count, dtype=torch.float32)
    return torch.empty_like(signal), after, states, readout.new_empty(channels, row)


@mix_long_backward.register_fake
def _(grad, grad_after, states, taps, signal, log_decay, frequency, readout, exponentiated, carried):
    grad_state = signal.new_empty(_kept(signal, log_decay.shape[0], carried), dtype=torch.float32)
    grads = (torch.empty_like(t) for t in (signal, log_decay, frequency, readout))
    return *grads, readout.new_empty(readout.shape[0]), grad_state


def _save(ctx, inputs, output):
    *tensors, _, ctx.exponentiated, state, _ = inputs
    ctx.carried = state is not None
    ctx.save_for_backward(*output[2:], *tensors)
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx, grad, grad_after, *_):
    *grads, grad_state = mix_long_backward(grad, grad_after, *ctx.saved_tensors, ctx.exponentiated, ctx.carried)
    return *grads, None, grad_state if ctx.carried else None, None


mix_long.register_autograd(_backward, setup_context=_save)


def _rows(length: int, carried: bool, keep_state: bool) -> tuple[int, int, int, int]:
    """Samples per row, rows, the first row that has a state before it, and how many pass one on."""
    row = row_length(length)
    rows = -(-length // row)
    return row, rows, 0 if carried else 1, rows if keep_state else rows - 1


def _constants(rows: int, modes: int) -> dict[str, int]:
    """Of the kernels that pass states on; powers of two, so that few lengths need a kernel of their own."""
    return {"MOST": triton.next_power_of_2(rows), "MODES": modes, "BN": triton.next_power_of_2(modes)}


def _kept(signal: Tensor, modes: int, wanted: bool) -> tuple[int, ...]:
    """The shape of a state, or of none."""
    return (*signal.shape[:2], modes, 2) if wanted else (0,)


def _projected(
    signal: Tensor, table: Tensor, row: int, count: int, first: int = 0, reverse: bool = False, ramp: bool = False
) -> tuple[Tensor, Tensor]:
    """Σ_j x[j]·a^j of `count` rows of each channel from its `first` on, [rows, 2N] over a scale per row.

    With `reverse`, of rows read backwards; with `ramp`, weighted by j.
    """
    batch, channels, length = signal.shape
    packed, scale = packed_rows(batch * channels * count, row, signal)
    if not count:
        return packed.new_empty(0, table.shape[0], dtype=torch.float32), scale
    _pack_rows_kernel[(batch * channels * count,)](
        signal, packed, scale, length, count, first, T=row, REVERSE=reverse, RAMP=ramp, num_warps=8
    )
    return half_product(packed, table.T), scale


def _add_rows(
    target: Tensor, packed: Tensor, table: Tensor, scale: Tensor, row: int, first: int = 0, reverse: bool = False
) -> None:
    """Add packed sums over modes, as samples, to the rows of each channel of a signal, from its `first` on."""
    if not packed.shape[0]:
        return
    batch, channels, length = target.shape
    _add_rows_kernel[(packed.shape[0], triton.cdiv(row, 1024))](
        target, half_product(packed, table), scale, length, packed.shape[0] // (batch * channels), first,
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
    start = (program % count + first) * T
    own = tl.minimum(T, length - start)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = j < own
    at = target + (program // count) * length + start + (own - 1 - j if REVERSE else j)
    added = tl.load(rows + program * T + j, mask=mask, other=0.0) * tl.load(scale + program)
    tl.store(at, (tl.load(at, mask=mask, other=0.0).to(tl.float32) + added).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _power(re, im, exponent):
    """e^((re + i·im)·k) for pairs in float64, in float32."""
    turns = im * exponent * 0.15915494309189535
    angle = (turns - tl.floor(turns + 0.5)) * 6.283185307179586
    size = tl.exp(re * exponent)
    return (size * tl.cos(angle)).to(tl.float32), (size * tl.sin(angle)).to(tl.float32)


@triton.jit
def _factors(modes, drive, readout, channel, row, last, KEEP: tl.constexpr, MODES: tl.constexpr, BN: tl.constexpr):
    """a^T, the last row's a^T_r, and w = C·B̄·a of a channel's modes, float32."""
    n = tl.arange(0, BN)
    mask = n < MODES
    re, im = load_pair(modes + 2 * n, mask)
    turn_re, turn_im = _power(re, im, row)
    last_re, last_im = turn_re, turn_im
    if KEEP:
        last_re, last_im = _power(re, im, last)
    step_re, step_im = _power(re, im, 1)
    b_re, b_im = load_pair(drive + 2 * n, mask)
    c_re, c_im = load_pair(readout + (channel * MODES + n) * 2, mask)
    w_re, w_im = times(c_re, c_im, b_re.to(tl.float32), b_im.to(tl.float32))
    w_re, w_im = times(w_re, w_im, step_re, step_im)
    return turn_re, turn_im, last_re, last_im, w_re, w_im, n, mask


@triton.jit
def _load_sums(sums, scale, index, n, mask, MODES: tl.constexpr):
    """A row of sums, real parts and imaginary parts."""
    at = sums + index * 2 * MODES + n
    own = tl.load(scale + index)
    return tl.load(at, mask=mask, other=0.0) * own, tl.load(at + MODES, mask=mask, other=0.0) * own


@triton.jit
def _pass_kernel(
    sums, scale, modes, drive, readout, before, after, states, packed, packed_scale, channels, row, last, rows, known,
    MOST: tl.constexpr, FIRST: tl.constexpr, KEEP: tl.constexpr, MODES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """States at the rows' starts, w·s packed for the product that gives their output, and the state after all."""
    program = tl.program_id(0).to(tl.int64)
    turn_re, turn_im, last_re, last_im, w_re, w_im, n, mask = _factors(
        modes, drive, readout, program % channels, row, last, KEEP, MODES, BN
    )
    pair = (program * MODES + n) * 2
    re = tl.zeros((BN,), tl.float32)
    im = tl.zeros((BN,), tl.float32)
    if FIRST == 0:
        re, im = load_pair(before + pair, mask)
    for r in range(MOST):
        if (r >= FIRST) & (r < rows):
            index = program * (rows - FIRST) + r - FIRST
            at = states + index * 2 * MODES + n
            tl.store(at, re, mask=mask)
            tl.store(at + MODES, im, mask=mask)
            carried_re, carried_im = times(re, im, w_re, w_im)
            pack_row(packed, packed_scale, index, carried_re, -carried_im, n, mask, MODES)
        if r < known:
            v_re, v_im = _load_sums(sums, scale, program * known + r, n, mask, MODES)
            is_last = r == rows - 1
            re, im = times(re, im, tl.where(is_last, last_re, turn_re), tl.where(is_last, last_im, turn_im))
            re += v_re
            im += v_im
    if KEEP:
        store_pair(after + pair, re, im, mask)


@triton.jit
def _pass_backward_kernel(
    carried_sums, carried_scale, ramped, ramped_scale, inputs, input_scale, states, grad_after, grad_state,
    modes, drive, readout, packed, packed_scale, partial, channels, row, last, rows, known,
    MOST: tl.constexpr, FIRST: tl.constexpr, KEEP: tl.constexpr, MODES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The adjoint, from the last row to the first, g being the gradient with respect to the state after a row.

    Of v it is g, packed for the product that gives the signal's gradient. With P, R the sums of a carried output's
    gradient, plain and weighted by k, and Q those of the inputs weighted: by w, Σ conj(P·s); by the state before the
    row, conj(a^T_r)·g + conj(P·w); by λ, Σ T_r·conj(a^T_r·s)·g + g·conj(Q) + conj(w·s·R).
    """
    program = tl.program_id(0).to(tl.int64)
    turn_re, turn_im, last_re, last_im, w_re, w_im, n, mask = _factors(
        modes, drive, readout, program % channels, row, last, KEEP, MODES, BN
    )
    pair = (program * MODES + n) * 2
    g_re = tl.zeros((BN,), tl.float32)
    g_im = tl.zeros((BN,), tl.float32)
    if KEEP:
        g_re, g_im = load_pair(grad_after + pair, mask)
    by_w_re = tl.zeros((BN,), tl.float32)
    by_w_im = tl.zeros((BN,), tl.float32)
    by_log_re = tl.zeros((BN,), tl.float32)
    by_log_im = tl.zeros((BN,), tl.float32)
    for step in range(MOST):
        r = MOST - 1 - step
        carries = (r >= FIRST) & (r < rows)
        carried_row = program * (rows - FIRST) + r - FIRST
        s_re = tl.load(states + carried_row * 2 * MODES + n, mask=mask & carries, other=0.0)
        s_im = tl.load(states + carried_row * 2 * MODES + MODES + n, mask=mask & carries, other=0.0)
        if r < known:
            index = program * known + r
            pack_row(packed, packed_scale, index, g_re, g_im, n, mask, MODES)
            q_re, q_im = _load_sums(inputs, input_scale, index, n, mask, MODES)
            re, im = times(g_re, g_im, q_re, -q_im)
            by_log_re += re
            by_log_im += im
            is_last = r == rows - 1
            g_re, g_im = times(g_re, g_im, tl.where(is_last, last_re, turn_re), -tl.where(is_last, last_im, turn_im))
            re, im = times(g_re, g_im, s_re, -s_im)
            own = tl.where(is_last, last, row)
            by_log_re += re * own
            by_log_im += im * own
        if carries:
            p_re, p_im = _load_sums(carried_sums, carried_scale, carried_row, n, mask, MODES)
            re, im = times(p_re, p_im, w_re, w_im)
            g_re += re
            g_im -= im
            re, im = times(p_re, p_im, s_re, s_im)
            by_w_re += re
            by_w_im -= im
            r_re, r_im = _load_sums(ramped, ramped_scale, carried_row, n, mask, MODES)
            re, im = times(s_re, s_im, w_re, w_im)
            re, im = times(re, im, r_re, r_im)
            by_log_re += re
            by_log_im -= im
    if FIRST == 0:
        store_pair(grad_state + pair, g_re, g_im, mask)
    out = partial + program * 2 * MODES + n
    plane = tl.num_programs(0).to(tl.int64) * 2 * MODES
    tl.store(out, by_w_re, mask=mask)
    tl.store(out + MODES, by_w_im, mask=mask)
    tl.store(out + plane, by_log_re, mask=mask)
    tl.store(out + plane + MODES, by_log_im, mask=mask)
