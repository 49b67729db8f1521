"""The output side of a GSS layer: (φ(g) ∗ (yW₃ᵀ + b₃))·W₄ᵀ + b₄."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gss.ops import fast

_LEAST_TOKENS = 64


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu2": _relu_squared,
    "swish": F.silu,
    "relu": F.relu,
}
"""φ by the names that configs use."""


def gated_output(
    gate: Tensor,
    y: Tensor,
    context: tuple[Tensor, Tensor | None],
    output: tuple[Tensor, Tensor | None],
    activation: str,
) -> Tensor:
    """For gate [B, L, F], y [B, L, H], and weights with their biases [F, H], [F] and [E, F], [E]: [B, L, E]."""
    (context_weight, context_bias), (output_weight, output_bias) = context, output
    tokens = gate.shape[0] * gate.shape[1]
    if tokens >= _LEAST_TOKENS and fast.half(gate) == gate.dtype:
        from gss.ops.gpu.gate import gated_output as on_gpu

        flat_gate, flat_y = gate.flatten(0, 1), y.flatten(0, 1)
        operands = (flat_y, context_weight, context_bias, output_weight)
        halves = (None if t is None else t.to(gate.dtype) for t in operands)
        out = on_gpu(flat_gate, *halves, activation).unflatten(0, gate.shape[:2])
        return out if output_bias is None else out + output_bias.to(gate.dtype)
    product = F.linear(y.to(gate.dtype), context_weight, context_bias) * ACTIVATIONS[activation](gate)
    return F.linear(product, output_weight, output_bias)
