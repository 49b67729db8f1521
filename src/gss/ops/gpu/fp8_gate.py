"""The gate with its products in 8 bits: the fast path of `gss.ops.gate` when training in fp8.

    g = x·W₂ᵀ + b₂,   c = y·W₃ᵀ + b₃,   p = φ(g) ∗ c,   out = p·W₄ᵀ

All of this is one operation, because a kernel that writes a tensor of width F should also cast it. The forward kernel
has whole rows, so each row of p gets a unit from its own largest magnitude. The backward kernel works on tiles, because
the products with respect to weights need columns, and takes its units from bounds:
    |∂p| ≤ max‖∂out‖·max‖W₄'s column‖ ≤ max‖∂out‖·√E·max|W₄|,   |∂g| ≤ |∂p|·max|φ'|·max|c|,   |∂c| ≤ |∂p|·max|φ(g)|,
the maxima of c, φ(g) and p come from the forward kernel. These bounds may be many times too large, but e5m2 has
the range for that. Saved for the backward pass: g and y in 16 bits, x in 8. yW₃ᵀ is recomputed rather than stored.
A gated feed-forward layer is such a gate with x as its y. A plain one has neither y nor W₃, and c is 1.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops import fast
from gss.ops.gpu import fp8
from gss.ops.gpu.fp8 import (
    E4M3,
    E5M2,
    MOST,
    Narrow,
    cast,
    in_units,
    narrowed,
    product,
    rounded_up,
    store_columns,
    store_row,
    unit_of,
    with_row,
)
from gss.ops.gpu.gate import _activate_with_slope, _load, _store

ROWS = {"STEPS": 16, "num_warps": 16}
"""Rows of a program forward."""
TILE = {"BM": 64, "BN": 64, "STEPS": 8, "num_warps": 4, "maxnreg": 168}
"""And tiles backward, one below the other."""
WIDEST = 8192
"""A row of the gate has to fit into the registers of a program."""
_SLACK = 1.25
"""Rounding to 8 bits makes a gradient and a weight larger, by up to 1/8 and 1/16."""


def fits(gate: int, *widths: int) -> bool:
    """Whether a gate of a width can be computed here, from inputs and to outputs of others."""
    return gate <= WIDEST and fp8.fits(gate, *widths)


@fast.operation("gss::fp8_gate")
def _forward(
    x: Tensor,
    most: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor | None,
    context: Tensor | None,
    context_bias: Tensor | None,
    output: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out [M, E] for x [M, E] and its largest magnitude, W₂ [F, E], y [M, H], W₃ [F, H], W₄ [E, F] and biases; then
    what the gradient needs: g, x's columns and unit, the maxima of |c| and |φ(g)|, p's unit."""
    x8, w2, w4 = cast(x.contiguous(), most), narrowed(gate), narrowed(output)
    g = product(x8.rows, w2.rows, x8.unit, w2.unit)
    c = None if y is None or context is None else _context(narrowed(y), narrowed(context))
    rows, width = g.shape
    p = torch.empty(rows, width, dtype=E4M3, device=g.device)
    units = torch.empty(triton.cdiv(rows, 256) * 256, 1, device=g.device)[:rows]  # its product may read whole tiles
    programs, block = triton.cdiv(rows, ROWS["STEPS"]), triton.next_power_of_2(width)
    extremes = torch.empty(programs, 2, device=g.device)
    _rows_kernel[(programs,)](
        g, c, gate_bias, context_bias, p, units, extremes, rows, width, LIMIT=MOST[E4M3], ACTIVATION=activation,
        EVEN=rows % ROWS["STEPS"] == 0 and width == block, BLOCK=block, **ROWS,
    )  # fmt: skip
    out = product(p, w4.rows, units, w4.unit.expand(1, output.shape[0]).contiguous())
    return out, g, x8.columns, x8.unit, extremes.amax(0), units.amax()


