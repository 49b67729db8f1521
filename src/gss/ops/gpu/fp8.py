"""Matrices in 8 bits: how tensors are cast, and how two of them are multiplied.

e4m3 has three bits of mantissa and ranges from 2⁻⁹ to 448; e5m2 has two and ranges from 2⁻¹⁶ to 57,344. Parameters and
activations use the first; gradients, whose magnitudes differ more, use the second. Each tensor has one scale, its
`unit`: the number that a 1 in it stands for (one per row if the kernel that writes it has the whole row). No unit is
kept from one step to the next: it comes from the largest magnitude of the tensor itself, or from an upper bound.

A Hopper tensor core contracts only the last dimension of both operands. A tensor that a backward product contracts over
another dimension is therefore written twice: as rows [M, K], and as columns [K, M] with M rounded up to a multiple of
16. Kernels pack four rows into a word before they transpose a tile, which then moves 32 bits at a time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOST = {E4M3: 448.0, E5M2: 57344.0}
LEAST = tl.constexpr(1e-30)
"""Taken for the largest magnitude of a tensor of zeros."""
MULTIPLE = 16
"""Of this are the sizes that `_scaled_mm` takes."""
_TILE = {"BM": 128, "BN": 32, "num_warps": 4}
_CAST = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.KINDx2.f32 low, $2, $1;
    cvt.rn.satfinite.KINDx2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
_CAST_E4M3, _CAST_E5M2 = (tl.constexpr(_CAST.replace("KIND", kind)) for kind in ("e4m3", "e5m2"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Narrow(NamedTuple):
    """A matrix in 8 bits."""

    rows: Tensor
    """[M, K]."""
    columns: Tensor
    """[K, M], M rounded up by zeros."""
    unit: Tensor
    """[], float32."""


def cast(x: Tensor, most: Tensor, kind: torch.dtype = E4M3) -> Narrow:
    """A contiguous matrix [M, K] in 16 bits, of which `most` is the largest magnitude, or not below it.

    From 32 bits Triton 3.6 wrote wrong columns on an H200.
    """
    assert x.element_size() == 2
    height, width = x.shape
    padded = rounded_up(height)
    rows = torch.empty(height, width, dtype=kind, device=x.device)
    columns = torch.empty(width, padded, dtype=kind, device=x.device)
    unit = torch.empty((), device=x.device)
    grid = (triton.cdiv(width, _TILE["BN"]), triton.cdiv(padded, _TILE["BM"]))
    _cast_kernel[grid](x, most, rows, columns, unit, height, padded, width, LIMIT=MOST[kind], **_TILE)
    return Narrow(rows, columns, unit)


def narrowed(x: Tensor) -> Narrow:
    """A matrix in e4m3 that is small enough to look for its largest magnitude first."""
    x = x.bfloat16().contiguous()
    return cast(x, torch.linalg.vector_norm(x, torch.inf))


def rounded_up(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // MULTIPLE) * MULTIPLE


def fits(*sizes: int) -> bool:
    """Whether dense layers between these widths can be multiplied in 8 bits."""
    return not any(size % MULTIPLE for size in sizes)


def product(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, fast: bool = True) -> Tensor:
    """a·bᵀ in bfloat16, for a [M, K] and b [N, K] in 8 bits; units are [], or [M, 1] and [1, N].

    `fast` sums with fewer bits than float32 has (Hopper), which a sum over all tokens of a step should not. Where
    there is no such product, on a CPU, it is made in float64, which autocast leaves alone.
    """
    if a.device.type == "cuda":
        return torch._scaled_mm(a, b.t(), a_unit, b_unit, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return ((a.double() @ b.double().t()) * (a_unit * b_unit)).bfloat16()


@triton.jit
def unit_of(most, LIMIT: tl.constexpr):
    """What 1 stands for where the largest magnitude stands for LIMIT. Not a number if that is none."""
    return tl.maximum(most.to(tl.float32), LEAST, propagate_nan=tl.PropagateNan.ALL) / LIMIT


@triton.jit
def in_units(x, per_unit, kind: tl.constexpr, LIMIT: tl.constexpr):
    """x in 8 bits, with the reciprocal of its unit; saturates, and keeps what is not a number.

    A cast makes two numbers of 8 bits at a time. Where such a pair is stored in a row and its bytes go elsewhere too,
    the assembler that Triton brings for Hopper loses some of them (triton-lang/triton#11111), so each pair is joined
    with the next one before anything else sees it.
    """
    x = x * per_unit
    if _INTERPRETED:
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(kind)
    else:
        asm: tl.constexpr = _CAST_E5M2 if kind == tl.float8e5 else _CAST_E4M3
        x = tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
        x = x.to(kind, bitcast=True)
    return x


@triton.jit
def store_row(value, rows, m, n, height, width, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Every fourth row of a tile, the first of them m, into [height, width] from column n on."""
    i, j = m + 4 * tl.arange(0, BM // 4), tl.arange(0, BN)
    across = rows + (i.to(tl.int64) * width + n)[:, None] + j[None, :]
    if EVEN:
        tl.store(across, value)
    else:
        tl.store(across, value, mask=(i < height)[:, None] & (n + j < width)[None, :])


@triton.jit
def with_row(words, value, ROW: tl.constexpr):
    """Words whose byte `ROW` of four is `value` in 8 bits."""
    return words | (value.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * ROW))


@triton.jit
def store_columns(words, columns, m, n, padded, width, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Words of four rows each, from [m, n] on, into columns [width, padded]."""
    i, j = tl.arange(0, BM // 4), tl.arange(0, BN)
    down = columns.to(tl.pointer_type(tl.int32)) + ((n + j).to(tl.int64) * padded // 4 + m // 4)[:, None] + i[None, :]
    if EVEN:
        tl.store(down, tl.trans(words))
    else:
        tl.store(down, tl.trans(words), mask=(n + j < width)[:, None] & (m + 4 * i < padded)[None, :])


@triton.jit
def _cast_kernel(
    x, most, rows, columns, unit_out, height, padded, width, LIMIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    m, n = tl.program_id(1) * BM, tl.program_id(0) * BN
    i, j = tl.arange(0, BM // 4), tl.arange(0, BN)
    unit = unit_of(tl.load(most), LIMIT)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(unit_out, unit)
    per_unit = tl.div_rn(1.0, unit)
    words = tl.zeros((BM // 4, BN), tl.int32)
    for row in tl.static_range(4):
        at = m + row + 4 * i
        inside = (at < height)[:, None] & (n + j < width)[None, :]
        value = tl.load(x + at.to(tl.int64)[:, None] * width + (n + j)[None, :], mask=inside, other=0.0)
        value = in_units(value.to(tl.float32), per_unit, rows.dtype.element_ty, LIMIT)
        store_row(value, rows, m + row, n, height, width, False, BM, BN)
        words = with_row(words, value, row)
    store_columns(words, columns, m, n, padded, width, False, BM, BN)
