"""The state of a diagonal state space: what it adds to a piece, what a piece leaves, and a single step.

The state s [B, H, N] is the complex sum Σ_j Ā^j u_{k−j} after token k; with the read-out C·B̄ the output is
Re Σ_n (C·B̄)_n s_n. All three functions are exact: a sequence cut anywhere gives the output of the whole.
"""

import torch
from torch import Tensor

from gss.ops.vandermonde import evaluate, project


def carried_output(state: Tensor, readout: Tensor, log_a: Tensor, length: int) -> Tensor:
    """What a state from before the piece adds to its outputs: [B, L, H]."""
    batch, channels, _ = state.shape
    weights = readout * transition(log_a, readout.dtype) * state  # the first token sees the state one step old
    if log_a.shape[0] == 1:
        rows = evaluate(weights.flatten(0, 1).unsqueeze(0), log_a, length)
        return rows.view(batch, channels, length).transpose(1, 2)
    return evaluate(weights.transpose(0, 1), log_a, length).permute(1, 2, 0)


def final_state(signal: Tensor, log_a: Tensor, state: Tensor | None) -> Tensor:
    """The state after a piece [B, L, H], given the one before it (None: zero): one matrix product."""
    batch, length, channels = signal.shape
    if log_a.shape[0] == 1:
        rows = signal.transpose(1, 2).reshape(1, batch * channels, length).flip(-1)
        added = project(rows, log_a).view(batch, channels, -1)
    else:
        added = project(signal.permute(2, 0, 1).flip(-1), log_a).transpose(0, 1)
    if state is None:
        return added
    return carried_state(state, log_a * length) + added


def carried_state(state: Tensor, log_decay: Tensor) -> Tensor:
    """exp(log_decay) · state, multiplied in float64 on a stored state of lower precision.

    Roundings then average out over millions of tokens, where a rounded factor would turn and shrink a slow mode the
    same wrong way each time and drift in proportion to their number.
    """
    return (torch.exp(log_decay) * state).to(state.dtype)


def step(signal: Tensor, state: Tensor, readout: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """One token: signal [B, H], state [B, H, N], a = Ā [G, N] complex128 → output [B, H] and the next state.

    The update is float64 arithmetic on a stored state of lower precision, as in `carried_state`.
    """
    state = torch.addcmul(signal.unsqueeze(-1).to(a.dtype), a, state).to(state.dtype)
    output = torch.linalg.vecdot(readout.conj().expand_as(state), state).real
    return output, state


def transition(log_a: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(log_a) in `dtype`, the exponential itself taken in float64."""
    return torch.exp(log_a).to(dtype)
