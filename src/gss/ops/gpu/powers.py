"""Sums of powers of complex modes with the powers made on the fly: the fast path of `gss.ops.vandermonde`.

No table of powers is written anywhere: a program makes the tile of a^k that it multiplies with. Phases are reduced
in float64 and the sine and cosine taken in float32; the products are float32, as three tensor-core products each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BR, _BL, _BN = 64, 64, 32
_PROGRAMS = 256


def evaluate(weights: Tensor, log_a: Tensor, length: int) -> Tensor:
    """As `gss.ops.vandermonde.evaluate`, float32."""
    groups, rows, modes = weights.shape
    out = torch.empty(groups, rows, length, dtype=torch.float32, device=weights.device)
    grid = (triton.cdiv(length, _BL), triton.cdiv(rows, _BR), groups)
    _evaluate_kernel[grid](
        torch.view_as_real(weights.resolve_conj().contiguous()), torch.view_as_real(log_a.contiguous()), out,
        rows, length, modes, BR=_BR, BL=_BL, BN=_BN, num_warps=4,
    )  # fmt: skip
    return out


def project(values: Tensor, log_a: Tensor) -> Tensor:
    """As `gss.ops.vandermonde.project`, float32."""
    groups, rows, length = values.shape
    modes = log_a.shape[-1]
    values = values.contiguous()
    tiles = triton.cdiv(modes, _BL) * triton.cdiv(rows, _BR) * groups
    splits = max(1, min(_PROGRAMS // tiles, triton.cdiv(length, 256)))
    steps = triton.cdiv(triton.cdiv(length, splits), _BN)
    out = torch.empty(splits, groups, rows, modes, 2, dtype=torch.float32, device=values.device)
    _project_kernel[(triton.cdiv(modes, _BL), triton.cdiv(rows, _BR), groups * splits)](
        values, torch.view_as_real(log_a.contiguous()), out,
        groups, rows, length, modes, STEPS=steps, BR=_BR, BN=_BL, BK=_BN, num_warps=4,
    )  # fmt: skip
    return torch.view_as_complex(out.sum(0) if splits > 1 else out[0])


def evaluate_half(weights: Tensor, powers: Tensor, length: int) -> Tensor:
    """As `evaluate`, by one product of float16 operands with a `table` of powers."""
    # Re(w·a) = Re w · Re a − Im w · Im a; a lazily conjugated w has its other sign in memory.
    sign = 1.0 if weights.is_conj() else -1.0
    weights = (weights.conj() if weights.is_conj() else weights).contiguous()
    packed, scale = pack_modes(torch.view_as_real(weights), sign)
    return _product(packed, powers[..., :length]).mul_(scale.unsqueeze(-1))


def project_half(values: Tensor, powers: Tensor) -> Tensor:
    """As `project`, by one product of float16 operands with a `table` of powers."""
    groups, rows, length = values.shape
    modes = powers.shape[1] // 2
    values = values.contiguous()
    packed = torch.empty(values.shape, dtype=torch.float16, device=values.device)
    scale = torch.empty(groups, rows, device=values.device)
    _pack_kernel[(groups * rows,)](values, packed, scale, length, BL=triton.next_power_of_2(length), num_warps=8)
    sums = _product(packed, powers[..., :length].transpose(1, 2))
    out = torch.empty(groups, rows, modes, 2, device=values.device)
    _unpack_modes_kernel[(groups * rows,)](sums, scale, out, modes, BN=triton.next_power_of_2(modes), num_warps=4)
    return torch.view_as_complex(out)


def pack_modes(weights: Tensor, sign: float, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of pairs [..., N, 2] as real parts, then imaginary parts times `sign`, [..., 2N] in float16 over each
    row's largest, and the largest. With a `factor` [N, 2] in float64, of the complex product with it.
    """
    *rows, modes, _ = weights.shape
    packed = torch.empty(*rows, 2 * modes, dtype=torch.float16, device=weights.device)
    scale = torch.empty(rows, device=weights.device)
    _pack_modes_kernel[(scale.numel(),)](
        weights, factor, packed, scale, sign, modes, BN=triton.next_power_of_2(modes), num_warps=4
    )
    return packed, scale


def table(log_a: Tensor, length: int) -> Tensor:
    """exp(log_a)^k for k < length, real parts over imaginary ones: [G, 2N, L] float16."""
    return table_of(torch.view_as_real(log_a.contiguous()), length)


