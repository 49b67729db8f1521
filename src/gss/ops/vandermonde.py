"""Sums of powers of complex modes: every parallel state-space computation is one of two products.

With a = exp(log_a), one matrix V[n, k] = a_n^k serves all of them:

    evaluate(w, log_a, L)[k] = Re Σ_n w_n a_n^k      modes → taps: a kernel, a carried state's output
    project(v, log_a)[n]     =    Σ_k v_k a_n^k      taps → modes: a piece's final state, a kernel's gradient

Each is the other's adjoint, so each is the other's backward pass too, and V is never built. Writing k = qP + r
splits a^k = a^{qP}·a^r, which turns either product into one real matrix product between R·Q rows and a table of
only P powers, with P near √(R·L). Three consequences: V's memory is never needed, backward included; the number
of complex exponentials falls from N·L to about N·√L; and those few are taken in float64, so that a phase of a
million radians keeps its accuracy in float32 use (the large factor of a phase never meets a float32).

Shapes: G groups of modes, R rows per group: w [G, R, N] complex, v [G, R, L] real, log_a [G, N] complex128.
"""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gss.ops import fast

# Largest number of scalars in one group's tables before groups are taken a few at a time.
_TABLE_BUDGET = 1 << 24


def evaluate(weights: Tensor, log_a: Tensor, length: int) -> Tensor:
    """Re Σ_n weights[g, r, n]·exp(log_a[g, n])^k for k < length: [G, R, L], in the precision of `weights`."""
    return _Evaluate.apply(weights, log_a, length)


def project(values: Tensor, log_a: Tensor) -> Tensor:
    """Σ_k values[g, r, k]·exp(log_a[g, n])^k: [G, R, N] complex, in the precision of `values`."""
    return _Project.apply(values, log_a)


def exponential(z: Tensor) -> Tensor:
    """e^z of complex numbers, for which a GPU's `torch.exp` would be compiled when it is first called."""
    return exponential_by_parts(z) if z.is_cuda else z.exp()


def exponential_by_parts(z: Tensor) -> Tensor:
    """The same by real functions. (The gradient of `torch.polar` is infinite where the result is next to nothing.)"""
    size, angle = z.real.exp(), z.imag
    return torch.complex(size * angle.cos(), size * angle.sin())


def powers(log_a: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """exp(log_a)^k for k < count, [..., N, count] complex, of real and imaginary parts in `dtype`.

    A table of √count exponentials taken in float64, and its product with another one in `dtype`: the error is a
    few roundings of `dtype` at any k.
    """
    tile = max(1, math.isqrt(max(count - 1, 0)) + 1)
    exponents = torch.arange(tile, device=log_a.device), torch.arange(0, count, tile, device=log_a.device)
    inner, outer = (exponential(log_a.unsqueeze(-1) * each).to(dtype.to_complex()) for each in exponents)
    return (outer.unsqueeze(-1) * inner.unsqueeze(-2)).flatten(-2)[..., :count]


def _table(log_a: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`powers` as real numbers [..., 2N, count]: real parts, then imaginary ones."""
    found = powers(log_a, count, dtype)
    return torch.cat([found.real, found.imag], dim=-2)


def _tile(rows: int, length: int) -> int:
    """P: the table of powers has P columns and the rows become R·L/P; their work is equal at √(R·L)."""
    return min(length, 1 << max(0, round(math.log2(math.sqrt(rows * length)))))


def _groups(groups: int, modes: int, tile: int, rows: int) -> Iterator[slice]:
    scalars = 2 * modes * (tile + rows)
    step = max(1, _TABLE_BUDGET // max(scalars, 1))
    return (slice(start, start + step) for start in range(0, groups, step))


def _evaluate(weights: Tensor, log_a: Tensor, length: int) -> Tensor:
    groups, rows, modes = weights.shape
    kernels = _kernels(weights.real, groups)
    if kernels is not None:
        return kernels.evaluate(weights, log_a, length)
    dtype = weights.real.dtype
    tile = _tile(rows, length)
    tiles = -(-length // tile)
    out = weights.real.new_empty(groups, rows, tiles * tile)
    for part in _groups(groups, modes, tile, rows * tiles):
        log_part, weight_part = log_a[part], weights[part]
        if tiles > 1:
            shift = powers(log_part * tile, tiles, dtype).transpose(-1, -2)  # [g, Q, N]
            weight_part = (weight_part.unsqueeze(2) * shift.unsqueeze(1)).flatten(1, 2)  # [g, R·Q, N]
        left = torch.cat([weight_part.real, -weight_part.imag], dim=-1)  # [g, R·Q, 2N]
        table = _table(log_part, tile, dtype)  # [g, 2N, P]
        torch.bmm(left, table, out=out[part].view(-1, rows * tiles, tile))
    return out[..., :length]


def _project(values: Tensor, log_a: Tensor) -> Tensor:
    groups, rows, length = values.shape
    modes = log_a.shape[-1]
    kernels = _kernels(values, groups)
    if kernels is not None:
        return kernels.project(values, log_a)
    tile = _tile(rows, length)
    tiles = -(-length // tile)
    if tiles * tile != length:
        values = torch.nn.functional.pad(values, (0, tiles * tile - length))
    out = torch.empty(groups, rows, modes, dtype=values.dtype.to_complex(), device=values.device)
    for part in _groups(groups, modes, tile, rows * tiles):
        table = _table(log_a[part], tile, values.dtype)  # [g, 2N, P]
        left = values[part].reshape(-1, rows * tiles, tile)
        sums = torch.bmm(left, table.transpose(-1, -2)).unflatten(-1, (2, modes))  # [g, R·Q, 2, N]
        partial = torch.complex(sums[..., 0, :], sums[..., 1, :])
        if tiles > 1:
            shift = powers(log_a[part] * tile, tiles, values.dtype).transpose(-1, -2)
            partial = (partial.unflatten(1, (rows, tiles)) * shift.unsqueeze(1)).sum(2)
        out[part] = partial
    return out


def _kernels(like: Tensor, groups: int) -> ModuleType | None:
    """The GPU kernels for modes per channel; modes that all rows share make products large enough without."""
    if groups == 1 or like.dtype != torch.float32 or not fast.usable(like.device):
        return None
    from gss.ops.gpu import channel_powers

    return channel_powers


def _ramped(values: Tensor) -> Tensor:
    """The rows weighted by k: d/dlog_a of a^k is k·a^k."""
    return values * torch.arange(values.shape[-1], dtype=values.dtype, device=values.device)


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, log_a: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(weights, log_a)
        return _evaluate(weights, log_a, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weights, log_a = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return _project(grad, log_a).conj(), None, None
        plain, ramped = _project(torch.cat([grad, _ramped(grad)], dim=1), log_a).chunk(2, dim=1)
        grad_log_a = (weights * ramped).sum(1, dtype=log_a.dtype).conj()
        return plain.conj(), grad_log_a, None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, log_a: Tensor) -> Tensor:
        ctx.save_for_backward(values, log_a)
        return _project(values, log_a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        values, log_a = ctx.saved_tensors
        grad_values = grad_log_a = None
        if ctx.needs_input_grad[0]:
            grad_values = _evaluate(grad.conj(), log_a, values.shape[-1]).to(values.dtype)
        if ctx.needs_input_grad[1]:
            grad_log_a = (grad * _project(_ramped(values), log_a).conj()).sum(1, dtype=log_a.dtype)
        return grad_values, grad_log_a
