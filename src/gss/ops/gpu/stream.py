"""The residual stream without gradients: normalized into 16 bits, and added to, in one pass each.

In training the compiler fuses these operations. Without compilation, as when reading a prompt, each would be several
passes over float32 tensors as wide as the model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Elements of a program."""


def normalize_to(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool, kind: torch.dtype
) -> Tensor:
    """Layer norm (`centred`) or RMS norm over the last dimension, computed in float32, given in `kind`."""
    width = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x, dtype=kind)
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    count = x.numel() // width
    _norm_kernel[(triton.cdiv(count, rows),)](
        x, weight, bias, out, count, width, epsilon, CENTRED=centred, ROWS=rows, BLOCK=block, num_warps=4
    )
    return out


def added(x: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
    """x + update + bias, summed in float32, in x's precision."""
    x, update = x.contiguous(), update.contiguous()
    out = torch.empty_like(x)
    _add_kernel[(triton.cdiv(x.numel(), _TILE),)](
        x, update, bias, out, x.numel(), x.shape[-1], BLOCK=_TILE, num_warps=8
    )
    return out


@triton.jit
def _norm_kernel(
    x, weight, bias, out, count, width, epsilon, CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < count)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(mask, value - tl.sum(value, 1)[:, None] / width, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 1)[:, None] / width + epsilon)
    value = value * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        value = value + tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_kernel(x, update, bias, out, size, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(update + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at % width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
