"""A diagonal state space whose input and output vectors are chosen by the token: its state is a matrix.

    S_t = e^λ ∗ S_{t−1} + k_t v_tᵀ          S complex, modes × values; λ [N] per head, the same for every token
    y_t = Re(q_t* S_t)                       q_t and k_t complex, one number per mode

Complex numbers are real pairs: the first half of the last dimension of q and k, and of the second to last of S, is
real, the second imaginary. In parallel the sequence is cut into chunks: inside one the map is a masked product of
queries and keys, as in attention; between chunks only the state is carried. `reference` is the recurrence as written
above.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gss.ops import fast

CHUNK = 64
"""Tokens of a chunk. Inside one, powers of e^λ are taken from the middle, so that e^(64·|Re λ|), in products that are
masked, must not overflow."""


def scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k [B, L, h, 2N], v [B, L, h, D], λ [2, h, N] and S [B, h, 2N, D] → y [B, L, h, D] and the next S.

    λ is its real and its imaginary part, float64; `skip` [h] adds so much of each value to its own output. Products are
    in the precision of the inputs, the state in float32 at least. Powers of e^λ are made in float64: in float32 the
    phase of a fast mode would be off by 1e-5 at a chunk's end already.
    """
    half = fast.half(values) if values.shape[1] > 1 else None
    if half is not None:
        from gss.ops.gpu.matrix_state import matrix_scan

        y, state, *_ = matrix_scan(queries.to(half), keys.to(half), values.to(half), rate, skip, state)
        return y, state
    precise = torch.promote_types(values.dtype, torch.float32)
    if state is None:
        state = values.new_zeros(len(values), *keys.shape[2:], values.shape[-1], dtype=precise)
    if values.shape[1] == 1:
        y, state = _step(queries[:, 0], keys[:, 0], values[:, 0], rate, state)
    else:
        whole = values.shape[1] // chunk * chunk
        parts = []
        for part, size in ((slice(0, whole), chunk), (slice(whole, None), values.shape[1] - whole)):
            if values[:, part].shape[1]:
                y, state = _scan_chunks(queries[:, part], keys[:, part], values[:, part], rate, state, size)
                parts.append(y)
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return y if skip is None else y + skip.to(y.dtype).unsqueeze(-1) * values, state


def _step(queries: Tensor, keys: Tensor, values: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, h, 2N], v [B, h, D].

    The update is float64 arithmetic on a stored state of lower precision, as `state_space.carried_state` explains.
    """
    state = (decayed(state.double(), rate, 1) + keys.unsqueeze(-1) * values.unsqueeze(-2)).to(state.dtype)
    y = queries.to(state.dtype).unsqueeze(-2) @ state  # [B, h, 1, D]
    return y.to(values.dtype).transpose(1, 2), state


def _scan_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, rate: Tensor, state: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    queries, keys, values = (
        t.unflatten(1, (-1, size)).transpose(2, 3) for t in (queries, keys, values)
    )  # [B, n, h, C, …]
    middle = size // 2
    to_middle = middle - torch.arange(size, device=values.device).unsqueeze(-1)
    rate_of = rate.unsqueeze(2)  # [2, h, 1, N]
    # Re((q e^{λ*(i−c)})* · k e^{λ(c−j)}) = Re(q* e^{λ(i−j)} k), with c the chunk's middle
    keys = turned(keys, rate_of, to_middle)
    queries = turned(queries, torch.stack([-rate_of[0], rate_of[1]]), to_middle)
    y = (queries @ keys.mT).tril() @ values
    added = (keys.mT @ values).to(state.dtype)  # [B, n, h, 2N, D]
    before, state = carry(added, powers(rate, size), decayed(state, rate, middle + 1))
    y = y + queries @ before.to(values.dtype)
    return y.transpose(2, 3).flatten(1, 2), decayed(state, rate, size - 1 - middle)


def left(keys: Tensor, values: Tensor, rate: Tensor, chunk: int = 4096) -> Tensor:
    """The S that keys [B, L, h, 2N] and values [B, L, h, D] leave where there was none: `scan` without outputs."""
    precise = torch.promote_types(values.dtype, torch.float32)
    state = None
    for part, value in zip(keys.to(precise).split(chunk, 1), values.to(precise).split(chunk, 1), strict=True):
        size = part.shape[1]
        to_end = torch.arange(size - 1, -1, -1, device=values.device).unsqueeze(-1)
        added = turned(part.transpose(1, 2), rate.unsqueeze(2), to_end).mT @ value.transpose(1, 2)
        state = added if state is None else decayed(state, rate, size) + added
    assert state is not None
    return state


def powers(rate: Tensor, exponent: Tensor | int) -> tuple[Tensor, Tensor]:
    """e^{λ·exponent}, real and imaginary part, in real arithmetic: compilers leave complex numbers alone."""
    size, angle = torch.exp(rate[0] * exponent), rate[1] * exponent
    return size * torch.cos(angle), size * torch.sin(angle)


def turned(x: Tensor, rate: Tensor, exponent: Tensor) -> Tensor:
    """x [..., C, 2N] times e^{λ·exponent}, for λ [2, ..., 1, N] and an exponent [C, 1]."""
    precise = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(precise) for t in powers(rate, exponent))
    return torch.cat(_times(x.chunk(2, dim=-1), cos, sin), dim=-1).to(x.dtype)


def decayed(state: Tensor, rate: Tensor, tokens: int) -> Tensor:
    """S [B, h, 2N, D] that many tokens later."""
    return _multiplied(state, powers(rate, tokens))


def _multiplied(state: Tensor, factor: tuple[Tensor, Tensor]) -> Tensor:
    """S [B, h, 2N, D] times a factor per mode, [h, N] twice."""
    cos, sin = (t.to(state.dtype).unsqueeze(-1) for t in factor)
    return torch.cat(_times(state.chunk(2, dim=-2), cos, sin), dim=-2)


def _times(x: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    real, imaginary = x
    return real * cos - imaginary * sin, real * sin + imaginary * cos


@fast.uncompiled  # a loop whose graph would grow with the sequence
def carry(added: Tensor, factor: tuple[Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, n, h, 2N, D] and with the last's, from what each adds and e^{λC}, [h, N] twice.

    All are as seen from a chunk's middle.
    """
    before = [state]
    for part in added.unbind(1):
        state = before[-1] + part
        before.append(_multiplied(state, factor))
    return torch.stack(before[:-1], dim=1), state


def reference(
    queries: Tensor, keys: Tensor, values: Tensor, rate: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same by the recurrence, a token at a time, in complex arithmetic."""
    factor = torch.exp(torch.complex(*rate)).unsqueeze(-1)
    q, k = (torch.complex(*t.chunk(2, dim=-1)) for t in (queries, keys))
    s = torch.zeros((), dtype=q.dtype) if state is None else torch.complex(*state.chunk(2, dim=-2))
    outputs = []
    for t in range(values.shape[1]):
        s = factor * s + k[:, t].unsqueeze(-1) * values[:, t].unsqueeze(-2)
        outputs.append((q[:, t].conj().unsqueeze(-1) * s).real.sum(-2))
    return torch.stack(outputs, dim=1), torch.cat([s.real, s.imag], dim=-2)
