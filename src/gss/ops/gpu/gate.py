"""(φ(g + b₂) ∗ (yW₃ᵀ + b₃))·W₄ᵀ with one pass over each wide tensor: the fast path of `gss.ops.gate`.

The gate has the widest tensors in a layer (F = 4E). On a GPU, the time around the matrix products is the time to read
and write tensors of that width. One kernel per direction does everything that is not a matrix product. The forward
kernel reads g and yW₃ᵀ and writes their gated product. The backward kernel reads these and the product's gradient, and
writes the three tensors that the products need, summing the biases' gradients as it goes. W₃ is narrow (H = E/4), so
yW₃ᵀ and the gated product are computed again there, and only g and y are saved; where memory allows, both are kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops import fast

ACTIVATIONS = ("gelu", "swish", "relu2", "relu")
"""Those of `gss.choices` that the kernels have; `gss.ops.gate` leaves the others to PyTorch."""

_TILE = {"BM": 4, "BN": 256, "STEPS": 64, "num_warps": 4}


def _launch(gate: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and the options of a launch; where tiles cover the tensors exactly, nothing is masked."""
    rows, width = gate.shape
    high, wide = _TILE["BM"] * _TILE["STEPS"], _TILE["BN"]
    even = rows % high == 0 and width % wide == 0
    return (triton.cdiv(width, wide), triton.cdiv(rows, high)), {**_TILE, "EVEN": even}


