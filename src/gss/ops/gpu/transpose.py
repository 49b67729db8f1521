"""Copies between [B, L, H] and [B, H, L]: both sides in whole cache lines."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64


def contiguous(x: Tensor) -> Tensor:
    """A contiguous copy of [B, P, Q], quickly also where it is the transpose of one; itself if it already is."""
    if x.is_contiguous() or not x.transpose(1, 2).is_contiguous():
        return x.contiguous()
    batch, height, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(height, _TILE), triton.cdiv(width, _TILE), batch)
    _transpose_kernel[grid](x, out, height, width, TILE=_TILE, num_warps=4)
    return out


@triton.jit
def _transpose_kernel(source, out, height, width, TILE: tl.constexpr):
    """out [B, P, Q] from its transpose [B, Q, P] in memory."""
    base = tl.program_id(2).to(tl.int64) * height * width
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    q = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (q < width)[:, None] & (p < height)[None, :]
    tile = tl.load(source + base + q[:, None] * height + p[None, :], mask=inside, other=0.0)
    inside = (p < height)[:, None] & (q < width)[None, :]
    tl.store(out + base + p[:, None] * width + q[None, :], tl.trans(tile), mask=inside)
