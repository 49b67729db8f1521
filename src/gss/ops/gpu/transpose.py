"""Copies between [B, L, H] and [B, H, L], with whole cache lines on both sides."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops import fast

_TILE = 64


@fast.operation("gss::swapped")
def swapped(x: Tensor) -> Tensor:
    """[B, P, Q] → [B, Q, P], contiguous. A kernel of its own: within a reduction's, either side would be in pieces."""
    return _swapped(x.contiguous())


@swapped.register_fake
def _(x):
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1])


def _backward(ctx, grad):
    return swapped(grad)


swapped.register_autograd(_backward)


def contiguous(x: Tensor) -> Tensor:
    """A contiguous copy of [B, P, Q], quickly also where it is the transpose of one; itself if it already is."""
    return _swapped(x.transpose(1, 2)) if x.transpose(1, 2).is_contiguous() else x.contiguous()


def _swapped(source: Tensor) -> Tensor:
    batch, width, height = source.shape
    out = torch.empty(batch, height, width, dtype=source.dtype, device=source.device)
    grid = (batch * triton.cdiv(height, _TILE), triton.cdiv(width, _TILE))  # only the first axis has no limit
    _transpose_kernel[grid](source, out, height, width, TILE=_TILE, num_warps=4)
    return out


@triton.jit
def _transpose_kernel(source, out, height, width, TILE: tl.constexpr):
    """out [B, P, Q] from [B, Q, P]."""
    tiles = tl.cdiv(height, TILE)
    base = (tl.program_id(0) // tiles).to(tl.int64) * height * width
    p = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    q = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (q < width)[:, None] & (p < height)[None, :]
    tile = tl.load(source + base + q[:, None] * height + p[None, :], mask=inside, other=0.0)
    inside = (p < height)[:, None] & (q < width)[None, :]
    tl.store(out + base + p[:, None] * width + q[None, :], tl.trans(tile), mask=inside)