@fast.operation("gss::gated_output")
def gated_output(
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor,
    context: Tensor,
    context_bias: Tensor | None,
    output: Tensor,
    activation: str,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(φ(gate + b₂) ∗ (y·contextᵀ + b₃))·outputᵀ for gate [M, F], y [M, H], context [F, H], output [E, F]: [M, E].

    And for the gradient alone, if `keep`, y·contextᵀ and the gated product, [M, F].
    """
    wide = y @ context.T
    product = torch.empty_like(wide) if keep else wide
    grid, options = _launch(gate)
    _gate_kernel[grid](wide, product, gate, gate_bias, context_bias, *gate.shape, ACTIVATION=activation, **options)
    kept = (wide, product) if keep else (gate.new_empty(0), gate.new_empty(0))
    return product @ output.T, *kept


@fast.operation("gss::gated_output_backward")
def gated_output_backward(
    grad: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor,
    context: Tensor,
    context_bias: Tensor | None,
    output: Tensor,
    activation: str,
    wide: Tensor,
    product: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `gated_output` with respect to gate, y, context, output and, [2, F], the two biases."""
    kept = len(product) > 0
    if not kept:
        wide = product = y @ context.T
    grad_gate, grad_context = grad @ output, torch.empty_like(gate)
    grid, options = _launch(gate)
    sums = torch.empty(grid[1], 2, gate.shape[1], device=gate.device)
    _gate_backward_kernel[grid](
        grad_gate, wide, product, grad_context, sums, gate, gate_bias, context_bias, *gate.shape,
        ACTIVATION=activation, KEPT=kept, **options,
    )  # fmt: skip
    grad_output = grad.T @ product
    del wide, product
    return grad_gate, grad_context @ context, grad_context.T @ y, grad_output, sums.sum(0)


@gated_output.register_fake
def _(gate, gate_bias, y, context, context_bias, output, activation, keep=False):
    kept = (torch.empty_like(gate), torch.empty_like(gate)) if keep else (gate.new_empty(0), gate.new_empty(0))
    return gate.new_empty(gate.shape[0], output.shape[0]), *kept


@gated_output_backward.register_fake
def _(grad, gate, gate_bias, y, context, context_bias, output, activation, wide, product):
    grad_biases = gate.new_empty(2, gate.shape[1], dtype=torch.float32)
    return (*(torch.empty_like(t) for t in (gate, y, context, output)), grad_biases)


def _save(ctx, inputs, output):
    *tensors, ctx.activation, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    gate, gate_bias, y, context, context_bias, output, *kept = ctx.saved_tensors
    grad_gate, grad_y, grad_context, grad_output, grad_biases = gated_output_backward(
        grad.contiguous(), gate, gate_bias, y, context, context_bias, output, ctx.activation, *kept
    )
    grad_gate_bias = None if gate_bias is None else grad_biases[0].to(gate_bias.dtype)
    grad_context_bias = None if context_bias is None else grad_biases[1].to(context_bias.dtype)
    return grad_gate, grad_gate_bias, grad_y, grad_context, grad_context_bias, grad_output, None, None


gated_output.register_autograd(_backward, setup_context=_save)


@triton.jit
def _below(x):
    """Φ(x), the normal distribution's, from its log-odds (−, in bits), an odd polynomial: |x|·error is under 3.4e-6."""
    x2 = x * x
    odds = x * (-2.30211533 + x2 * (-0.105138881 + x2 * (3.28206761e-4 + x2 * (9.24744991e-5 + x2 * -3.40548427e-6))))
    return 1.0 / (1.0 + tl.exp2(odds))


@triton.jit
def _activate_with_slope(x, ACTIVATION: tl.constexpr):
    """φ(x) and φ'(x)."""
    if ACTIVATION == "gelu":
        below = _below(x)
        density = tl.exp2(x * x * -0.7213475204444817 - 1.3257480647361593)
        return x * below, below + x * density
    elif ACTIVATION == "swish":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive
    else:
        tl.static_assert(ACTIVATION == "relu", "an activation that the kernels do not have")
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _load(pointer, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _store(pointer, value, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def _load_bias(bias, n, width, BN: tl.constexpr):
    if bias is None:
        return tl.zeros((1, BN), tl.float32)
    else:
        return tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gate_kernel(
    context, product, gate, gate_bias, context_bias, rows, width,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The product φ(gate + b₂) ∗ (context + b₃), [M, F], perhaps in the place of `context`; a program goes down its
    columns."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b2 = _load_bias(gate_bias, n, width, BN)
    b3 = _load_bias(context_bias, n, width, BN)
    for step in range(STEPS):
        m = (tl.program_id(1) * STEPS + step) * BM + tl.arange(0, BM)
        where = m.to(tl.int64)[:, None] * width + n[None, :]
        mask = (m < rows)[:, None] & (n < width)[None, :]
        g = _load(gate + where, mask, EVEN).to(tl.float32) + b2
        c = _load(context + where, mask, EVEN).to(tl.float32) + b3
        value, _ = _activate_with_slope(g, ACTIVATION)
        _store(product + where, (value * c).to(product.dtype.element_ty), mask, EVEN)


@triton.jit
def _gate_backward_kernel(
    grad, context, product, grad_context, sums, gate, gate_bias, context_bias, rows, width, ACTIVATION: tl.constexpr,
    KEPT: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """From the gradient of that product: in its place the one with respect to the gate, `grad_context`, the product
    unless it was kept, and the sums over a program's rows of both gradients."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b2 = _load_bias(gate_bias, n, width, BN)
    b3 = _load_bias(context_bias, n, width, BN)
    kind = grad.dtype.element_ty
    gate_sum = tl.zeros((BM, BN), tl.float32)
    context_sum = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        m = (tl.program_id(1) * STEPS + step) * BM + tl.arange(0, BM)
        where = m.to(tl.int64)[:, None] * width + n[None, :]
        mask = (m < rows)[:, None] & (n < width)[None, :]
        d = _load(grad + where, mask, EVEN).to(tl.float32)
        g = _load(gate + where, mask, EVEN).to(tl.float32) + b2
        c = _load(context + where, mask, EVEN).to(tl.float32) + b3
        value, slope = _activate_with_slope(g, ACTIVATION)
        by_context = value * d
        by_gate = slope * c * d
        if not KEPT:
            _store(product + where, (value * c).to(kind), mask, EVEN)
        _store(grad_context + where, by_context.to(kind), mask, EVEN)
        _store(grad + where, by_gate.to(kind), mask, EVEN)
        gate_sum += by_gate
        context_sum += by_context
    partial = sums + tl.program_id(1).to(tl.int64) * 2 * width + n
    tl.store(partial, tl.sum(gate_sum, 0), mask=n < width)
    tl.store(partial + width, tl.sum(context_sum, 0), mask=n < width)
