"""The matrix state in chunks, with its gradients, on a GPU: the fast path of `gss.ops.matrix_state`.

As there, powers are relative to the middle c of a chunk: q'_i = q_i·e^{λ*(i−c)}, k'_j = k_j·e^{λ(c−j)} and, for the
state S before it, Ŝ = e^{λ(c+1)}·S. Everything after these rotations is real matrix products,
    Y = tril(Q'K'ᵀ)·V + Q'Ŝ (+ the skip's D·V),     Ŝ of the next chunk = e^{λC}·(Ŝ + K'ᵀV),
and the gradient is, with R that of the bracket,
    dQ' = tril(dY·Vᵀ)·K' + dY·Ŝᵀ,   dK' = tril(dY·Vᵀ)ᵀ·Q' + V·Rᵀ,   dV = tril(Q'K'ᵀ)ᵀ·dY + K'R,
    R of the chunk before = (e^{λC})*·(R + Q'ᵀdY):
the same recurrence backwards, so one kernel computes the states of both directions. It scans the chunks with the state
in registers and writes the state before each. Everything else is one program per chunk, in parallel: a chunk spends its
time waiting for one small product after another, and many chunks can wait at once. States of the forward pass are kept
for the gradient. If there are few rows, heads and tiles of values, the sequence is cut into segments: a first pass
computes what each adds to the state, a small second one passes states along, and the segments then run in parallel.

The gradient of λ is summed where its terms arise, each with the actual distance in tokens (i − j inside a chunk, i + 1
from the state before it, C − 1 − j to the state after it, C across the whole chunk). The shorter form, a sum of
positions times q*·dq − dk*·k, would be a small difference of large numbers for fast modes.

The cost per token and head, for 2N = 64, D = 128, C = 64 and 16 bits:
    forward   1,664 bytes: states 640 (k, v in, 256 out), outputs 1,024 (q, k, v and states in, y out)
    backward  2,432 bytes: the gradient's states 640, all gradients 1,792; 384 more each way with segments
At 4.2 TB/s, for 32 × 4,096 tokens of 4 heads: forward 208 µs, backward 304 µs. FLOPs would take a quarter of that. If
one program kept the state and did everything along a row, it would be 768 and 1,280 bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops import fast
from gss.ops.gpu.matrix_state_kernels import gradient_kernel, output_kernel, pass_kernel, powers_kernel, states_kernel
from gss.ops.matrix_state import CHUNK

PROGRAMS = 256
"""Segments are added until there are about so many programs."""
STATES = {"num_warps": 4, "num_stages": 3}
OUTPUT = {"num_warps": 4, "num_stages": 1}
NARROW_OUTPUT = {"num_warps": 2, "num_stages": 1}
"""Where values are fewer than a tile: four warps multiply by Hopper's instructions for groups of warps, which Triton
3.6 compiled wrongly for 16 values."""
GRADIENT = {"num_warps": 4, "num_stages": 1, "maxnreg": 168}
TILE, OUTPUT_TILE, GRADIENT_TILE = 64, 128, 64
"""Values of a program, and values at a time where it has them all."""


@fast.operation("gss::matrix_scan")
def matrix_scan(
    queries: Tensor, keys: Tensor, values: Tensor, rate: Tensor, skip: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gss.ops.matrix_state.scan` and, for the gradient alone, the states before chunks and powers of e^λ."""
    queries, keys, values = (_dense_rows(t) for t in (queries, keys, values))
    batch, length, heads, _ = keys.shape
    segment, _ = _layout(keys, values)
    table = _powers(rate, segment * CHUNK, length)
    after = torch.empty(_state_shape(keys, values), device=values.device)
    states = _states(keys, values, table, state, after, segment)
    y = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    sizes = _sizes(keys, values, OUTPUT_TILE)
    output_kernel[(states.shape[1], heads, batch)](
        queries, keys, values, table, skip, states, y, *_strides(queries, keys, values), length,
        **sizes, **(OUTPUT if sizes["BD"] == OUTPUT_TILE else NARROW_OUTPUT),
    )  # fmt: skip
    return y, after, states, table


@fast.operation("gss::matrix_scan_backward")
def matrix_scan_backward(
    grad: Tensor, grad_after: Tensor, states: Tensor, table: Tensor, queries: Tensor, keys: Tensor, values: Tensor,
    skip: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients with respect to queries, keys, values, λ [2, h, N] and skip [h] in float64, and the state."""
    grad, queries, keys, values = (_dense_rows(t) for t in (grad, queries, keys, values))
    batch, length, heads, width = keys.shape
    segment, _ = _layout(keys, values)
    chunks = states.shape[1]
    grad_state = torch.empty(_state_shape(keys, values), device=values.device)
    ahead = _states(queries, grad, table, grad_after, grad_state, segment, back=True)
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (queries, keys, values)]
    partial = torch.empty(batch * chunks, heads, width + 1, device=values.device)
    gradient_kernel[(chunks, heads, batch)](
        queries, keys, values, grad, table, skip, states, ahead, *grads, partial,
        *_strides(queries, keys, values, grad), length, **_sizes(keys, values, GRADIENT_TILE), **GRADIENT,
    )  # fmt: skip
    total = partial.sum(0, dtype=torch.float64)
    return *grads, total[:, :-1].unflatten(1, (2, -1)).transpose(0, 1).contiguous(), total[:, -1].clone(), grad_state


@matrix_scan.register_fake
def _(queries, keys, values, rate, skip, state):
    after = values.new_empty(_state_shape(keys, values), dtype=torch.float32)
    table = values.new_empty(keys.shape[2], CHUNK + 4, 4, keys.shape[3] // 2, dtype=torch.float32)
    states = values.new_empty(_states_shape(keys, values), dtype=_kind(values))
    return values.new_empty(values.shape), after, states, table


@matrix_scan_backward.register_fake
def _(grad, grad_after, states, table, queries, keys, values, skip):
    heads, width = keys.shape[2:]
    grads = (t.new_empty(t.shape) for t in (queries, keys, values))
    by_rate = values.new_empty(2, heads, width // 2, dtype=torch.float64)
    by_state = values.new_empty(_state_shape(keys, values), dtype=torch.float32)
    return *grads, by_rate, by_rate.new_empty(heads), by_state


def _save(ctx, inputs, output):
    queries, keys, values, rate, skip, state = inputs
    ctx.kinds = rate.dtype, None if skip is None else skip.dtype, None if state is None else state.dtype
    ctx.save_for_backward(*output[2:], queries, keys, values, skip)
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx, grad, grad_after, *_):
    *grads, by_rate, by_skip, by_state = matrix_scan_backward(grad, grad_after, *ctx.saved_tensors)
    rest = zip((by_rate, by_skip, by_state), ctx.kinds, strict=True)
    return *grads, *(None if kind is None else t.to(kind) for t, kind in rest)


matrix_scan.register_autograd(_backward, setup_context=_save)


def _dense_rows(x: Tensor) -> Tensor:
    """With neighbours in the last dimension that are neighbours in memory; kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in t.stride()[:3]]


