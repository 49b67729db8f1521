"""Powers of complex modes on a GPU: tables of them, and code shared by the kernels that use modes.

Phases are reduced in float64, and sines and cosines computed in float32. Operands of products with a table are float16,
divided by the largest of each row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def packed_rows(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for rows of float16, and for the scale of each."""
    return like.new_empty(rows, width, dtype=torch.float16), like.new_empty(rows, dtype=torch.float32)


def table_of(pairs: Tensor, length: int) -> Tensor:
    """exp(log_a)^k for k < length from the pairs [N, 2] of log_a in float64: real parts over imaginary ones, [2N, L]
    float16.
    """
    modes = pairs.shape[0]
    out = torch.empty(2 * modes, length, dtype=torch.float16, device=pairs.device)
    grid = (triton.cdiv(length, 128), triton.cdiv(modes, 32))
    _table_kernel[grid](pairs, out, length, modes, BN=32, BL=128, num_warps=4)
    return out


@triton.jit
def load_pair(at, mask):
    """Two neighbours in memory: a real and an imaginary part."""
    return tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)


@triton.jit
def store_pair(at, re, im, mask):
    """The inverse of `load_pair`."""
    tl.store(at, re, mask=mask)
    tl.store(at + 1, im, mask=mask)


@triton.jit
def powers_of(log_re, log_im, exponent):
    """a^k in float32 for log a and k in float64, of shapes that broadcast: real and imaginary part."""
    turns = log_im * exponent * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    decay = log_re * exponent
    coarse = decay.to(tl.float32)
    fine = (decay - coarse.to(tl.float64)).to(tl.float32)
    size = tl.exp(coarse) * (1.0 + fine)
    return size * tl.cos(angle), size * tl.sin(angle)


@triton.jit
def _table_kernel(log_a, out, length, MODES: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr):
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(0) * BL + tl.arange(0, BL)
    log_re, log_im = load_pair(log_a + 2 * n, n < MODES)
    re, im = powers_of(log_re[:, None], log_im[:, None], k.to(tl.float64)[None, :])
    at = out + n.to(tl.int64)[:, None] * length + k[None, :]
    mask = (n < MODES)[:, None] & (k < length)[None, :]
    tl.store(at, re.to(tl.float16), mask=mask)
    tl.store(at + MODES * length, im.to(tl.float16), mask=mask)


@triton.jit
def times(a_re, a_im, b_re, b_im):
    """A product of complex numbers, real and imaginary part."""
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def largest_of(first, second):
    """The largest magnitude of a row in one or two parts, at least a tiny one."""
    return tl.maximum(tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0)), 1e-30)


@triton.jit
def pack_row(packed, scale, row, re, im, n, mask, MODES: tl.constexpr):
    """A row of complex numbers as real parts, then imaginary parts, in float16 over their largest."""
    largest = largest_of(re, im)
    at = packed + row * 2 * MODES + n
    tl.store(at, (re / largest).to(tl.float16), mask=mask)
    tl.store(at + MODES, (im / largest).to(tl.float16), mask=mask)
    tl.store(scale + row, largest)
