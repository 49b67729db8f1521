"""A piece of a long signal read on from a state, without gradients: what evaluation and prompts run on.

The forward of `gss.ops.gpu.long` with a state before the first row and one after the last, which may be short.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops.gpu.fft import convolve, row_length, spectrum
from gss.ops.gpu.long import add_rows, factors, load_sums, power, projected, room, rows_of, times
from gss.ops.gpu.powers import largest_of, table_of
from gss.ops.gpu.taps import from_modes, half_product, modes_and_drive


@torch.library.custom_op("gss::read_on", mutates_args=())
def read_on(
    signal: Tensor,
    log_decay: Tensor,
    frequency: Tensor,
    readout: Tensor,
    skip: Tensor,
    exponentiated: bool,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y = D·u + K∗u for u [B, H, L] of 16 bits, going on from a state [B, H, N, 2] (None: zeros); and the next one."""
    batch, channels, length = signal.shape
    row = row_length(length)
    rows = rows_of(length, row)
    modes, drive = modes_and_drive(log_decay, frequency, exponentiated)
    count = modes.shape[0]
    table = table_of(modes, row)[0]
    y = convolve(signal, *spectrum(from_modes(drive, table, readout, skip)))
    sums, scale = projected(signal, table, row, rows, reverse=True)
    first = 1 if state is None else 0  # the first row that hears of what was before it
    packed, packed_scale = room(batch * channels * (rows - first), 2 * count, signal)
    after = torch.empty(batch, channels, count, 2, device=signal.device)
    _read_kernel[(batch * channels,)](
        sums, scale, modes, drive, readout, None if state is None else state.contiguous(), after, packed, packed_scale,
        channels, row, length - (rows - 1) * row, rows,
        MOST=triton.next_power_of_2(rows), FIRST=first, MODES=count, BN=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    if rows > first:
        add_rows(y, half_product(packed, table), packed_scale, row, first)
    return y, after


@read_on.register_fake
def _(signal, log_decay, frequency, readout, skip, exponentiated, state):
    after = signal.new_empty(*signal.shape[:2], log_decay.shape[0], 2, dtype=torch.float32)
    return torch.empty_like(signal), after


@triton.jit
def _read_kernel(
    sums, scale, modes, drive, readout, before, after, packed, packed_scale, channels, row, last, rows,
    MOST: tl.constexpr, FIRST: tl.constexpr, MODES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The states at the rows' starts, each packed with w for the product that gives its echo; then the one after."""
    program = tl.program_id(0).to(tl.int64)
    turn_re, turn_im, w_re, w_im, n, mask = factors(modes, drive, readout, program % channels, row, MODES, BN)
    log_re = tl.load(modes + 2 * n, mask=mask, other=0.0)
    log_im = tl.load(modes + 2 * n + 1, mask=mask, other=0.0)
    last_re, last_im = power(log_re, log_im, last)
    pair = (program * MODES + n) * 2
    if FIRST == 0:
        re = tl.load(before + pair, mask=mask, other=0.0)
        im = tl.load(before + pair + 1, mask=mask, other=0.0)
    else:
        re = tl.zeros((BN,), tl.float32)
        im = tl.zeros((BN,), tl.float32)
    for r in range(MOST):  # a power of two, so that few lengths need a kernel of their own
        if (r >= FIRST) & (r < rows):
            index = program * (rows - FIRST) + r - FIRST
            echo_re, echo_im = times(re, im, w_re, w_im)
            largest = largest_of(echo_re, echo_im)
            at = packed + index * 2 * MODES + n
            tl.store(at, (echo_re / largest).to(tl.float16), mask=mask)
            tl.store(at + MODES, (-echo_im / largest).to(tl.float16), mask=mask)
            tl.store(packed_scale + index, largest)
        if r < rows:
            v_re, v_im = load_sums(sums, scale, program * rows + r, n, mask, MODES)
            is_last = r == rows - 1
            re, im = times(re, im, tl.where(is_last, last_re, turn_re), tl.where(is_last, last_im, turn_im))
            re += v_re
            im += v_im
    tl.store(after + pair, re, mask=mask)
    tl.store(after + pair + 1, im, mask=mask)
