"""A diagonal state space whose input and output vectors are chosen by the token: its state is a matrix.

    S_t = e^λ ∗ S_{t−1} + k_t v_tᵀ          S complex, modes × values; λ [N] per head, the same for every token
    y_t = Re(q_t* S_t)                       q_t and k_t complex, one number per mode

Complex numbers are real pairs: the first half of the last dimension of q and k, and of the second to last of S, is
real, the second imaginary. In parallel the sequence is cut into chunks: inside one the map is a masked product of
queries and keys, as in attention; between chunks only the state is carried. `reference` is the recurrence as written
above.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk. Inside one, powers of e^λ are taken from the middle, so that e^(32·|Re λ|) must not overflow."""


def scan(
    queries: Tensor, keys: Tensor, values: Tensor, eigenvalue: Tensor, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """q, k [B, L, h, 2N], v [B, L, h, D], λ [h, N] complex128 and S [B, h, 2N, D] → y [B, L, h, D] and the next S.

    Products are in the precision of the inputs, the state in float32 at least. Powers of e^λ are made in float64: in
    float32 the phase of a fast mode would be off by 1e-5 at a chunk's end already.
    """
    precise = torch.promote_types(values.dtype, torch.float32)
    if state is None:
        state = values.new_zeros(len(values), *keys.shape[2:], values.shape[-1], dtype=precise)
    if values.shape[1] == 1:
        return _step(queries[:, 0], keys[:, 0], values[:, 0], torch.exp(eigenvalue), state)
    whole = values.shape[1] // chunk * chunk
    parts = []
    for part, size in ((slice(0, whole), chunk), (slice(whole, None), values.shape[1] - whole)):
        if values[:, part].shape[1]:
            y, state = _scan_chunks(queries[:, part], keys[:, part], values[:, part], eigenvalue, state, size)
            parts.append(y)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), state


def _step(queries: Tensor, keys: Tensor, values: Tensor, factor: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, h, 2N], v [B, h, D], e^λ [h, N]."""
    state = decayed(state, factor) + keys.unsqueeze(-1) * values.unsqueeze(-2)
    y = queries.to(state.dtype).unsqueeze(-2) @ state  # [B, h, 1, D]
    return y.to(values.dtype).transpose(1, 2), state


def _scan_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, eigenvalue: Tensor, state: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    queries, keys, values = (
        t.unflatten(1, (-1, size)).transpose(2, 3) for t in (queries, keys, values)
    )  # [B, n, h, C, …]
    index = torch.arange(size, device=values.device).unsqueeze(-1)
    rate = eigenvalue.unsqueeze(1)  # [h, 1, N]
    centred = index - size // 2
    # Re((q e^{λ* i})* · k e^{−λ j}) = Re(q* e^{λ(i−j)} k)
    scores = turned(queries, rate.conj() * centred) @ turned(keys, -rate * centred).mT
    y = scores.tril() @ values
    added = (turned(keys, rate * (size - 1 - index)).mT @ values).to(state.dtype)  # [B, n, h, 2N, D]
    before, state = carry(added, torch.exp(eigenvalue * size), state)
    y = y + turned(queries, rate.conj() * (index + 1)) @ before.to(values.dtype)
    return y.transpose(2, 3).flatten(1, 2), state


def turned(x: Tensor, exponent: Tensor) -> Tensor:
    """x [..., C, 2N] times e^exponent, [..., C, N] complex."""
    factor = torch.view_as_real(torch.exp(exponent)).to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = factor.unbind(-1)
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).to(x.dtype)


def decayed(state: Tensor, factor: Tensor) -> Tensor:
    """S [B, h, 2N, D] times a complex factor per mode, [h, N]."""
    cos, sin = torch.view_as_real(factor).to(state.dtype).unsqueeze(-2).unbind(-1)  # [h, N, 1]
    real, imaginary = state.chunk(2, dim=-2)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-2)


@torch.compiler.disable  # a loop whose graph would grow with the sequence
def carry(added: Tensor, factor: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, n, h, 2N, D] and after the last, from what each chunk adds and e^{λC} [h, N]."""
    before = []
    for part in added.unbind(1):
        before.append(state)
        state = decayed(state, factor) + part
    return torch.stack(before, dim=1), state


def reference(
    queries: Tensor, keys: Tensor, values: Tensor, eigenvalue: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same by the recurrence, a token at a time, in complex arithmetic."""
    q, k = (torch.complex(*t.chunk(2, dim=-1)) for t in (queries, keys))
    s = torch.zeros((), dtype=q.dtype) if state is None else torch.complex(*state.chunk(2, dim=-2))
    outputs = []
    for t in range(values.shape[1]):
        s = torch.exp(eigenvalue).unsqueeze(-1) * s + k[:, t].unsqueeze(-1) * values[:, t].unsqueeze(-2)
        outputs.append((q[:, t].conj().unsqueeze(-1) * s).real.sum(-2))
    return torch.stack(outputs, dim=1), torch.cat([s.real, s.imag], dim=-2)
