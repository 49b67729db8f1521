"""The gate of a GSS layer: (φ(xW₂ᵀ + b₂) ∗ (yW₃ᵀ + b₃))·W₄ᵀ + b₄, added to the residual stream."""

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


Dense = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def add_gated(
    stream: Tensor, x: Tensor, y: Tensor, gate: Dense, context: Dense, output: Dense, activation: str
) -> Tensor:
    """The stream [B, L, E] and what the gate makes of x [B, L, E], y [B, L, H] and the weights W₂ [F, E], W₃ [F, H],
    W₄ [E, F] with biases b₂, b₃, b₄.
    """
    half = fast.half(x) if x.shape[0] * x.shape[1] >= _LEAST_TOKENS else None
    if half is None:
        v = ACTIVATIONS[activation](F.linear(x, *gate))
        return F.linear(F.linear(y.to(v.dtype), *context) * v, *output) + stream
    from gss.ops.gpu.gate import gated_output

    (gate_weight, gate_bias), (context_weight, context_bias), (output_weight, output_bias) = gate, context, output
    before = F.linear(x.to(half), gate_weight.to(half)).flatten(0, 1)
    operands = (gate_bias, y.flatten(0, 1), context_weight, context_bias, output_weight)
    out = gated_output(before, *(None if t is None else t.to(half) for t in operands), activation)
    out = out.unflatten(0, x.shape[:2])
    if fast.without_gradients():
        from gss.ops.gpu.stream import added

        return added(stream, out, output_bias)
    return (out if output_bias is None else out + output_bias.to(half)) + stream
