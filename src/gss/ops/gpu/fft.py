"""Causal convolution in one pass over the signal: the fast path of `gss.ops.state_space` in reduced precision.

An FFT library writes and reads the signal's spectrum in float32 several times. Here, one program takes a whole row,
transforms it, multiplies, transforms it back and writes it once. The transforms are matrix products on tensor cores: a
DFT of size N = N₁·N₂, with its points laid out as an N₁×N₂ matrix, is a product with the DFT matrix of size N₁ from the
left, a twiddle factor per point, and a product with the DFT matrix of size N₂ from the right. The second product takes
a few columns at a time. Each slice of the spectrum is immediately multiplied by the kernel's bins and added to the sums
of the inverse, as flash attention does with keys and values, so the whole spectrum never exists.

Two rows of a channel are transformed as the real and imaginary parts of one complex row; the kernel is real, so they
come out separately. Operands of the products are float16, scaled by the row's maximum (and the kernel's bins by
theirs), and sums are float32. The error is that of float16, an eighth of bfloat16's.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops import fast
from gss.ops.gpu.transpose import contiguous

LONGEST = 4096
"""Longest row that one program holds."""

OPTIONS = {"SLICE": 32, "num_stages": 2}

_SHORTEST = 512


def row_length(length: int) -> int:
    """The length of row to cut a signal into: a power of two that the kernels have."""
    return min(LONGEST, max(_SHORTEST, triton.next_power_of_2(length)))


def _shape(row: int) -> tuple[int, int]:
    """(N₁, N₂) for rows of that many samples, padded to twice as many."""
    return (128, row // 64) if row >= 4096 else (64, row // 32)


def spectrum(taps: Tensor) -> tuple[Tensor, Tensor]:
    """The transform of kernels [H, T] padded to 2T, as the convolution reads it.

    Bins [H, 2, N₁, N₂] float32, bin k₁ + N₁·k₂ at [k₁, k₂], divided by each channel's largest; and the largest [H].
    """
    channels, row = taps.shape
    bins = torch.fft.rfft(taps, n=2 * row)
    largest = torch.view_as_real(bins).abs().amax((1, 2)).clamp(min=1e-30)
    n1, n2 = _shape(row)
    planes = torch.empty(channels, 2, n1, n2, device=taps.device)
    _pack_kernel[(channels, n1)](torch.view_as_real(bins), largest, planes, row + 1, N1=n1, N2=n2, num_warps=1)
    return planes, largest


def taps_of_spectrum(planes: Tensor) -> Tensor:
    """The first half of the real part of the signal with these bins [H, 2, N₁, N₂]: [H, T]."""
    channels, _, n1, n2 = planes.shape
    row = n1 * n2 // 2
    bins = torch.empty(channels, row + 1, 2, device=planes.device)
    block = 512
    _unpack_kernel[(channels, triton.cdiv(row + 1, block))](planes, bins, row + 1, N1=n1, N2=n2, BLOCK=block)
    return torch.fft.irfft(torch.view_as_complex(bins), n=2 * row)[:, :row].contiguous()


def convolve(signal: Tensor, planes: Tensor, largest: Tensor, *, transpose: bool = False) -> Tensor:
    """Each row of T samples of a signal [B, H, L] convolved causally with its channel's kernel, from zero at its start.

    `planes` and `largest` are the kernels' `spectrum`. With `transpose`, correlated instead: the adjoint.
    """
    batch, channels, length = signal.shape
    n1, n2 = planes.shape[-2:]
    row = n1 * n2 // 2
    rows = batch * triton.cdiv(length, row)
    out = torch.empty_like(signal)
    _convolve_kernel[(channels, triton.cdiv(rows, 2))](
        signal, planes, largest, out, *_tables(n1, n2, signal.device),
        rows, length, triton.cdiv(length, row), channels,
        N1=n1, N2=n2, CONJUGATE=transpose, **_fitting(n1, n2),
    )  # fmt: skip
    return out


def correlation(signal: Tensor, grad: Tensor, row: int) -> Tensor:
    """The gradient of the kernels' spectra, summed over rows: [H, 2, N₁, N₂]."""
    batch, channels, length = signal.shape
    n1, n2 = _shape(row)
    rows = batch * triton.cdiv(length, row)
    pairs = triton.cdiv(rows, 2)
    options = _fitting(n1, n2)
    slices = n2 // options["SLICE"]
    splits = max(1, min(pairs, 512 // (channels * slices)))
    out = torch.empty(splits, channels, 2, n1, n2, device=signal.device, dtype=torch.float32)
    _correlate_kernel[(channels, slices, splits)](
        signal, grad, out, *_tables(n1, n2, signal.device),
        rows, length, triton.cdiv(length, row), channels,
        PAIRS=triton.cdiv(pairs, splits), N1=n1, N2=n2, **options,
    )  # fmt: skip
    return out.sum(0) if splits > 1 else out[0]


@fast.operation("gss::convolve_rows")
def convolve_rows(signal: Tensor, taps: Tensor) -> Tensor:
    """Each row of T samples of a signal [B, H, L], convolved with the taps [H, T] of its channel."""
    return convolve(signal, *spectrum(taps))


@fast.operation("gss::convolve_rows_backward")
def convolve_rows_backward(grad: Tensor, signal: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `convolve_rows` with respect to the signal and the taps."""
    grad = contiguous(grad)
    grad_signal = convolve(grad, *spectrum(taps), transpose=True)
    return grad_signal, taps_of_spectrum(correlation(signal, grad, taps.shape[1]))


@convolve_rows.register_fake
def _(signal, taps):
    return torch.empty_like(signal)


@convolve_rows_backward.register_fake
def _(grad, signal, taps):
    return torch.empty_like(signal), torch.empty_like(taps)


def _backward(ctx, grad):
    return convolve_rows_backward(grad, *ctx.saved_tensors)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


convolve_rows.register_autograd(_backward, setup_context=_save)


def _fitting(n1: int, n2: int) -> dict[str, int]:
    """Four warps for 64 rows of a tile: a tensor core's instruction takes that many."""
    return {**OPTIONS, "SLICE": min(OPTIONS["SLICE"], n2), "num_warps": n1 // 16}


@functools.lru_cache(maxsize=32)
def _tables(n1: int, n2: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The DFT matrices and twiddle factors for rows of n1·n2/2 samples.

    first    [2, N₁, N₁]  real and imaginary part of F₁ on the stacked (real; imaginary) half-rows
    last     [2, N₁, N₁]  the stacked half-rows from the real and from the imaginary part, by F₁'s conjugate
    middle   [2, N₂, N₂]  F₂'s real and imaginary part
    twiddle  [2, N₁, N₂]
    """
    half = n1 // 2
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
def _pack_kernel(bins, largest, planes, count, N1: tl.constexpr, N2: tl.constexpr):
    """From the bins of a real signal, up to the middle one, to all of them in the convolution's order."""
    channel = tl.program_id(0)
    k1 = tl.program_id(1)
    k2 = tl.arange(0, N2)
    k = k1 + N1 * k2
    mirrored = k >= count
    at = bins + (channel.to(tl.int64) * count + tl.where(mirrored, N1 * N2 - k, k)) * 2
    scale = 1.0 / tl.load(largest + channel)
    out = planes + ((channel.to(tl.int64) * 2) * N1 + k1) * N2 + k2
    imaginary = tl.load(at + 1) * scale
    tl.store(out, tl.load(at) * scale)
    tl.store(out + N1 * N2, tl.where(mirrored, -imaginary, imaginary))


@triton.jit
def _unpack_kernel(planes, bins, count, N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr):
    """The bins of the real part of a complex signal: half the sum of each and its mirror's conjugate."""
    channel = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < count
    mirror = (N1 * N2 - k) % (N1 * N2)
    base = planes + channel.to(tl.int64) * 2 * N1 * N2
    here = base + (k % N1) * N2 + k // N1
    there = base + (mirror % N1) * N2 + mirror // N1
    re = tl.load(here, mask=mask, other=0.0) + tl.load(there, mask=mask, other=0.0)
    im = tl.load(here + N1 * N2, mask=mask, other=0.0) - tl.load(there + N1 * N2, mask=mask, other=0.0)
    out = bins + (channel.to(tl.int64) * count + k) * 2
    tl.store(out, 0.5 * re, mask=mask)
    tl.store(out + 1, 0.5 * im, mask=mask)


@triton.jit
def _offsets(n1: tl.constexpr, n2: tl.constexpr, stride: tl.constexpr):
    return tl.arange(0, n1)[:, None] * stride + tl.arange(0, n2)[None, :]


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
    peak = tl.maximum(tl.max(tl.max(tl.abs(z), 1), 0), 1e-30)  # below 2^-128 its reciprocal would be infinite
    return (z * (1.0 / peak)).to(tl.float16), peak, where, mask


@triton.jit
def _first_half(z, first, twiddle, N1: tl.constexpr, N2: tl.constexpr):
    """The transform of a stacked pair of half-rows up to the twiddle factors: [k₁, n₂], real and imaginary part."""
    square = _offsets(N1, N1, N1)
    tile = _offsets(N1, N2, N2)
    re = tl.dot(tl.load(first + square), z)
    im = tl.dot(tl.load(first + N1 * N1 + square), z)
    cos = tl.load(twiddle + tile)
    sin = tl.load(twiddle + N1 * N2 + tile)
    return (re * cos - im * sin).to(tl.float16), (re * sin + im * cos).to(tl.float16)


@triton.jit
def _convolve_kernel(
    signal, planes, largest, out, first, last, middle, twiddle,
    rows, length, chunks, channels,
    N1: tl.constexpr, N2: tl.constexpr, CONJUGATE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    pair = tl.program_id(1)
    z, peak, where, mask = _load_pair(signal, channel, pair, rows, length, chunks, channels, N1, N2)
    turned_re, turned_im = _first_half(z, first, twiddle, N1, N2)
    bins = planes + channel.to(tl.int64) * 2 * N1 * N2 + _offsets(N1, SLICE, N2)
    columns = middle + _offsets(N2, SLICE, N2)
    lines = middle + _offsets(SLICE, N2, N2)
    back_re = tl.zeros((N1, N2), tl.float32)
    back_im = tl.zeros((N1, N2), tl.float32)
    for start in range(0, N2, SLICE):
        cos = tl.load(columns + start)
        sin = tl.load(columns + N2 * N2 + start)
        re = tl.dot(turned_re, cos) - tl.dot(turned_im, sin)
        im = tl.dot(turned_im, cos, tl.dot(turned_re, sin))
        kernel_re = tl.load(bins + start)
        kernel_im = tl.load(bins + N1 * N2 + start)
        if CONJUGATE:
            kernel_im = -kernel_im
        product_re = (re * kernel_re - im * kernel_im).to(tl.float16)
        product_im = (re * kernel_im + im * kernel_re).to(tl.float16)
        cos = tl.load(lines + start * N2)
        sin = tl.load(lines + N2 * N2 + start * N2)
        back_re = tl.dot(product_im, sin, tl.dot(product_re, cos, back_re))  # by the conjugate
        back_im = tl.dot(-product_re, sin, tl.dot(product_im, cos, back_im))
    tile = _offsets(N1, N2, N2)
    cos = tl.load(twiddle + tile) * (1.0 / N2)
    sin = tl.load(twiddle + N1 * N2 + tile) * (1.0 / N2)
    turned_re = (back_re * cos + back_im * sin).to(tl.float16)
    turned_im = (back_im * cos - back_re * sin).to(tl.float16)
    square = _offsets(N1, N1, N1)
    y = tl.dot(tl.load(last + square), turned_re)
    y = tl.dot(tl.load(last + N1 * N1 + square), turned_im, y)
    y = y * (peak * tl.load(largest + channel) / N1)
    tl.store(out + where, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _correlate_kernel(
    signal, grad, out, first, last, middle, twiddle,
    rows, length, chunks, channels,
    PAIRS: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    start = tl.program_id(1) * SLICE
    split = tl.program_id(2)
    columns = middle + start + _offsets(N2, SLICE, N2)
    cos = tl.load(columns)
    sin = tl.load(columns + N2 * N2)
    sum_re = tl.zeros((N1, SLICE), tl.float32)
    sum_im = tl.zeros((N1, SLICE), tl.float32)
    for i in range(PAIRS):
        pair = split * PAIRS + i
        u, u_peak, _, _ = _load_pair(signal, channel, pair, rows, length, chunks, channels, N1, N2)
        re, im = _first_half(u, first, twiddle, N1, N2)
        u_re = tl.dot(re, cos) - tl.dot(im, sin)
        u_im = tl.dot(im, cos, tl.dot(re, sin))
        g, g_peak, _, _ = _load_pair(grad, channel, pair, rows, length, chunks, channels, N1, N2)
        re, im = _first_half(g, first, twiddle, N1, N2)
        g_re = tl.dot(re, cos) - tl.dot(im, sin)
        g_im = tl.dot(im, cos, tl.dot(re, sin))
        scale = u_peak * g_peak
        sum_re += (u_re * g_re + u_im * g_im) * scale
        sum_im += (u_re * g_im - u_im * g_re) * scale
    at = out + (split.to(tl.int64) * channels + channel) * 2 * N1 * N2 + start + _offsets(N1, SLICE, N2)
    tl.store(at, sum_re)
    tl.store(at + N1 * N2, sum_im)
