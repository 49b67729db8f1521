"""The gate of a GSS layer: (φ(xW₂ᵀ + b₂) ∗ (yW₃ᵀ + b₃))·W₄ᵀ + b₄, added to the residual stream."""

import torch.nn.functional as F
from torch import Tensor, nn

from gss.choices import ACTIVATIONS
from gss.ops import fast

_LEAST_TOKENS = 64


def add_gated(
    stream: Tensor, x: Tensor, y: Tensor, gate: nn.Linear, context: nn.Linear, output: nn.Linear, activation: str
) -> Tensor:
    """The stream [B, L, E] and what the gate makes of x [B, L, E], y [B, L, H] and the dense layers W₂ [F, E],
    W₃ [F, H], W₄ [E, F].
    """
    half = fast.half(x) if x.shape[0] * x.shape[1] >= _LEAST_TOKENS else None
    if half is not None:
        from gss.ops.gpu import gate as kernels

        if activation in kernels.ACTIVATIONS:
            if fast.fp8() and (out := _in_fp8(x.to(half), y, gate, context, output, activation)) is not None:
                return (out if output.bias is None else out + output.bias.to(half)) + stream
            before = F.linear(x.to(half), gate.weight.to(half)).flatten(0, 1)
            operands = (gate.bias, y.flatten(0, 1), context.weight, context.bias, output.weight)
            cast = (None if t is None else t.to(half) for t in operands)
            out = kernels.gated_output(before, *cast, activation).unflatten(0, x.shape[:2])
            if fast.without_gradients():
                from gss.ops.gpu.stream import added

                return added(stream, out, output.bias)
            return (out if output.bias is None else out + output.bias.to(half)) + stream
    v = ACTIVATIONS[activation](gate(x))
    return output(context(y.to(v.dtype)) * v) + stream


def _in_fp8(
    x: Tensor, y: Tensor, gate: nn.Linear, context: nn.Linear, output: nn.Linear, activation: str
) -> Tensor | None:
    """The gate's output before its bias, from products in 8 bits; None for sizes that have none."""
    from gss.ops.gpu import fp8_gate as kernels

    if not kernels.fits(gate.in_features, gate.out_features, context.in_features):
        return None
    operands = (y.flatten(0, 1), context.weight, context.bias, output.weight)
    out = kernels.gated_output(x.flatten(0, 1), gate.weight, gate.bias, *operands, activation)
    return out.unflatten(0, x.shape[:2])