def _state_shape(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    return (keys.shape[0], *keys.shape[2:], values.shape[-1])


def _layout(keys: Tensor, values: Tensor) -> tuple[int, tuple[int, ...]]:
    """Chunks of a segment, and the shape of the states at segments' starts: [B, segments, h, D, 2N]."""
    batch, length, heads, width = keys.shape
    tiles = -(-values.shape[-1] // TILE)
    chunks = -(-length // CHUNK)
    wanted = max(1, PROGRAMS // (batch * heads * tiles))
    segment = -(-chunks // min(wanted, chunks))
    return segment, (batch, -(-chunks // segment), heads, values.shape[-1], width)


def _states_shape(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """[B, chunks, h, D, 2N]."""
    batch, length, heads, width = keys.shape
    return batch, -(-length // CHUNK), heads, values.shape[-1], width


def _kind(values: Tensor) -> torch.dtype:
    """Of operands of products. Those of 16 bits are rounded to bfloat16: inside a chunk powers reach e^32."""
    return torch.float32 if values.dtype == torch.float32 else torch.bfloat16


def _sizes(keys: Tensor, values: Tensor, tile: int | None = None) -> dict[str, object]:
    """Constants of the kernels."""
    modes, width = keys.shape[-1] // 2, values.shape[-1]
    kind = tl.float32 if _kind(values) == torch.float32 else tl.bfloat16
    return {
        "MODES": modes,
        "VALUES": width,
        "BN": max(16, triton.next_power_of_2(modes)),
        "BD": min(tile or TILE, max(16, triton.next_power_of_2(width))),
        "C": CHUNK,
        "KIND": kind,
        "PRODUCTS": kind if values.is_cuda else tl.float32,  # the interpreter multiplies no bfloat16
    }


def _grid(starts: Tensor, segments: int | None = None) -> tuple[int, int, int]:
    batch, count, heads, width, _ = starts.shape
    return triton.cdiv(width, TILE), count if segments is None else segments, batch * heads


def _powers(rate: Tensor, segment: int, length: int) -> Tensor:
    """Turns of keys and of queries for each place of a chunk, then four powers of e^λ: [h, C + 4, 4, N]."""
    _, heads, modes = rate.shape
    table = torch.empty(heads, CHUNK + 4, 4, modes, device=rate.device)
    powers_kernel[(heads, triton.cdiv(CHUNK + 4, 8))](
        rate.contiguous(), table, segment, (length - 1) % CHUNK + 1, MODES=modes,
        BN=triton.next_power_of_2(modes), C=CHUNK, ROWS=8, num_warps=4,
    )  # fmt: skip
    return table


def _find_starts(
    written: Tensor, values: Tensor, table: Tensor, state: Tensor | None, starts: Tensor, segment: int,
    back: bool = False,
) -> None:  # fmt: skip
    """Fills `starts`; `back`, from the sequence's end with queries for keys and the output's gradient for values."""
    sizes = _sizes(written, values)
    _, segments, heads, *_ = starts.shape
    if segments > 1:
        states_kernel[_grid(starts, segments - 1)](
            written, values, table, starts, None, None, *_strides(written, values),
            values.shape[1], heads, segment, segments, **sizes, BACK=back, SUMS=True, **STATES,
        )  # fmt: skip
    pass_kernel[_grid(starts, 1)](
        table, None if state is None else state.contiguous(), starts, heads, segments,
        **{name: sizes[name] for name in ("MODES", "VALUES", "BN", "BD", "C")}, BACK=back, num_warps=4,
    )  # fmt: skip


def _states(
    written: Tensor, values: Tensor, table: Tensor, state: Tensor | None, after: Tensor, segment: int,
    back: bool = False,
) -> Tensor:  # fmt: skip
    """The states before each chunk (`back`: after), and in `after` the one at the end, from the one at the start."""
    _, shape = _layout(written, values)
    starts = torch.empty(shape, device=values.device)
    _find_starts(written, values, table, state, starts, segment, back)
    states = torch.empty(_states_shape(written, values), dtype=_kind(values), device=values.device)
    states_kernel[_grid(starts)](
        written, values, table, starts, states, after, *_strides(written, values),
        values.shape[1], starts.shape[2], segment, starts.shape[1],
        **_sizes(written, values), BACK=back, SUMS=False, **STATES,
    )  # fmt: skip
    return states
