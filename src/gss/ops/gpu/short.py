"""A short convolution and everything after it up to the matrix state, in one pass: the fast path of `gss.nn.gss2`.

For x [B, L, h·2N + h·2N + h·D], the queries, keys and values of a layer side by side,
    u_t = Σ_k w_k ∗ x_{t−k},   a = φ(u),   q and k = scale ∗ a / rms(a) by head,   v = silu(u),
in three tensors, as the matrix state reads them and as it returns their gradients. These are only a few operations per
number, so the cost is reading and writing: x once and the three once, and in the backward pass x, their gradients and
its own. The intermediate u and a are recomputed.

A program handles some stretches of a sequence for a block of channels (those of a head, or as many values) and scans
them all at once. The tokens before and the gradients after stay in registers; only the few tokens at the ends of
stretches are read twice. The gradient of x_t needs that of u_{t+3}, so it is written three tokens later. Gradients of
taps and scales are partial sums per program, added up outside, so they are the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gss.ops import fast

TAPS, EPSILON = 4, 1e-6
FEATURE_MAPS = ("swish", "relu2")
"""What φ may be."""
STRETCH = 64
"""Tokens of a stretch, a multiple of 4."""
FORWARD = {"ROWS": 8, "num_warps": 4}
BACKWARD = {"ROWS": 8, "num_warps": 4}


@fast.operation("gss::short_mix")
def short_mix(
    x: Tensor, taps: Tensor, scale: Tensor, recent: Tensor | None, heads: int, feature_map: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, L, channels] after `recent` [B, 3, channels] (None: zeros), taps [4, channels], the newest token's first,
    and scale [2h, 2N] → queries and keys [B, L, h, 2N] and values [B, L, h, D].
    """
    x = x.contiguous()
    out = [torch.empty(shape, dtype=x.dtype, device=x.device) for shape in _shapes(x, scale, heads)]
    sizes = _sizes(x, scale, heads)
    recent = None if recent is None else recent.contiguous()
    _forward_kernel[_grid(x, sizes, FORWARD)](
        x, taps.contiguous(), scale.contiguous(), recent, *out, x.shape[1], **sizes, **FORWARD, MAP=feature_map
    )
    return out[0], out[1], out[2]


