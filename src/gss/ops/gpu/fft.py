"""Causal convolution in one pass over the signal: the fast path of `gss.ops.convolution` in reduced precision.

An FFT library writes and reads the signal's spectrum in float32 several times over. Here one program takes a whole
row, transforms it, multiplies, transforms it back and writes it once. The transforms are matrix products on tensor
cores: a DFT of size N = N₁·N₂, its points laid out as an N₁×N₂ matrix, is a product with the DFT matrix of size N₁
from the left, a twiddle factor a point, and a product with the one of size N₂ from the right. Both halves of the
work are 64 to 128 wide, so a row of 4,096 (zero-padded to 8,192) costs 10 million operations each way.

Two rows of a channel are transformed as the real and the imaginary part of one complex row; the kernel is real, so
they come out apart again. Operands of the products are float16 scaled by the row's own maximum, sums are float32:
the error is that of float16, an eighth of bfloat16's.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 4096
"""Longest row that one program holds."""

WARPS = 8

_N1 = 64
_SHORTEST = 512


def row_length(length: int) -> int:
    """The length of row to cut a signal into: a power of two that the kernels have."""
    return min(LONGEST, max(_SHORTEST, triton.next_power_of_2(length)))


def spectrum(taps: Tensor) -> Tensor:
    """The transform of kernels [H, T], padded to 2T, as the convolution reads it: [H, 2, N₁, N₂] float32."""
    channels, row = taps.shape
    bins = torch.fft.fft(taps, n=2 * row).view(channels, -1, _N1)  # bin k₁ + N₁·k₂ at [k₂, k₁]
    return torch.view_as_real(bins).permute(0, 3, 2, 1).contiguous()


def taps_of_spectrum(planes: Tensor) -> Tensor:
    """The first half of the real signal with these bins [H, 2, N₁, N₂], the inverse of `spectrum`: [H, T]."""
    bins = torch.view_as_complex(planes.permute(0, 3, 2, 1).contiguous()).flatten(1)
    return torch.fft.ifft(bins).real[:, : bins.shape[1] // 2].contiguous()


def convolve(signal: Tensor, planes: Tensor, *, transpose: bool = False) -> Tensor:
    """Each row of T taps of a signal [B, H, L] convolved causally with its channel's kernel, from zero at its start.

    `planes` is the kernels' `spectrum`. With `transpose`, correlated instead: the adjoint, which is the gradient.
    """
    batch, channels, length = signal.shape
    tables = _tables(planes.shape[-1], signal.device)
    row = planes.shape[-1] * _N1 // 2
    rows = batch * triton.cdiv(length, row)
    out = torch.empty_like(signal)
    _convolve_kernel[(channels, triton.cdiv(rows, 2))](
        signal, planes, out, *tables,
        rows, length, triton.cdiv(length, row), channels,
        N1=_N1, N2=planes.shape[-1], CONJUGATE=transpose, num_warps=WARPS,
    )  # fmt: skip
    return out


def correlation(signal: Tensor, grad: Tensor, row: int) -> Tensor:
    """The gradient of the kernels' spectra, summed over rows: [H, 2, N₁, N₂]."""
    batch, channels, length = signal.shape
    n2 = 2 * row // _N1
    tables = _tables(n2, signal.device)
    rows = batch * triton.cdiv(length, row)
    pairs = triton.cdiv(rows, 2)
    splits = max(1, min(pairs, 512 // channels))
    out = torch.empty(splits, channels, 2, _N1, n2, device=signal.device, dtype=torch.float32)
    _correlate_kernel[(channels, splits)](
        signal, grad, out, *tables,
        rows, length, triton.cdiv(length, row), channels,
        PAIRS=triton.cdiv(pairs, splits), N1=_N1, N2=n2, num_warps=WARPS,
    )  # fmt: skip
    return out.sum(0) if splits > 1 else out[0]


@functools.lru_cache(maxsize=32)
def _tables(n2: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The DFT matrices and twiddle factors for rows of 64·n2/2 taps.

    first    [2, N₁, N₁]  real and imaginary part of F₁ on the stacked (real; imaginary) half-rows
    last     [2, N₁, N₁]  the stacked half-rows from the real and from the imaginary part, by F₁'s conjugate
    middle   [2, N₂, N₂]  F₂'s real and imaginary part
    twiddle  [2, N₁, N₂]
    """
    n1, half = _N1, _N1 // 2
    points = torch.arange(max(n1, n2), dtype=torch.float64)

    def rotation(left: Tensor, right: Tensor, size: int) -> tuple[Tensor, Tensor]:
        angle = -2 * math.pi * (torch.outer(left, right) % size) / size
        return angle.cos(), angle.sin()

    cos, sin = rotation(points[:n1], points[:half], n1)  # [k₁, n₁]
    first = torch.stack([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
    last = torch.stack([torch.cat([cos.T, -sin.T]), torch.cat([sin.T, cos.T])])
    middle = torch.stack(rotation(points[:n2], points[:n2], n2))
    twiddle = torch.stack(rotation(points[:n1], points[:n2], n1 * n2))
    first, last, middle = (table.to(device, torch.float16).contiguous() for table in (first, last, middle))
    return first, last, middle, twiddle.to(device, torch.float32).contiguous()


@triton.jit
def _offsets(n1: tl.constexpr, n2: tl.constexpr):
    return tl.arange(0, n1)[:, None] * n2 + tl.arange(0, n2)[None, :]


@triton.jit
def _load_pair(signal, channel, pair, rows, length, chunks, channels, N1: tl.constexpr, N2: tl.constexpr):
    """Rows 2·pair and 2·pair + 1 of a channel, one above the other, scaled to a maximum of 1; where they lie."""
    half: tl.constexpr = N1 // 2
    i = tl.arange(0, N1)
    row = 2 * pair + i // half
    start = (row % chunks) * half * N2
    position = (start + (i % half) * N2)[:, None] + tl.arange(0, N2)[None, :]
    base = ((row // chunks).to(tl.int64) * channels + channel) * length
    where = base[:, None] + position
    mask = (row < rows)[:, None] & (position < length)
    z = tl.load(signal + where, mask=mask, other=0.0).to(tl.float32)
    peak = tl.max(tl.max(tl.abs(z), 1), 0)
    peak = tl.where(peak > 0, peak, 1.0)
    return (z / peak).to(tl.float16), peak, where, mask


@triton.jit
def _forward_transform(z, first, middle, twiddle, N1: tl.constexpr, N2: tl.constexpr):
    """The bins [k₁, k₂] of a stacked pair of half-rows: real and imaginary part."""
    square = _offsets(N1, N1)
    tile = _offsets(N1, N2)
    re = tl.dot(tl.load(first + square), z)
    im = tl.dot(tl.load(first + N1 * N1 + square), z)
    cos = tl.load(twiddle + tile)
    sin = tl.load(twiddle + N1 * N2 + tile)
    turned_re = (re * cos - im * sin).to(tl.float16)
    turned_im = (re * sin + im * cos).to(tl.float16)
    wide = _offsets(N2, N2)
    cos2 = tl.load(middle + wide)
    sin2 = tl.load(middle + N2 * N2 + wide)
    re = tl.dot(turned_im, -sin2, tl.dot(turned_re, cos2))
    im = tl.dot(turned_im, cos2, tl.dot(turned_re, sin2))
    return re, im


@triton.jit
def _convolve_kernel(
    signal, planes, out, first, last, middle, twiddle,
    rows, length, chunks, channels,
    N1: tl.constexpr, N2: tl.constexpr, CONJUGATE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    pair = tl.program_id(1)
    z, peak, where, mask = _load_pair(signal, channel, pair, rows, length, chunks, channels, N1, N2)
    re, im = _forward_transform(z, first, middle, twiddle, N1, N2)
    tile = _offsets(N1, N2)
    bins = planes + channel.to(tl.int64) * 2 * N1 * N2 + tile
    kernel_re = tl.load(bins)
    kernel_im = tl.load(bins + N1 * N2)
    if CONJUGATE:
        kernel_im = -kernel_im
    product_re = re * kernel_re - im * kernel_im
    product_im = re * kernel_im + im * kernel_re
    largest = tl.max(tl.max(tl.maximum(tl.abs(product_re), tl.abs(product_im)), 1), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    scaled_re = (product_re / largest).to(tl.float16)
    scaled_im = (product_im / largest).to(tl.float16)
    wide = _offsets(N2, N2)
    cos2 = tl.load(middle + wide)
    sin2 = tl.load(middle + N2 * N2 + wide)
    re = tl.dot(scaled_im, sin2, tl.dot(scaled_re, cos2))  # by the conjugate
    im = tl.dot(scaled_re, -sin2, tl.dot(scaled_im, cos2))
    cos = tl.load(twiddle + tile)
    sin = tl.load(twiddle + N1 * N2 + tile)
    back_re = (re * cos + im * sin).to(tl.float16)
    back_im = (im * cos - re * sin).to(tl.float16)
    square = _offsets(N1, N1)
    y = tl.dot(tl.load(last + square), back_re)
    y = tl.dot(tl.load(last + N1 * N1 + square), back_im, y)
    y = y * (peak * largest / (N1 * N2))
    tl.store(out + where, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _correlate_kernel(
    signal, grad, out, first, last, middle, twiddle,
    rows, length, chunks, channels,
    PAIRS: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    split = tl.program_id(1)
    sum_re = tl.zeros((N1, N2), tl.float32)
    sum_im = tl.zeros((N1, N2), tl.float32)
    for i in range(PAIRS):
        pair = split * PAIRS + i
        u, u_peak, _, _ = _load_pair(signal, channel, pair, rows, length, chunks, channels, N1, N2)
        u_re, u_im = _forward_transform(u, first, middle, twiddle, N1, N2)
        g, g_peak, _, _ = _load_pair(grad, channel, pair, rows, length, chunks, channels, N1, N2)
        g_re, g_im = _forward_transform(g, first, middle, twiddle, N1, N2)
        scale = u_peak * g_peak
        sum_re += (u_re * g_re + u_im * g_im) * scale
        sum_im += (u_re * g_im - u_im * g_re) * scale
    bins = out + (split.to(tl.int64) * channels + channel) * 2 * N1 * N2 + _offsets(N1, N2)
    tl.store(bins, sum_re)
    tl.store(bins + N1 * N2, sum_im)
