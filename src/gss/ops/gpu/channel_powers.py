"""Sums of powers where the modes are per channel, as in DSS: the fast path of `gss.ops.vandermonde` for them.

With k = 64·q + p, a power is a^(64q)·a^p. A row of taps is thus a matrix of q by p, and either sum is one product with
a table of 64 powers, made on the fly. For 4,096 taps this needs a 32nd of the powers, and only the result is written.
In float32, with phases in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops.gpu.powers import load_pair, powers_of

_TILE = 64
_MODES = 32


def evaluate(weights: Tensor, log_a: Tensor, length: int) -> Tensor:
    """As `gss.ops.vandermonde.evaluate`, float32."""
    groups, rows, modes = weights.shape
    out = torch.empty(groups, rows, length, dtype=torch.float32, device=weights.device)
    _evaluate_kernel[(groups * rows, triton.cdiv(length, _TILE * _TILE))](
        torch.view_as_real(weights.resolve_conj().contiguous()), torch.view_as_real(log_a.contiguous()), out,
        rows, length, modes, T=_TILE, BN=_MODES, num_warps=4,
    )  # fmt: skip
    return out


def project(values: Tensor, log_a: Tensor) -> Tensor:
    """As `gss.ops.vandermonde.project`, float32."""
    groups, rows, length = values.shape
    modes = log_a.shape[-1]
    out = torch.empty(groups, rows, modes, 2, dtype=torch.float32, device=values.device)
    steps = triton.next_power_of_2(triton.cdiv(length, _TILE * _TILE))  # so that few lengths need their own kernel
    _project_kernel[(groups * rows, triton.cdiv(modes, _MODES))](
        values.contiguous(), torch.view_as_real(log_a.contiguous()), out,
        rows, length, modes, STEPS=steps, T=_TILE, BN=_MODES, num_warps=8,
    )  # fmt: skip
    return torch.view_as_complex(out)


@triton.jit
def _evaluate_kernel(weights, log_a, out, rows, length, MODES: tl.constexpr, T: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    p = tl.arange(0, T)
    q = tl.program_id(1) * T + tl.arange(0, T)
    total = tl.zeros((T, T), tl.float32)
    for start in range(0, MODES, BN):
        n = start + tl.arange(0, BN)
        log_re, log_im = load_pair(log_a + 2 * (group * MODES + n), n < MODES)
        w_re, w_im = load_pair(weights + 2 * (row * MODES + n), n < MODES)
        far_re, far_im = powers_of(log_re[None, :], log_im[None, :], (T * q).to(tl.float64)[:, None])
        near_re, near_im = powers_of(log_re[:, None], log_im[:, None], p.to(tl.float64)[None, :])
        left_re = w_re[None, :] * far_re - w_im[None, :] * far_im
        left_im = w_re[None, :] * far_im + w_im[None, :] * far_re
        total = tl.dot(left_re, near_re, total, input_precision="tf32x3")
        total = tl.dot(-left_im, near_im, total, input_precision="tf32x3")
    k = T * q[:, None] + p[None, :]
    tl.store(out + row * length + k, total, mask=k < length)


@triton.jit
def _project_kernel(
    values, log_a, out, rows, length, MODES: tl.constexpr, STEPS: tl.constexpr, T: tl.constexpr, BN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    p = tl.arange(0, T)
    log_re, log_im = load_pair(log_a + 2 * (group * MODES + n), n < MODES)
    near_re, near_im = powers_of(log_re[None, :], log_im[None, :], p.to(tl.float64)[:, None])
    sum_re = tl.zeros((T, BN), tl.float32)
    sum_im = tl.zeros((T, BN), tl.float32)
    for step in range(STEPS):
        q = step * T + tl.arange(0, T)
        k = T * q[:, None] + p[None, :]
        tile = tl.load(values + row * length + k, mask=k < length, other=0.0)
        inner_re = tl.dot(tile, near_re, input_precision="tf32x3")
        inner_im = tl.dot(tile, near_im, input_precision="tf32x3")
        far_re, far_im = powers_of(log_re[None, :], log_im[None, :], (T * q).to(tl.float64)[:, None])
        sum_re += far_re * inner_re - far_im * inner_im
        sum_im += far_re * inner_im + far_im * inner_re
    at = out + (row * MODES + n) * 2
    tl.store(at, tl.sum(sum_re, 0), mask=n < MODES)
    tl.store(at + 1, tl.sum(sum_im, 0), mask=n < MODES)