def table_of(pairs: Tensor, length: int) -> Tensor:
    """`table` from the real and imaginary parts of log_a, [G, N, 2] or [N, 2] in float64."""
    modes = pairs.shape[-2]
    groups = pairs.numel() // (2 * modes)
    out = torch.empty(groups, 2 * modes, length, dtype=torch.float16, device=pairs.device)
    grid = (triton.cdiv(length, 128), triton.cdiv(modes, 32), groups)
    _table_kernel[grid](pairs, out, length, modes, BN=32, BL=128, num_warps=4)
    return out


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In float32, of float16 operands."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


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
def _evaluate_kernel(
    weights, log_a, out, rows, length, MODES: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr
):
    group = tl.program_id(2).to(tl.int64)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    k = tl.program_id(0) * BL + tl.arange(0, BL)
    exponent = k.to(tl.float64)
    total = tl.zeros((BR, BL), tl.float32)
    for start in range(0, MODES, BN):
        n = start + tl.arange(0, BN)
        exists = n < MODES
        log_re = tl.load(log_a + (group * MODES + n) * 2, mask=exists, other=0.0)
        log_im = tl.load(log_a + (group * MODES + n) * 2 + 1, mask=exists, other=0.0)
        re, im = powers_of(log_re[:, None], log_im[:, None], exponent[None, :])
        at = weights + ((group * rows + r)[:, None] * MODES + n[None, :]) * 2
        mask = (r < rows)[:, None] & exists[None, :]
        total = tl.dot(tl.load(at, mask=mask, other=0.0), re, total, input_precision="tf32x3")
        total = tl.dot(-tl.load(at + 1, mask=mask, other=0.0), im, total, input_precision="tf32x3")
    mask = (r < rows)[:, None] & (k < length)[None, :]
    tl.store(out + (group * rows + r)[:, None] * length + k[None, :], total, mask=mask)


@triton.jit
def _project_kernel(
    values, log_a, out, groups, rows, length, MODES: tl.constexpr,
    STEPS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(2) % groups).to(tl.int64)
    split = tl.program_id(2) // groups
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    exists = n < MODES
    log_re = tl.load(log_a + (group * MODES + n) * 2, mask=exists, other=0.0)
    log_im = tl.load(log_a + (group * MODES + n) * 2 + 1, mask=exists, other=0.0)
    sum_re = tl.zeros((BR, BN), tl.float32)
    sum_im = tl.zeros((BR, BN), tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * BK + tl.arange(0, BK)
        re, im = powers_of(log_re[None, :], log_im[None, :], k.to(tl.float64)[:, None])
        mask = (r < rows)[:, None] & (k < length)[None, :]
        v = tl.load(values + (group * rows + r)[:, None] * length + k[None, :], mask=mask, other=0.0)
        sum_re = tl.dot(v, re, sum_re, input_precision="tf32x3")
        sum_im = tl.dot(v, im, sum_im, input_precision="tf32x3")
    mask = (r < rows)[:, None] & exists[None, :]
    at = out + ((split * groups + group) * rows + r)[:, None] * MODES * 2 + n[None, :] * 2
    tl.store(at, sum_re, mask=mask)
    tl.store(at + 1, sum_im, mask=mask)


@triton.jit
def _table_kernel(log_a, out, length, MODES: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr):
    group = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(0) * BL + tl.arange(0, BL)
    exists = n < MODES
    log_re = tl.load(log_a + (group * MODES + n) * 2, mask=exists, other=0.0)
    log_im = tl.load(log_a + (group * MODES + n) * 2 + 1, mask=exists, other=0.0)
    re, im = powers_of(log_re[:, None], log_im[:, None], k.to(tl.float64)[None, :])
    at = out + (group * 2 * MODES + n)[:, None] * length + k[None, :]
    mask = exists[:, None] & (k < length)[None, :]
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
def _pack_modes_kernel(weights, factor, packed, scale, sign, MODES: tl.constexpr, BN: tl.constexpr):
    """A row of complex numbers as real parts, then signed imaginary parts, in float16 over their largest."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    mask = n < MODES
    re = tl.load(weights + (row * MODES + n) * 2, mask=mask, other=0.0)
    im = tl.load(weights + (row * MODES + n) * 2 + 1, mask=mask, other=0.0)
    if factor is not None:
        f_re = tl.load(factor + n * 2, mask=mask, other=0.0).to(tl.float32)
        f_im = tl.load(factor + n * 2 + 1, mask=mask, other=0.0).to(tl.float32)
        product_re = re * f_re - im * f_im
        im = re * f_im + im * f_re
        re = product_re
    im = im * sign
    largest = largest_of(re, im)
    tl.store(packed + row * 2 * MODES + n, (re / largest).to(tl.float16), mask=mask)
    tl.store(packed + row * 2 * MODES + MODES + n, (im / largest).to(tl.float16), mask=mask)
    tl.store(scale + row, largest)


@triton.jit
def _pack_kernel(values, packed, scale, length, BL: tl.constexpr):
    """A row of real numbers in float16 over their largest."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BL)
    v = tl.load(values + row * length + k, mask=k < length, other=0.0).to(tl.float32)
    largest = largest_of(v, v)
    tl.store(packed + row * length + k, (v / largest).to(tl.float16), mask=k < length)
    tl.store(scale + row, largest)


@triton.jit
def _unpack_modes_kernel(sums, scale, out, MODES: tl.constexpr, BN: tl.constexpr):
    """Real parts, then imaginary parts, as complex numbers, times the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    mask = n < MODES
    largest = tl.load(scale + row)
    at = out + (row * MODES + n) * 2
    tl.store(at, tl.load(sums + row * 2 * MODES + n, mask=mask, other=0.0) * largest, mask=mask)
    tl.store(at + 1, tl.load(sums + row * 2 * MODES + MODES + n, mask=mask, other=0.0) * largest, mask=mask)
