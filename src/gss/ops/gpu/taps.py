"""From the parameters of a state space to its kernel in a handful of launches: the fast path of `gss.ops.state_space`.

Only for the paper's form (unit step, zero-order hold). The general path consists of a hundred small operations on
complex numbers, forward and backward, and on a GPU a small operation costs as much as its launch. Here each direction
is one matrix product with 16-bit operands between two or three kernels that do the rest, with the modes in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops.gpu.powers import largest_of, load_pair, pack_row, packed_rows, store_pair, times


def modes_and_drive(log_decay: Tensor, frequency: Tensor, exponentiated: bool) -> tuple[Tensor, Tensor]:
    """λ and B̄ as pairs [N, 2] in float64."""
    count = log_decay.numel()
    modes, drive = (torch.empty(count, 2, dtype=torch.float64, device=log_decay.device) for _ in range(2))
    _modes_kernel[(triton.cdiv(count, 128),)](
        log_decay, frequency, modes, drive, count, EXPONENTIATED=exponentiated, BLOCK=128, num_warps=4
    )
    return modes, drive


def from_modes(drive: Tensor, table: Tensor, readout: Tensor, skip: Tensor) -> Tensor:
    """K [H, T] with D in its first tap, float32, from B̄, a table of the powers of Ā and parameters as in
    `gss.nn.state_space`.
    """
    channels, modes, _ = readout.shape
    packed, scale = packed_rows(channels, 2 * modes, readout)
    _pack_modes_kernel[(channels,)](readout, drive, packed, scale, modes, BN=triton.next_power_of_2(modes), num_warps=4)
    out = half_product(packed, table).mul_(scale.unsqueeze(-1))
    out[:, 0] += skip
    return out


def gradients_of(
    grad: Tensor,
    modes: Tensor,
    drive: Tensor,
    table: Tensor,
    readout: Tensor,
    exponentiated: bool,
    by_weight: Tensor | None = None,
    by_log: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the four parameters from the taps' gradient [H, T], and where states are carried as well from
    those with respect to w = C·B̄·Ā [H, 2, N] and to λ itself [2, N].
    """
    channels, length = grad.shape
    count = modes.shape[0]
    packed, scale = packed_rows(2 * channels, length, grad)
    _pack_ramp_kernel[(2 * channels,)](
        grad, packed, scale, channels, length, BL=triton.next_power_of_2(length), num_warps=8
    )
    sums = half_product(packed, table.T)
    grad_readout = torch.empty_like(readout)
    grad_decay, grad_frequency = (readout.new_empty(count) for _ in range(2))
    block = 8
    _gradients_kernel[(triton.cdiv(count, block),)](
        sums, scale, readout, modes, drive, by_weight, by_log, grad_readout, grad_decay, grad_frequency,
        count, CHANNELS=channels, EXPONENTIATED=exponentiated, BN=block, BH=128, num_warps=4,
    )  # fmt: skip
    return grad_decay, grad_frequency, grad_readout, grad[:, 0].clone()


def half_product(left: Tensor, right: Tensor) -> Tensor:
    """In float32, of float16 operands."""
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


