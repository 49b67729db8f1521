"""(φ(g) ∗ yW₃ᵀ)·W₄ᵀ without ever storing yW₃ᵀ: the gate of a GSS layer, the fast path of `gss.ops.gate`.

The gate is the widest thing in a layer (F = 4E), and on a GPU the time around the matrix products is the time to
read and write tensors of that width. W₃ is narrow (H = E/4), so its product is cheaper to compute again than to
read: one kernel multiplies, applies the activation and the gate, and writes the product that W₄ takes. The backward
pass does the same and writes the three tensors that the other products need. Saved between the two: g and y alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


def gate_product(gate: Tensor, y: Tensor, context: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """φ(gate) ∗ (y·contextᵀ + bias): [M, F]."""
    product = torch.empty_like(gate)
    _gate_kernel[_grid(gate)](
        gate, y, context, bias if bias is not None else gate, product,
        *gate.shape, y.shape[1], activation, bias is not None, **_TILE,
    )  # fmt: skip
    return product


def gate_gradients(
    grad: Tensor, gate: Tensor, y: Tensor, context: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of `gate_product`, which is overwritten: those of the gate and of y·contextᵀ; the product."""
    grad_context, product = torch.empty_like(gate), torch.empty_like(gate)
    _gate_backward_kernel[_grid(gate)](
        gate, y, context, bias if bias is not None else gate, grad, grad_context, product,
        *gate.shape, y.shape[1], activation, bias is not None, **_TILE,
    )  # fmt: skip
    return grad, grad_context, product


def _grid(gate: Tensor) -> tuple[int]:
    rows, width = gate.shape
    return (triton.cdiv(rows, _TILE["BM"]) * triton.cdiv(width, _TILE["BN"]),)


@torch.library.custom_op("gss::gated_output", mutates_args=())
def gated_output(
    gate: Tensor, y: Tensor, context: Tensor, bias: Tensor | None, output: Tensor, activation: str
) -> Tensor:
    """(φ(gate) ∗ (y·contextᵀ + bias))·outputᵀ for gate [M, F], y [M, H], context [F, H], output [E, F]: [M, E]."""
    return gate_product(gate, y, context, bias, activation) @ output.T


@torch.library.custom_op("gss::gated_output_backward", mutates_args=())
def gated_output_backward(
    grad: Tensor, gate: Tensor, y: Tensor, context: Tensor, bias: Tensor | None, output: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `gated_output` by gate, y, context, bias (empty without one) and output."""
    grad_gate, grad_context, product = gate_gradients(grad @ output, gate, y, context, bias, activation)
    grad_output = grad.T @ product
    del product
    grad_bias = grad_context.sum(0) if bias is not None else grad.new_empty(0)
    return grad_gate, grad_context @ context, grad_context.T @ y, grad_bias, grad_output


@gated_output.register_fake
def _(gate: Tensor, y: Tensor, context: Tensor, bias: Tensor | None, output: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape[0], output.shape[0])


@gated_output_backward.register_fake
def _(
    grad: Tensor, gate: Tensor, y: Tensor, context: Tensor, bias: Tensor | None, output: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_bias = torch.empty_like(bias) if bias is not None else grad.new_empty(0)
    return torch.empty_like(gate), torch.empty_like(y), torch.empty_like(context), grad_bias, torch.empty_like(output)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    gate, y, context, bias, output = ctx.saved_tensors
    gradients = gated_output_backward(grad.contiguous(), gate, y, context, bias, output, ctx.activation)
    grad_gate, grad_y, grad_context, grad_bias, grad_output = gradients
    return grad_gate, grad_y, grad_context, grad_bias if bias is not None else None, grad_output, None


gated_output.register_autograd(_backward, setup_context=_save)


@triton.jit
def _normal(x):
    """Φ(x) and e^(−x²/2): Abramowitz and Stegun's 7.1.26 for erf, an error of 1.5e-7."""
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    density = tl.exp(-0.5 * x * x)
    tail = 0.5 * tail * density
    return tl.where(x >= 0, 1.0 - tail, tail), density


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """φ(x)."""
    if ACTIVATION == "gelu":
        below, _ = _normal(x)
        return x * below
    elif ACTIVATION == "swish":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def _activate_with_slope(x, ACTIVATION: tl.constexpr):
    """φ(x) and φ'(x)."""
    if ACTIVATION == "gelu":
        below, density = _normal(x)
        return x * below, below + x * density * 0.3989422804014327
    elif ACTIVATION == "swish":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive
    else:
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _context_tile(
    y, context, bias, rows, width, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of y·contextᵀ + bias, where in [M, F] it lies, and which of it exists.

    Programs that run together share a column of tiles a few rows high: y's tiles and the context's stay in cache.
    """
    GROUP: tl.constexpr = 8
    program = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(width, BN)
    group = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = program % (GROUP * tiles_n)
    m = (group * GROUP + within % height) * BM + tl.arange(0, BM)
    n = (within // height) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_start = m.to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(
            y + row_start[:, None] * K + start + k[None, :],
            mask=(m < rows)[:, None] & (start + k < K)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            context + n[None, :] * K + start + k[:, None],
            mask=(n < width)[None, :] & (start + k < K)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    return total, row_start[:, None] * width + n[None, :], (m < rows)[:, None] & (n < width)[None, :]


@triton.jit
def _gate_kernel(
    gate, y, context, bias, product, rows, width, K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    total, where, mask = _context_tile(y, context, bias, rows, width, K, HAS_BIAS, BM, BN, BK)
    g = tl.load(gate + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + where, (activate(g, ACTIVATION) * total).to(product.dtype.element_ty), mask=mask)


@triton.jit
def _gate_backward_kernel(
    gate, y, context, bias, grad, grad_context, product, rows, width, K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`grad` holds the product's gradient and receives the gate's."""
    total, where, mask = _context_tile(y, context, bias, rows, width, K, HAS_BIAS, BM, BN, BK)
    g = tl.load(gate + where, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(grad + where, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activate_with_slope(g, ACTIVATION)
    kind = product.dtype.element_ty
    tl.store(product + where, (value * total).to(kind), mask=mask)
    tl.store(grad_context + where, (value * d).to(kind), mask=mask)
    tl.store(grad + where, (slope * total * d).to(kind), mask=mask)