@fast.operation("gss::fp8_gate_backward")
def _gradients(
    grad: Tensor,
    longest: Tensor,
    g: Tensor,
    x_columns: Tensor,
    x_unit: Tensor,
    extremes: Tensor,
    p_unit: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor | None,
    context: Tensor | None,
    context_bias: Tensor | None,
    output: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With respect to x, W₂, y, W₃, W₄ and, [2, F], the two biases, from the gradient of out [M, E], of which `longest`
    is the largest norm of a row."""
    by_out, w2, w4 = cast(grad.contiguous(), longest, E5M2), narrowed(gate), narrowed(output)
    by_p = product(by_out.rows, w4.columns, by_out.unit, w4.unit)
    rows, width = g.shape
    padded = by_out.columns.shape[1]
    by_g = _empty(rows, width, padded, g.device)
    c, by_c = None, None
    if y is not None and context is not None:
        y8, w3 = narrowed(y), narrowed(context)
        c, by_c = _context(y8, w3), _empty(rows, width, padded, g.device)
    p = torch.empty(width, padded, dtype=E4M3, device=g.device)
    high = TILE["BM"] * TILE["STEPS"]
    even = rows % high == 0 and width % TILE["BN"] == 0
    grid = (triton.cdiv(width, TILE["BN"]), triton.cdiv(padded, high))
    sums = torch.empty(grid[1], 2, width, device=g.device)
    reach = _SLACK * MOST[E4M3] * math.sqrt(output.shape[0])
    _tiles_kernel[grid](
        by_p, c, g, gate_bias, context_bias, longest, w4.unit, extremes, p_unit, reach,
        *by_g, *(by_c or (None, None, None)), p, sums, rows, padded, width,
        ACTIVATION=activation, LIMIT=MOST[E4M3], GRADIENT_LIMIT=MOST[E5M2], EVEN=even, **TILE,
    )  # fmt: skip
    del by_p, c
    by_y, by_context = grad.new_empty(0), grad.new_empty(0)
    if by_c is not None:
        by_y = product(by_c.rows, w3.columns, by_c.unit, w3.unit)
        by_context = product(by_c.columns, y8.columns, by_c.unit, y8.unit, fast=False)
    return (
        product(by_g.rows, w2.columns, by_g.unit, w2.unit),
        product(by_g.columns, x_columns, by_g.unit, x_unit, fast=False),
        by_y,
        by_context,
        product(by_out.columns, p, by_out.unit, p_unit, fast=False),
        sums.sum(0),
    )


def _context(y: Narrow, weight: Narrow) -> Tensor:
    """yW₃ᵀ [M, F], without its bias."""
    return product(y.rows, weight.rows, y.unit, weight.unit)


def _empty(height: int, width: int, padded: int, device: torch.device) -> Narrow:
    rows, columns = (torch.empty(size, dtype=E5M2, device=device) for size in ((height, width), (width, padded)))
    return Narrow(rows, columns, torch.empty((), device=device))


@_forward.register_fake
def _(x, most, gate, gate_bias, y, context, context_bias, output, activation):
    rows, width = x.shape
    out, g = (x.new_empty(rows, size, dtype=torch.bfloat16) for size in (width, gate.shape[0]))
    columns = x.new_empty(width, rounded_up(rows), dtype=E4M3)
    unit, extremes, p_unit = (x.new_empty(size, dtype=torch.float32) for size in ((), (2,), ()))
    return out, g, columns, unit, extremes, p_unit


@_gradients.register_fake
def _(grad, longest, g, x_columns, x_unit, extremes, p_unit, gate, gate_bias, y, context, context_bias, output, activation):  # fmt: skip # noqa: E501
    shapes = [(0,) if t is None else t.shape for t in (grad, gate, y, context, output)]
    by_biases = grad.new_empty(2, gate.shape[0], dtype=torch.float32)
    return *(grad.new_empty(shape, dtype=torch.bfloat16) for shape in shapes), by_biases


def _save(ctx, inputs, output):
    _, _, *tensors, ctx.activation = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.kind = inputs[0].dtype


def _backward(ctx, grad, *_):
    saved = ctx.saved_tensors
    *_, gate, gate_bias, y, context, context_bias, output = saved
    longest = torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float32).amax()
    by_x, *by_rest, by_biases = _gradients(grad, longest, *saved, ctx.activation)
    by_gate, by_y, by_context, by_output = (
        None if t is None else found.to(t.dtype) for found, t in zip(by_rest, (gate, y, context, output), strict=True)
    )
    by_gate_bias = None if gate_bias is None else by_biases[0].to(gate_bias.dtype)
    by_context_bias = None if context_bias is None else by_biases[1].to(context_bias.dtype)
    return by_x.to(ctx.kind), None, by_gate, by_gate_bias, by_y, by_context, by_context_bias, by_output, None


_forward.register_autograd(_backward, setup_context=_save)


def gated_output(
    x: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    y: Tensor | None,
    context: Tensor | None,
    context_bias: Tensor | None,
    output: Tensor,
    activation: str,
) -> Tensor:
    """(φ(x·W₂ᵀ + b₂) ∗ (y·W₃ᵀ + b₃))·W₄ᵀ [M, E] in bfloat16, for x [M, E], y [M, H] and weights in any precision.
    Without y the factor in W₃ is 1."""
    most = x.detach().abs().amax(-1).amax()  # a row at a time, which the compiler joins with the norm that makes x
    return _forward(x, most, gate, gate_bias, y, context, context_bias, output, activation)[0]


@triton.jit
def _load_context(context, start, tile, mask, bias, EVEN: tl.constexpr):
    """c; 1 without a context."""
    if context is None:
        return tl.full(tile.shape, 1.0, tl.float32)
    else:
        return _load(context + start + tile, mask, EVEN).to(tl.float32) + bias


@triton.jit
def _rows_kernel(
    gate, context, gate_bias, context_bias, product, units, extremes, rows, width,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p = φ(gate + b₂) ∗ (context + b₃), [M, F], with a unit per row; the maxima of |c| and |φ| in a program's.

    A row is seen as [F / 8, 8]: a maximum over eights needs nothing from another thread.
    """
    n = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = n < width
    b2, b3 = _bias(gate_bias, n, inside), _bias(context_bias, n, inside)
    widest = tl.zeros((BLOCK // 8,), tl.float32)  # |c|
    highest = tl.zeros((BLOCK // 8,), tl.float32)  # |φ|
    for step in range(STEPS):
        m = tl.program_id(0) * STEPS + step
        start = m.to(tl.int64) * width
        mask = inside & (m < rows)
        g = _load(gate + start + n, mask, EVEN).to(tl.float32) + b2
        c = _load_context(context, start, n, mask, b3, EVEN)
        value, _ = _activate_with_slope(g, ACTIVATION)
        if not EVEN:
            value, c = tl.where(mask, value, 0.0), tl.where(mask, c, 0.0)
        widest = tl.maximum(widest, tl.max(tl.abs(c), 1))
        highest = tl.maximum(highest, tl.max(tl.abs(value), 1))
        value *= c
        unit = unit_of(tl.max(tl.max(tl.abs(value), 1), 0), LIMIT)
        tl.store(units + m, unit, mask=m < rows)
        narrow = in_units(value, tl.div_rn(1.0, unit), product.dtype.element_ty, LIMIT)
        _store(product + start + n, narrow, mask, EVEN)
    tl.store(extremes + 2 * tl.program_id(0), tl.max(widest, 0))
    tl.store(extremes + 2 * tl.program_id(0) + 1, tl.max(highest, 0))


@triton.jit
def _steepest(highest, ACTIVATION: tl.constexpr):
    """A bound of |φ'| where |φ| is at most `highest`."""
    if ACTIVATION == "relu2":
        return 2.0 * tl.sqrt(highest)
    elif ACTIVATION == "relu":
        return 1.0
    else:
        return 1.13  # gelu's is 1.1290, swish's 1.0999


@triton.jit
def _bias(bias, n, inside):
    if bias is None:
        return 0.0
    else:
        return tl.load(bias + n, mask=inside, other=0.0)


@triton.jit
def _tiles_kernel(
    grad, context, gate, gate_bias, context_bias, longest, output_unit, extremes, product_unit, reach,
    gate_rows, gate_columns, gate_unit, context_rows, context_columns, context_unit, product, sums,
    rows, padded, width, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, GRADIENT_LIMIT: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """From p's gradient those of gate and context, in rows and columns, with their units; p in columns; and the sums
    of both gradients over the rows of a program."""
    i, j = 4 * tl.arange(0, BM // 4), tl.arange(0, BN)
    n = tl.program_id(0) * BN
    inside = n + j < width
    bound = tl.load(longest) * tl.load(output_unit) * reach  # of |grad|
    widest, highest = tl.load(extremes), tl.load(extremes + 1)
    by_gate_unit = unit_of(bound * widest * _steepest(highest, ACTIVATION), GRADIENT_LIMIT)
    by_context_unit = unit_of(bound * highest, GRADIENT_LIMIT)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(gate_unit, by_gate_unit)
        if context is not None:
            tl.store(context_unit, by_context_unit)
    per_gate_unit, per_context_unit = tl.div_rn(1.0, by_gate_unit), tl.div_rn(1.0, by_context_unit)
    per_unit = tl.div_rn(1.0, tl.load(product_unit))
    b2 = _bias(gate_bias, (n + j)[None, :], inside[None, :])
    b3 = _bias(context_bias, (n + j)[None, :], inside[None, :])
    kind = gate_rows.dtype.element_ty
    gate_sum = tl.zeros((BM // 4, BN), tl.float32)
    context_sum = tl.zeros((BM // 4, BN), tl.float32)
    for step in range(STEPS):
        m = (tl.program_id(1) * STEPS + step) * BM
        gate_words = tl.zeros((BM // 4, BN), tl.int32)
        context_words = tl.zeros((BM // 4, BN), tl.int32)
        product_words = tl.zeros((BM // 4, BN), tl.int32)
        for row in tl.static_range(4):
            start = (m + row).to(tl.int64) * width + n
            tile = i[:, None] * width + j[None, :]
            mask = (m + row + i < rows)[:, None] & inside[None, :]
            d = _load(grad + start + tile, mask, EVEN).to(tl.float32)
            g = _load(gate + start + tile, mask, EVEN).to(tl.float32) + b2
            c = _load_context(context, start, tile, mask, b3, EVEN)
            value, slope = _activate_with_slope(g, ACTIVATION)
            by_context = value * d
            by_gate = slope * c * d
            gate_sum += by_gate
            context_sum += by_context
            across = in_units(by_gate, per_gate_unit, kind, GRADIENT_LIMIT)
            store_row(across, gate_rows, m + row, n, rows, width, EVEN, BM, BN)
            gate_words = with_row(gate_words, across, row)
            if context is not None:
                across = in_units(by_context, per_context_unit, kind, GRADIENT_LIMIT)
                store_row(across, context_rows, m + row, n, rows, width, EVEN, BM, BN)
                context_words = with_row(context_words, across, row)
            across = in_units(value * c, per_unit, product.dtype.element_ty, LIMIT)
            product_words = with_row(product_words, across, row)
        store_columns(gate_words, gate_columns, m, n, padded, width, EVEN, BM, BN)
        if context is not None:
            store_columns(context_words, context_columns, m, n, padded, width, EVEN, BM, BN)
        store_columns(product_words, product, m, n, padded, width, EVEN, BM, BN)
    partial = sums + tl.program_id(1).to(tl.int64) * 2 * width + n + j
    tl.store(partial, tl.sum(gate_sum, 0), mask=inside)
    tl.store(partial + width, tl.sum(context_sum, 0), mask=inside)
