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

FORWARD_TILE = {"BM": 128, "BN": 32, "TILES": 32, "num_warps": 8, "num_stages": 2}
BACKWARD_TILE = {"BM": 128, "BN": 32, "TILES": 32, "num_warps": 8, "num_stages": 2}


def gate_product(
    gate: Tensor, gate_bias: Tensor | None, y: Tensor, context: Tensor, context_bias: Tensor | None, activation: str
) -> Tensor:
    """φ(gate + gate_bias) ∗ (y·contextᵀ + context_bias): [M, F]."""
    product = torch.empty_like(gate)
    _gate_kernel[_grid(gate, FORWARD_TILE)](
        gate, gate_bias, y, context, context_bias, product, *gate.shape, y.shape[1],
        KP=triton.next_power_of_2(y.shape[1]), ACTIVATION=activation, EVEN=_even(gate, y, FORWARD_TILE), **FORWARD_TILE,
    )  # fmt: skip
    return product


def gate_gradients(
    grad: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor,
    context: Tensor,
    context_bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From the gradient of `gate_product`, which is overwritten.

    The gradients by the gate and by y·contextᵀ, the product, and the sums over rows of the two gradients, [2, F].
    """
    grad_context, product = torch.empty_like(gate), torch.empty_like(gate)
    grid = _grid(gate, BACKWARD_TILE)
    sums = torch.empty(grid[0], 2, gate.shape[1], device=gate.device)
    _gate_backward_kernel[grid](
        gate, gate_bias, y, context, context_bias, grad, grad_context, product, sums, *gate.shape, y.shape[1],
        KP=triton.next_power_of_2(y.shape[1]), ACTIVATION=activation, EVEN=_even(gate, y, BACKWARD_TILE),
        **BACKWARD_TILE,
    )  # fmt: skip
    return grad, grad_context, product, sums.sum(0)


def _grid(gate: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    rows, width = gate.shape
    return triton.cdiv(rows, tile["BM"]), triton.cdiv(width, tile["BN"] * tile["TILES"])


def _even(gate: Tensor, y: Tensor, tile: dict[str, int]) -> bool:
    """Whether tiles cover the tensors exactly, so that nothing is masked."""
    rows, width = gate.shape
    narrow = y.shape[1]
    return rows % tile["BM"] == 0 and width % (tile["BN"] * tile["TILES"]) == 0 and narrow & (narrow - 1) == 0


@torch.library.custom_op("gss::gated_output", mutates_args=())
def gated_output(
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor,
    context: Tensor,
    context_bias: Tensor | None,
    output: Tensor,
    activation: str,
) -> Tensor:
    """(φ(gate + b₂) ∗ (y·contextᵀ + b₃))·outputᵀ for gate [M, F], y [M, H], context [F, H], output [E, F]: [M, E]."""
    return gate_product(gate, gate_bias, y, context, context_bias, activation) @ output.T


@torch.library.custom_op("gss::gated_output_backward", mutates_args=())
def gated_output_backward(
    grad: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor,
    context: Tensor,
    context_bias: Tensor | None,
    output: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `gated_output` by gate, y, context and output, and [2, F] by the two biases."""
    grad_gate, grad_context, product, grad_biases = gate_gradients(
        grad @ output, gate, gate_bias, y, context, context_bias, activation
    )
    grad_output = grad.T @ product
    del product
    return grad_gate, grad_context @ context, grad_context.T @ y, grad_output, grad_biases


@gated_output.register_fake
def _(gate, gate_bias, y, context, context_bias, output, activation):
    return gate.new_empty(gate.shape[0], output.shape[0])


@gated_output_backward.register_fake
def _(grad, gate, gate_bias, y, context, context_bias, output, activation):
    grad_biases = gate.new_empty(2, gate.shape[1], dtype=torch.float32)
    return (*(torch.empty_like(t) for t in (gate, y, context, output)), grad_biases)


def _save(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    gate, gate_bias, y, context, context_bias, output = ctx.saved_tensors
    grad_gate, grad_y, grad_context, grad_output, grad_biases = gated_output_backward(
        grad.contiguous(), gate, gate_bias, y, context, context_bias, output, ctx.activation
    )
    grad_gate_bias = None if gate_bias is None else grad_biases[0].to(gate_bias.dtype)
    grad_context_bias = None if context_bias is None else grad_biases[1].to(context_bias.dtype)
    return grad_gate, grad_gate_bias, grad_y, grad_context, grad_context_bias, grad_output, None


gated_output.register_autograd(_backward, setup_context=_save)


@triton.jit
def _below(x):
    """Φ(x), the normal distribution's, from its log-odds, an odd polynomial: |x|·error stays under 3.4e-6."""
    x2 = x * x
    odds = x * (1.59570475 + x2 * (7.28767187e-2 + x2 * (-2.27495591e-4 + x2 * (-6.40984383e-5 + x2 * 2.36050182e-6))))
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * odds))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """φ(x)."""
    if ACTIVATION == "gelu":
        return x * _below(x)
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
        below = _below(x)
        density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
        return x * below, below + x * density
    elif ACTIVATION == "swish":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive
    else:
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
def _tiles(
    gate, gate_bias, left, context, context_bias, where, mask, n, width,
    K: tl.constexpr, KP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of the gate before its activation, and of y·contextᵀ + bias for the rows of y that the program holds."""
    k = tl.arange(0, KP)
    g = _load(gate + where, mask, EVEN).to(tl.float32)
    right = _load(context + n[None, :] * K + k[:, None], (n < width)[None, :] & (k < K)[:, None], EVEN)
    total = tl.dot(left, right)
    if gate_bias is not None:
        g += _load(gate_bias + n, n < width, EVEN).to(tl.float32)[None, :]
    if context_bias is not None:
        total += _load(context_bias + n, n < width, EVEN).to(tl.float32)[None, :]
    return g, total


@triton.jit
def _gate_kernel(
    gate, gate_bias, y, context, context_bias, product, rows, width, K: tl.constexpr, KP: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program keeps its rows of y and goes along the gate's width."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, KP)
    left = _load(y + m[:, None] * K + k[None, :], (m < rows)[:, None] & (k < K)[None, :], EVEN)
    row = m.to(tl.int64)[:, None] * width
    for tile in range(TILES):
        n = (tl.program_id(1) * TILES + tile) * BN + tl.arange(0, BN)
        where = row + n[None, :]
        mask = (m < rows)[:, None] & (n < width)[None, :]
        g, total = _tiles(gate, gate_bias, left, context, context_bias, where, mask, n, width, K, KP, EVEN)
        _store(product + where, (activate(g, ACTIVATION) * total).to(product.dtype.element_ty), mask, EVEN)


@triton.jit
def _gate_backward_kernel(
    gate, gate_bias, y, context, context_bias, grad, grad_context, product, sums, rows, width,
    K: tl.constexpr, KP: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """`grad` holds the product's gradient and receives the gate's."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, KP)
    left = _load(y + m[:, None] * K + k[None, :], (m < rows)[:, None] & (k < K)[None, :], EVEN)
    row = m.to(tl.int64)[:, None] * width
    kind = product.dtype.element_ty
    for tile in range(TILES):
        n = (tl.program_id(1) * TILES + tile) * BN + tl.arange(0, BN)
        where = row + n[None, :]
        mask = (m < rows)[:, None] & (n < width)[None, :]
        d = _load(grad + where, mask, EVEN).to(tl.float32)
        g, total = _tiles(gate, gate_bias, left, context, context_bias, where, mask, n, width, K, KP, EVEN)
        value, slope = _activate_with_slope(g, ACTIVATION)
        _store(product + where, (value * total).to(kind), mask, EVEN)
        by_context = value * d
        _store(grad_context + where, by_context.to(kind), mask, EVEN)
        by_gate = slope * total * d
        _store(grad + where, by_gate.to(kind), mask, EVEN)
        partial = sums + tl.program_id(0).to(tl.int64) * 2 * width + n
        if gate_bias is not None:
            _store(partial, tl.sum(by_gate, 0), n < width, EVEN)
        if context_bias is not None:
            _store(partial + width, tl.sum(by_context, 0), n < width, EVEN)