@triton.jit
def _modes_kernel(log_decay, frequency, modes, drive, count, EXPONENTIATED: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < count
    re = -tl.exp(tl.load(log_decay + n, mask=mask, other=0.0).to(tl.float64))
    im = tl.load(frequency + n, mask=mask, other=0.0).to(tl.float64)
    if EXPONENTIATED:
        im = tl.exp(im)
    decay = tl.exp(re)
    half = tl.sin(0.5 * im)
    top_re = (decay - 1.0) * tl.cos(im) - 2.0 * half * half  # e^λ − 1, without the cancellation at small angles
    top_im = decay * tl.sin(im)
    size = re * re + im * im
    still = size == 0.0  # the limit of (e^λ − 1)/λ is 1
    size = tl.where(still, 1.0, size)
    store_pair(modes + 2 * n, re, im, mask)
    drive_re = tl.where(still, 1.0, (top_re * re + top_im * im) / size)
    store_pair(drive + 2 * n, drive_re, (top_im * re - top_re * im) / size, mask)


@triton.jit
def _pack_modes_kernel(weights, factor, packed, scale, MODES: tl.constexpr, BN: tl.constexpr):
    """C·B̄ of a channel: real parts, then negated imaginary parts, in float16 over the largest of them."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    mask = n < MODES
    re, im = load_pair(weights + (row * MODES + n) * 2, mask)
    f_re, f_im = load_pair(factor + n * 2, mask)
    re, im = times(re, im, f_re.to(tl.float32), f_im.to(tl.float32))
    pack_row(packed, scale, row, re, -im, n, mask, MODES)


@triton.jit
def _pack_ramp_kernel(values, packed, scale, rows, length, BL: tl.constexpr):
    """Rows of real numbers, then the same weighted by k, in float16 over each row's largest."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BL)
    v = tl.load(values + (row % rows) * length + k, mask=k < length, other=0.0)
    v = tl.where(row < rows, v, v * k.to(tl.float32))
    largest = largest_of(v, v)
    tl.store(packed + row * length + k, (v / largest).to(tl.float16), mask=k < length)
    tl.store(scale + row, largest)


@triton.jit
def _gradients_kernel(
    sums, scale, readout, modes, drive, by_weight, by_log, grad_readout, grad_decay, grad_frequency,
    count, CHANNELS: tl.constexpr, EXPONENTIATED: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """With P = Σ g_k a^k and R = Σ k·g_k a^k per channel: by C, conj(P·B̄); by B̄ and by log Ā, sums over channels."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    exists = n < count
    b_re, b_im = load_pair(drive + 2 * n, exists)
    re, im = load_pair(modes + 2 * n, exists)
    a_re, a_im = times(re, im, b_re, b_im)  # e^λ = 1 + λ·B̄
    a_re += 1.0
    by_drive_re = tl.zeros((BH, BN), tl.float32)
    by_drive_im = tl.zeros((BH, BN), tl.float32)
    by_log_re = tl.zeros((BH, BN), tl.float32)
    by_log_im = tl.zeros((BH, BN), tl.float32)
    f_re, f_im = b_re.to(tl.float32)[None, :], b_im.to(tl.float32)[None, :]
    e_re, e_im = a_re.to(tl.float32)[None, :], a_im.to(tl.float32)[None, :]
    for start in range(0, CHANNELS, BH):
        h = start + tl.arange(0, BH)
        mask = (h < CHANNELS)[:, None] & exists[None, :]
        at = h[:, None] * 2 * count + n[None, :]
        own = tl.load(scale + h, mask=h < CHANNELS, other=0.0)[:, None]
        ramp = tl.load(scale + CHANNELS + h, mask=h < CHANNELS, other=0.0)[:, None]
        below = sums + CHANNELS * 2 * count
        # By C·B̄: conj(P), and through the carried states its part of w.
        g_re = tl.load(sums + at, mask=mask, other=0.0) * own
        g_im = -tl.load(sums + at + count, mask=mask, other=0.0) * own
        r_re = tl.load(below + at, mask=mask, other=0.0) * ramp
        r_im = tl.load(below + at + count, mask=mask, other=0.0) * ramp
        pair = (h[:, None] * count + n[None, :]) * 2
        c_re, c_im = load_pair(readout + pair, mask)
        w_re, w_im = times(c_re, c_im, f_re, f_im)
        log_re, log_im = times(w_re, w_im, r_re, r_im)
        by_log_re += log_re
        by_log_im -= log_im
        if by_weight is not None:
            v_re = tl.load(by_weight + at, mask=mask, other=0.0)
            v_im = tl.load(by_weight + at + count, mask=mask, other=0.0)
            v_re, v_im = times(v_re, v_im, e_re, -e_im)
            g_re += v_re
            g_im += v_im
            log_re, log_im = times(v_re, v_im, w_re, -w_im)
            by_log_re += log_re
            by_log_im += log_im
        out_re, out_im = times(g_re, g_im, f_re, -f_im)
        store_pair(grad_readout + pair, out_re, out_im, mask)
        out_re, out_im = times(g_re, g_im, c_re, -c_im)
        by_drive_re += out_re
        by_drive_im += out_im
    drive_re = tl.sum(by_drive_re, 0).to(tl.float64)
    drive_im = tl.sum(by_drive_im, 0).to(tl.float64)
    # dB̄/dλ = (e^λ − B̄)/λ, ½ at λ = 0
    still = (re == 0.0) & (im == 0.0)
    size = tl.where(still, 1.0, re * re + im * im)
    slope_re, slope_im = times(a_re - b_re, a_im - b_im, re / size, -im / size)
    slope_re = tl.where(still, 0.5, slope_re)
    total_re, total_im = times(drive_re, drive_im, slope_re, -slope_im)
    total_re += tl.sum(by_log_re, 0)
    total_im += tl.sum(by_log_im, 0)
    if by_log is not None:
        total_re += tl.load(by_log + n, mask=exists, other=0.0)
        total_im += tl.load(by_log + count + n, mask=exists, other=0.0)
    if EXPONENTIATED:
        total_im = total_im * im
    tl.store(grad_decay + n, (total_re * re).to(grad_decay.dtype.element_ty), mask=exists)
    tl.store(grad_frequency + n, total_im.to(grad_frequency.dtype.element_ty), mask=exists)
