"""Cross-entropy and its gradient in one pass over each row of logits: the fast path of `gss.loss`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def cross_entropy_(logits: Tensor, targets: Tensor, uncounted: int) -> Tensor:
    """The loss of each row of logits [R, V] in nats, float32; the logits become the gradient of their sum.

    Rows whose target is `uncounted` have neither loss nor gradient.
    """
    return _launch(logits, targets, uncounted, None)


def losses_and_normalizers(logits: Tensor, targets: Tensor, uncounted: int) -> tuple[Tensor, Tensor]:
    """The losses, and the logarithm of each row's sum of exponentials; the logits stay as they are."""
    normalizers = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    return _launch(logits, targets, uncounted, normalizers), normalizers


def _launch(logits: Tensor, targets: Tensor, uncounted: int, normalizers: Tensor | None) -> Tensor:
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    _cross_entropy_kernel[(rows,)](
        logits, targets, losses, normalizers, uncounted, logits.stride(0),
        vocabulary, BLOCKS=triton.cdiv(vocabulary, block), BLOCK=block, num_warps=8,
    )  # fmt: skip
    return losses


@triton.jit
def _cross_entropy_kernel(
    logits, targets, losses, normalizers, uncounted, stride, vocabulary, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Losses, and the gradient in the place of the logits, or else the normalizers."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    counts = target != uncounted
    target = tl.where(counts, target, 0)
    column = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(BLOCKS):  # each lane keeps a running maximum and a sum of its own
        at = i * BLOCK + column
        x = tl.load(start + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - shift) + tl.exp(x - shift)
        peak = higher
    highest = tl.max(peak, 0)
    normalizer = highest + tl.log(tl.sum(total * tl.exp(peak - highest), 0))
    chosen = tl.load(start + target).to(tl.float32)
    tl.store(losses + row, tl.where(counts, normalizer - chosen, 0.0))
    if normalizers is not None:
        tl.store(normalizers + row, normalizer)
    else:
        tl.debug_barrier()  # the chosen logit is read before it is written over
        for i in range(BLOCKS):
            at = i * BLOCK + column
            x = tl.load(start + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - normalizer) - tl.where(at == target, 1.0, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(start + at, gradient.to(logits.dtype.element_ty), mask=at < vocabulary)