@fast.operation("gss::short_mix_backward")
def short_mix_backward(
    by_queries: Tensor, by_keys: Tensor, by_values: Tensor, x: Tensor, taps: Tensor, scale: Tensor,
    recent: Tensor | None, feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients with respect to x, taps and scale, the two in float32, and the tokens before."""
    grads = [t.contiguous() for t in (by_queries, by_keys, by_values)]
    x = x.contiguous()
    batch, _, channels = x.shape
    sizes = _sizes(x, scale, by_values.shape[2])
    grid = _grid(x, sizes, BACKWARD)
    by_x = torch.empty_like(x)
    by_recent = torch.empty(batch, TAPS - 1, channels, device=x.device)
    partial = torch.empty(batch * grid[1], TAPS + 1, channels, device=x.device)
    _backward_kernel[grid](
        x, taps.contiguous(), scale.contiguous(), None if recent is None else recent.contiguous(), *grads,
        by_x, by_recent, partial, x.shape[1], **sizes, **BACKWARD, MAP=feature_map,
    )  # fmt: skip
    total = partial.sum(0)
    return by_x, total[:TAPS].clone(), total[TAPS, : scale.numel()].view(scale.shape).clone(), by_recent


@short_mix.register_fake
def _(x, taps, scale, recent, heads, feature_map):
    queries, keys, values = (x.new_empty(shape) for shape in _shapes(x, scale, heads))
    return queries, keys, values


@short_mix_backward.register_fake
def _(by_queries, by_keys, by_values, x, taps, scale, recent, feature_map):
    precise = {"dtype": torch.float32}
    by_recent = x.new_empty(x.shape[0], TAPS - 1, x.shape[2], **precise)
    return (
        x.new_empty(x.shape),
        taps.new_empty(taps.shape, **precise),
        scale.new_empty(scale.shape, **precise),
        by_recent,
    )


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.feature_map = inputs[5]


def _backward(ctx, *grads):
    x, taps, scale, recent = ctx.saved_tensors
    by_x, by_taps, by_scale, by_recent = short_mix_backward(*grads, x, taps, scale, recent, ctx.feature_map)
    before = None if recent is None else by_recent.to(recent.dtype)
    return by_x, by_taps.to(taps.dtype), by_scale.to(scale.dtype), before, None, None


short_mix.register_autograd(_backward, setup_context=_save)


def _shapes(x: Tensor, scale: Tensor, heads: int) -> list[tuple[int, ...]]:
    batch, length, channels = x.shape
    width = scale.shape[1]
    return [(batch, length, heads, size) for size in (width, width, channels // heads - 2 * width)]


def _sizes(x: Tensor, scale: Tensor, heads: int) -> dict[str, int]:
    width = scale.shape[1]
    block = max(32, triton.next_power_of_2(width))
    return {"CHANNELS": x.shape[2], "HEADS": heads, "WIDTH": width, "BC": block, "STRETCH": STRETCH}


def _grid(x: Tensor, sizes: dict[str, int], options: dict[str, int]) -> tuple[int, int, int]:
    heads = 2 * sizes["HEADS"]
    blocks = heads + triton.cdiv(sizes["CHANNELS"] - heads * sizes["WIDTH"], sizes["BC"])
    return blocks, triton.cdiv(x.shape[1], STRETCH * options["ROWS"]), x.shape[0]


@triton.jit
def _place(CHANNELS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr):
    """Of this program's block: whether it is a head's that is normalized, its first channel in x and in a tensor of its
    own, how many channels that has, and which of the block exist.
    """
    block = tl.program_id(0)
    normed = block < 2 * HEADS
    further = (block - 2 * HEADS) * BC
    values: tl.constexpr = CHANNELS - 2 * HEADS * WIDTH
    left = tl.where(normed, WIDTH, values - further)
    column = tl.where(normed, block * WIDTH, 2 * HEADS * WIDTH + further)
    inside = tl.where(normed, block % HEADS * WIDTH, further)
    return normed, column, inside, tl.where(normed, HEADS * WIDTH, values), (tl.arange(0, BC) < left)[None, :]


@triton.jit
def _own(queries, keys, values, HEADS: tl.constexpr):
    """The tensor of this program's block."""
    block = tl.program_id(0)
    return tl.where(block < HEADS, queries, tl.where(block < 2 * HEADS, keys, values))


@triton.jit
def _load(x, token, length, row, exists):
    """A token of every stretch, [ROWS, BC]; zeros where the sequence has none."""
    mask = ((token >= 0) & (token < length))[:, None] & exists
    return tl.load(x + token.to(tl.int64)[:, None] * row, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _before(x, recent, token, length, row, exists):
    """The same for one of the tokens before a stretch."""
    loaded = _load(x, token, length, row, exists)
    if recent is not None:
        loaded += _load(recent, tl.where(token < 0, token + 3, -1), 3, row, exists)
    return loaded


@triton.jit
def _weights(taps, exists, CHANNELS: tl.constexpr):
    w0 = tl.load(taps, mask=exists, other=0.0).to(tl.float32)
    w1 = tl.load(taps + CHANNELS, mask=exists, other=0.0).to(tl.float32)
    w2 = tl.load(taps + 2 * CHANNELS, mask=exists, other=0.0).to(tl.float32)
    return w0, w1, w2, tl.load(taps + 3 * CHANNELS, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _activated(
    x0, x1, x2, x3, w0, w1, w2, w3, normed, WIDTH: tl.constexpr, EPSILON: tl.constexpr, MAP: tl.constexpr
):  # fmt: skip
    """The slope of a at u, 1 / rms(a) [ROWS, 1] and a / rms(a)."""
    u = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
    s = 1.0 / (1.0 + tl.exp(-u))
    a, slope = u * s, s + u * s * (1.0 - s)
    if MAP == "relu2":
        positive = tl.maximum(u, 0.0)
        a, slope = tl.where(normed, positive * positive, a), tl.where(normed, 2.0 * positive, slope)
    inverse = tl.where(normed, tl.rsqrt(tl.sum(a * a, 1) * (1.0 / WIDTH) + EPSILON), 1.0)[:, None]
    return slope, inverse, a * inverse


@triton.jit
def _store(x, token, live, row, exists, out):
    at = x + token.to(tl.int64)[:, None] * row
    tl.store(at, out.to(x.dtype.element_ty), mask=live[:, None] & exists)


@triton.jit
def _forward_kernel(
    x, taps, scale, recent, queries, keys, values, length,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, STRETCH: tl.constexpr,
    ROWS: tl.constexpr, MAP: tl.constexpr, EPSILON: tl.constexpr = EPSILON,
):  # fmt: skip
    normed, column, inside, row, exists = _place(CHANNELS, HEADS, WIDTH, BC)
    batch = tl.program_id(2).to(tl.int64)
    c = tl.arange(0, BC)[None, :]
    x += batch * length * CHANNELS + column
    y = _own(queries, keys, values, HEADS) + batch * length * row + inside
    first = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)) * STRETCH
    w0, w1, w2, w3 = _weights(taps + column + c, exists, CHANNELS)
    factor = tl.load(scale + column + c, mask=exists & normed, other=1.0)
    before = None if recent is None else recent + batch * 3 * CHANNELS + column + c
    p3 = _before(x + c, before, first - 3, length, CHANNELS, exists)
    p2 = _before(x + c, before, first - 2, length, CHANNELS, exists)
    p1 = _before(x + c, before, first - 1, length, CHANNELS, exists)
    for t in range(0, STRETCH, 4):
        token = first + t
        x0 = _load(x + c, token, length, CHANNELS, exists)
        x1 = _load(x + c, token + 1, length, CHANNELS, exists)
        x2 = _load(x + c, token + 2, length, CHANNELS, exists)
        x3 = _load(x + c, token + 3, length, CHANNELS, exists)
        _, _, y0 = _activated(x0, p1, p2, p3, w0, w1, w2, w3, normed, WIDTH, EPSILON, MAP)
        _, _, y1 = _activated(x1, x0, p1, p2, w0, w1, w2, w3, normed, WIDTH, EPSILON, MAP)
        _, _, y2 = _activated(x2, x1, x0, p1, w0, w1, w2, w3, normed, WIDTH, EPSILON, MAP)
        _, _, y3 = _activated(x3, x2, x1, x0, w0, w1, w2, w3, normed, WIDTH, EPSILON, MAP)
        _store(y + c, token, token < length, row, exists, y0 * factor)
        _store(y + c, token + 1, token + 1 < length, row, exists, y1 * factor)
        _store(y + c, token + 2, token + 2 < length, row, exists, y2 * factor)
        _store(y + c, token + 3, token + 3 < length, row, exists, y3 * factor)
        p3, p2, p1 = x1, x2, x3


@triton.jit
def _by_convolved(
    x0, x1, x2, x3, grad, w0, w1, w2, w3, factor, normed, WIDTH: tl.constexpr, EPSILON: tl.constexpr,
    MAP: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to u, and the scale's part."""
    slope, inverse, hat = _activated(x0, x1, x2, x3, w0, w1, w2, w3, normed, WIDTH, EPSILON, MAP)
    by_hat = grad * factor
    along = tl.where(normed, tl.sum(by_hat * hat, 1) * (1.0 / WIDTH), 0.0)[:, None]
    return inverse * (by_hat - hat * along) * slope, grad * hat


@triton.jit
def _backward_kernel(
    x, taps, scale, recent, queries, keys, values, by_x, by_recent, partial, length,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, STRETCH: tl.constexpr,
    ROWS: tl.constexpr, MAP: tl.constexpr, EPSILON: tl.constexpr = EPSILON,
):  # fmt: skip
    """With the gradients of queries, keys and values in their places."""
    normed, column, inside, row, exists = _place(CHANNELS, HEADS, WIDTH, BC)
    batch = tl.program_id(2).to(tl.int64)
    c = tl.arange(0, BC)[None, :]
    x += batch * length * CHANNELS + column
    by_x += batch * length * CHANNELS + column
    by_recent += batch * 3 * CHANNELS + column
    grad = _own(queries, keys, values, HEADS) + batch * length * row + inside
    first = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)) * STRETCH
    w0, w1, w2, w3 = _weights(taps + column + c, exists, CHANNELS)
    factor = tl.load(scale + column + c, mask=exists & normed, other=1.0)
    before = None if recent is None else recent + batch * 3 * CHANNELS + column + c
    p3 = _before(x + c, before, first - 3, length, CHANNELS, exists)
    p2 = _before(x + c, before, first - 2, length, CHANNELS, exists)
    p1 = _before(x + c, before, first - 1, length, CHANNELS, exists)
    d3, d2, d1 = tl.zeros((ROWS, BC), tl.float32), tl.zeros((ROWS, BC), tl.float32), tl.zeros((ROWS, BC), tl.float32)
    s0, s1, s2 = tl.zeros((ROWS, BC), tl.float32), tl.zeros((ROWS, BC), tl.float32), tl.zeros((ROWS, BC), tl.float32)
    s3, by_factor = tl.zeros((ROWS, BC), tl.float32), tl.zeros((ROWS, BC), tl.float32)
    for t in range(0, STRETCH + 4, 4):  # the last round is for what the stretch after has to say of this one's end
        token = first + t
        x0 = _load(x + c, token, length, CHANNELS, exists)
        x1 = _load(x + c, token + 1, length, CHANNELS, exists)
        x2 = _load(x + c, token + 2, length, CHANNELS, exists)
        x3 = _load(x + c, token + 3, length, CHANNELS, exists)
        g0 = _load(grad + c, token, length, row, exists)
        g1 = _load(grad + c, token + 1, length, row, exists)
        g2 = _load(grad + c, token + 2, length, row, exists)
        g3 = _load(grad + c, token + 3, length, row, exists)
        e0, f0 = _by_convolved(x0, p1, p2, p3, g0, w0, w1, w2, w3, factor, normed, WIDTH, EPSILON, MAP)
        e1, f1 = _by_convolved(x1, x0, p1, p2, g1, w0, w1, w2, w3, factor, normed, WIDTH, EPSILON, MAP)
        e2, f2 = _by_convolved(x2, x1, x0, p1, g2, w0, w1, w2, w3, factor, normed, WIDTH, EPSILON, MAP)
        e3, f3 = _by_convolved(x3, x2, x1, x0, g3, w0, w1, w2, w3, factor, normed, WIDTH, EPSILON, MAP)
        if t < STRETCH:
            s0 += e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3
            s1 += e0 * p1 + e1 * x0 + e2 * x1 + e3 * x2
            s2 += e0 * p2 + e1 * p1 + e2 * x0 + e3 * x1
            s3 += e0 * p3 + e1 * p2 + e2 * p1 + e3 * x0
            by_factor += f0 + f1 + f2 + f3
        o0 = d3 * w0 + d2 * w1 + d1 * w2 + e0 * w3
        o1 = d2 * w0 + d1 * w1 + e0 * w2 + e1 * w3
        o2 = d1 * w0 + e0 * w1 + e1 * w2 + e2 * w3
        o3 = e0 * w0 + e1 * w1 + e2 * w2 + e3 * w3
        inner = t > 0  # what lies three tokens before a stretch is another's, or was before the sequence
        _store(by_x + c, token - 3, (token - 3 < length) & inner, CHANNELS, exists, o0)
        _store(by_x + c, token - 2, (token - 2 < length) & inner, CHANNELS, exists, o1)
        _store(by_x + c, token - 1, (token - 1 < length) & inner, CHANNELS, exists, o2)
        _store(by_x + c, token, (token < length) & (t < STRETCH), CHANNELS, exists, o3)
        if t == 0:
            _store(by_recent + c, token, token == 0, CHANNELS, exists, o0)
            _store(by_recent + c, token + 1, token == 0, CHANNELS, exists, o1)
            _store(by_recent + c, token + 2, token == 0, CHANNELS, exists, o2)
        p3, p2, p1 = x1, x2, x3
        d3, d2, d1 = e1, e2, e3
    partial += (batch * tl.num_programs(1) + tl.program_id(1)) * 5 * CHANNELS + column + tl.arange(0, BC)
    here = tl.sum(exists.to(tl.int32), 0) > 0
    tl.store(partial, tl.sum(s0, 0), mask=here)
    tl.store(partial + CHANNELS, tl.sum(s1, 0), mask=here)
    tl.store(partial + 2 * CHANNELS, tl.sum(s2, 0), mask=here)
    tl.store(partial + 3 * CHANNELS, tl.sum(s3, 0), mask=here)
    tl.store(partial + 4 * CHANNELS, tl.sum(by_factor, 0), mask=here)
