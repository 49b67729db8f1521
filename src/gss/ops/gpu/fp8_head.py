"""The gradients of a tied head with their products in 8 bits: used by `gss.loss` when training in fp8.

Logits are computed in 16 bits, because rounding them to 8 would add to the loss itself. The gradient of a logit is
between −1 and 1, so its unit is a constant, and one kernel writes it from the logits in both layouts. e5m2 then reaches
down to probabilities of 2⁻³².
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops.gpu.cross_entropy import losses_and_normalizers
from gss.ops.gpu.fp8 import (
    E5M2,
    MOST,
    Narrow,
    in_units,
    narrowed,
    product,
    rounded_up,
    store_columns,
    store_row,
    with_row,
)

TILE = {"BM": 64, "BN": 64, "num_warps": 4}


def loss_and_gradients(
    logits: Tensor, targets: Tensor, uncounted: int, hidden: Tensor, weight: Narrow, scale: float, learned: bool
) -> tuple[Tensor, list[Tensor]]:
    """The summed cross-entropy of logits [R, V] = scale · hidden [R, E] · weight [V, E]ᵀ; its gradients with respect to
    hidden and, if it is `learned`, the weight."""
    losses, normalizers = losses_and_normalizers(logits, targets, uncounted)
    by_logits = logit_gradients(logits, targets, normalizers, uncounted)
    unit = by_logits.unit * scale
    gradients = [product(by_logits.rows, weight.columns, unit, weight.unit)]
    if learned:
        narrow = narrowed(hidden)
        gradients.append(product(by_logits.columns, narrow.columns, unit, narrow.unit, fast=False))
    return losses.sum(), gradients


def logit_gradients(logits: Tensor, targets: Tensor, normalizers: Tensor, uncounted: int) -> Narrow:
    """The gradient of the summed cross-entropy with respect to contiguous logits [R, V]."""
    height, width = logits.shape
    padded = rounded_up(height)
    rows, columns = (torch.empty(size, dtype=E5M2, device=logits.device) for size in ((height, width), (width, padded)))
    unit = torch.full((), 1 / MOST[E5M2], device=logits.device)
    grid = (triton.cdiv(padded, TILE["BM"]), triton.cdiv(width, TILE["BN"]))
    _gradient_kernel[grid](
        logits, targets, normalizers, rows, columns, uncounted, height, padded, width, LIMIT=MOST[E5M2], **TILE
    )
    return Narrow(rows, columns, unit)


@triton.jit
def _gradient_kernel(
    logits, targets, normalizers, rows, columns, uncounted, height, padded, width,
    LIMIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    j = tl.arange(0, BN)
    words = tl.zeros((BM // 4, BN), tl.int32)
    for row in tl.static_range(4):
        i = m + row + 4 * tl.arange(0, BM // 4)
        there = i < height
        target = tl.load(targets + i, mask=there, other=0)
        normalizer = tl.load(normalizers + i, mask=there, other=0.0)
        counts = there & (target != uncounted)
        tile = logits + i.to(tl.int64)[:, None] * width + (n + j)[None, :]
        x = tl.load(tile, mask=there[:, None] & (n + j < width)[None, :], other=0.0).to(tl.float32)
        gradient = tl.exp(x - normalizer[:, None]) - tl.where((n + j)[None, :] == target[:, None], 1.0, 0.0)
        gradient = tl.where(counts[:, None], gradient, 0.0)
        gradient = in_units(gradient, LIMIT, rows.dtype.element_ty, LIMIT)
        store_row(gradient, rows, m + row, n, height, width, False, BM, BN)
        words = with_row(words, gradient, row)
    store_columns(words, columns, m, n, padded, width, False, BM, BN)
