"""Next-token cross-entropy from activations, a few rows of logits at a time.

All logits of a batch would take more memory than the rest of a training step (8 GB in float32 for 65,536 tokens of a
32k vocabulary). Here each chunk's logits exist only while its loss and gradients are computed. All this needs of a
model is the head, a function from activations to logits, and the head's one weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gss.ops import fast

CHUNK_ELEMENTS = 1 << 26
"""Logits held at a time: 2,048 rows of a 32k vocabulary, 256 MB in float32."""

GPU_CHUNK_ELEMENTS = 1 << 29
"""On a GPU: 16,384 rows, 1 GB in 16 bits. Fewer chunks, fewer visits to the weight's gradient."""

Head = Callable[[Tensor], Tensor]


def next_token_loss(
    head: Head,
    weight: Tensor,
    hidden: Tensor,
    targets: Tensor,
    mask: Tensor,
    chunk_elements: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The summed cross-entropy, in nats, of the targets that the mask counts.

    head, weight     the function [rows, E] → [rows, V] and the parameter [V, E] it uses (its gradient is made here)
    hidden           [B, L, E]
    targets, mask    [B, L]: the next token's id, and whether it counts (an uncounted id may be anything)
    scale            given where the head is scale · hidden · weightᵀ and nothing more, whose gradients can be made
                     in 8 bits where that is wanted

    A sum, not a mean: micro-batches and processes add up, and whoever knows the number of all counted targets
    divides by it.
    """
    if targets.shape != hidden.shape[:-1] or mask.shape != targets.shape:
        raise ValueError(
            f"targets {list(targets.shape)} and mask {list(mask.shape)} must have the activations' shape without "
            f"the width, {list(hidden.shape[:-1])}"
        )
    if chunk_elements is None:
        chunk_elements = GPU_CHUNK_ELEMENTS if fast.usable(hidden.device) else CHUNK_ELEMENTS
    rows = max(1, chunk_elements // weight.shape[0])
    flat = hidden.reshape(-1, hidden.shape[-1])
    counted = torch.where(mask, targets, _UNCOUNTED).reshape(-1)
    if hidden.device.type == "cpu" and 0 < 2 * mask.sum() < mask.numel():  # a GPU would have to be waited for
        chosen = mask.reshape(-1).nonzero().squeeze(1)
        flat, counted = flat.index_select(0, chosen), counted[chosen]  # no logits for those that do not count
    if torch.is_grad_enabled():
        loss: Tensor = _ChunkedLoss.apply(head, rows, weight, flat, counted, scale)
        return loss
    parts = zip(flat.split(rows), counted.split(rows), strict=True)
    return torch.stack([_summed(head(part), target) for part, target in parts]).sum()


_UNCOUNTED = -100  # what torch's cross-entropy leaves out


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    """In float32 under autocast and for narrower logits, in float64 for float64 models."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(precise, targets, ignore_index=_UNCOUNTED, reduction="sum")


def _loss_and_gradients(logits: Tensor, targets: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Sequence[Tensor]]:
    """The summed loss of a chunk, and its gradients with respect to the inputs of the head."""
    if fast.usable(logits.device) and logits.dtype != torch.float64:
        from gss.ops.gpu.cross_entropy import cross_entropy_

        gradient = logits.detach()  # the same memory: a product's backward pass does not need its own output
        losses = cross_entropy_(gradient, targets, _UNCOUNTED)
        # Autograd is told, so that a head which does need it (one that ends in a tanh) is refused, not trained wrongly.
        torch.autograd.graph.increment_version(gradient)
        return losses.sum(), torch.autograd.grad(logits, inputs, gradient)
    loss = _summed(logits, targets)
    return loss.detach(), torch.autograd.grad(loss, inputs)


_Chunk = Callable[[Tensor, Tensor], tuple[Tensor, Sequence[Tensor]]]


def _by_autograd(head: Head, weight: Tensor, learned: bool) -> _Chunk:
    """From activations and targets to the summed loss, and its gradients with respect to activations and weight."""

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with torch.enable_grad():
            activations = hidden.detach().requires_grad_()
            return _loss_and_gradients(head(activations), targets, (activations, weight)[: 1 + learned])

    return chunk


def _in_fp8(head: Head, weight: Tensor, learned: bool, scale: float) -> _Chunk:
    """The same for a head that is scale · hidden · weightᵀ: logits from the head, gradients in 8 bits."""
    from gss.ops.gpu import fp8, fp8_head

    narrow = fp8.narrowed(weight)

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with torch.enable_grad():  # autocast would keep a cast of the weight that has no gradient
            logits = head(hidden).detach()
        return fp8_head.loss_and_gradients(logits, targets, _UNCOUNTED, hidden, narrow, scale, learned)

    return chunk


def _fits_fp8(hidden: Tensor, weight: Tensor) -> bool:
    if not fast.fp8() or fast.half(hidden) is None:
        return False
    from gss.ops.gpu import fp8

    return fp8.fits(*weight.shape)


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in the forward, chunk by chunk, while the logits are there: nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, rows: int, weight: Tensor, hidden: Tensor, targets: Tensor, scale: float | None
    ) -> Tensor:
        learned = ctx.needs_input_grad[2]
        if scale is not None and _fits_fp8(hidden, weight):
            chunk = _in_fp8(head, weight, learned, scale)
        else:
            chunk = _by_autograd(head, weight, learned)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight) if learned else None
        losses = []
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            loss, gradients = chunk(hidden[part], targets[part])
            hidden_gradient[part] = gradients[0]
            if weight_gradient is not None:
                weight_gradient += gradients[1]
            losses.append(loss)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, Tensor | None, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        by_weight = None if weight_gradient is None else weight_gradient * scale
        return None, None, by_weight, hidden_gradient * scale, None, None
