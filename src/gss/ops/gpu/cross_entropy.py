"""Cross-entropy and its gradient in one visit to each row of logits: the fast path of `gss.loss`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 32_768  # logits that a program holds at a time: all of a row's, for most vocabularies


def cross_entropy_(logits: Tensor, targets: Tensor, uncounted: int) -> Tensor:
    """The loss of each row of logits [R, V] in nats, float32; the logits become the gradient of their sum.

    Rows whose target is `uncounted` have neither loss nor gradient.
    """
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    _cross_entropy_kernel[(rows,)](
        logits, targets, losses, uncounted, logits.stride(0),
        vocabulary, BLOCKS=triton.cdiv(vocabulary, block), BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return losses


@triton.jit
def _cross_entropy_kernel(
    logits, targets, losses, uncounted, stride, vocabulary, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    counts = target != uncounted
    target = tl.where(counts, target, 0)
    column = tl.arange(0, BLOCK)
    peak = float("-inf")
    total = 0.0
    for i in tl.static_range(BLOCKS):
        at = i * BLOCK + column
        x = tl.load(start + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    normalizer = peak + tl.log(total)
    chosen = tl.load(start + target).to(tl.float32)
    tl.store(losses + row, tl.where(counts, normalizer - chosen, 0.0))
    tl.debug_barrier()  # the chosen logit is read before it is written over
    for i in tl.static_range(BLOCKS):
        at = i * BLOCK + column
        if BLOCKS > 1:
            x = tl.load(start + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - normalizer) - tl.where(at == target, 1.0, 0.0)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(start + at, gradient.to(logits.dtype.element_ty), mask=at < vocabulary)
