"""The gate of a GSS layer: (φ(xW₂ᵀ + b₂) ∗ (yW₃ᵀ + b₃))·W₄ᵀ + b₄, added to the residual stream."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gss.choices import ACTIVATIONS
from gss.ops import fast

_LEAST_TOKENS = 64


def add_gated(
    stream: Tensor,
    x: Tensor,
    y: Tensor,
    gate: nn.Linear,
    context: nn.Linear,
    output: nn.Linear,
    activation: str,
    keep: bool = False,
) -> Tensor:
    """The stream [B, L, E] and what the gate makes of x [B, L, E], y [B, L, H] and the dense layers W₂ [F, E],
    W₃ [F, H], W₄ [E, F]. If `keep`, GPU kernels keep the wide products for the backward pass.
    """
    if (out := gate_in_fp8(x, y, gate, context, output, activation)) is not None:
        return out + stream
    half = fast.half(x) if x.shape[0] * x.shape[1] >= _LEAST_TOKENS else None
    if half is not None:
        from gss.ops.gpu import gate as kernels

        if activation in kernels.ACTIVATIONS:
            before = F.linear(x.to(half), gate.weight.to(half)).flatten(0, 1)
            operands = (gate.bias, y.flatten(0, 1), context.weight, context.bias, output.weight)
            cast = (None if t is None else t.to(half) for t in operands)
            out, *_ = kernels.gated_output(before, *cast, activation, keep and torch.is_grad_enabled())
            out = out.unflatten(0, x.shape[:2])
            if fast.without_gradients():
                from gss.ops.gpu.stream import added

                return added(stream, out, output.bias)
            return (out if output.bias is None else out + output.bias.to(half)) + stream
    v = ACTIVATIONS[activation](gate(x))
    return output(context(y.to(v.dtype)) * v) + stream


def gate_in_fp8(
    x: Tensor, y: Tensor | None, gate: nn.Linear, context: nn.Linear | None, output: nn.Linear, activation: str
) -> Tensor | None:
    """The gate's output from products in 8 bits; φ(xW₂ᵀ + b₂)·W₄ᵀ + b₄ without y and W₃. None where 8 bits are not
    wanted, or cannot be had for an activation or for these sizes.
    """
    half = fast.half(x) if fast.fp8() and x.ndim == 3 and x.shape[0] * x.shape[1] >= _LEAST_TOKENS else None
    if half is None:
        return None
    from gss.ops.gpu import fp8_gate
    from gss.ops.gpu.gate import ACTIVATIONS as FUSED

    widths = (gate.in_features, output.out_features, *(() if context is None else (context.in_features,)))
    if activation not in FUSED or not fp8_gate.fits(gate.out_features, *widths):
        return None
    bias = None if context is None else context.bias
    out = fp8_gate.gated_output(
        x.to(half).flatten(0, 1), gate.weight, gate.bias, None if y is None else y.to(half).flatten(0, 1),
        None if context is None else context.weight, bias, output.weight, activation,
    ).unflatten(0, x.shape[:2])  # fmt: skip
    return out if output.bias is None else out + output.bias.to(half)
