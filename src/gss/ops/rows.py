"""A state space on long signals in reduced precision, on a GPU: rows of a few thousand tokens, and states between.

Each row is convolved as if nothing came before it. What did come before reaches it through the state at its start,
the same way that a carried state reaches a piece. So the cost of a token does not grow with the length, and a
signal as short as one row, in training, needs no state at all.
"""

import torch
from torch import Tensor

from gss.ops.gpu import fft, powers
from gss.ops.gpu.long import mix_long
from gss.ops.gpu.scan import scan
from gss.ops.gpu.taps import taps
from gss.ops.kernel import kernel
from gss.ops.recurrence import carried_output, final_state, transition
from gss.ops.vandermonde import evaluate, project


def fits(length: int) -> bool:
    """Whether a signal is one row."""
    return length <= fft.LONGEST


def mix_plain(
    signal: Tensor,
    log_decay: Tensor,
    frequency: Tensor,
    readout: Tensor,
    skip: Tensor,
    exponentiated: bool,
    state: Tensor | None = None,
    keep_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y = D·u + K∗u for u [B, H, L] of 16 bits, going on from a state [B, H, N, 2]; and the state after it.

    For the paper's form, from its parameters: operations that a compiler takes as they are, and few of them.
    """
    parameters = (log_decay, frequency, readout, skip, exponentiated)
    if state is None and not keep_state and fits(signal.shape[-1]):
        return fft.convolve_rows(signal, taps(*parameters, fft.row_length(signal.shape[-1]))), None
    y, after, _ = mix_long(signal, *parameters, state, keep_state)
    return y, after if keep_state else None


def mix(
    signal: Tensor, readout: Tensor, log_a: Tensor, skip: Tensor, state: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    """As `mix_plain` from general pieces, for any form; states are complex, [B, H, N].

    Channels with modes of their own are for signals of one row and without states: a table of powers each is large.
    """
    batch, channels, length = signal.shape
    row = fft.row_length(length)
    table = _table(log_a, row)
    y = fft.convolve_rows(signal, _with_skip(kernel(readout, log_a, row, table), skip))
    if length <= row:
        if state is not None:
            y = (y + carried_output(state, readout, log_a, length).transpose(1, 2)).to(y.dtype)
        return y, final_state(signal.transpose(1, 2).float(), log_a, state) if keep_state else None

    whole, rest = divmod(length, row)
    count = whole + (rest > 0)
    known = whole if rest or keep_state else whole - 1  # rows whose final state someone needs
    rows = signal[..., : known * row].reshape(1, -1, row).flip(-1)
    added = project(rows, log_a, table).view(batch, channels, known, -1)
    states = scan(added, transition(log_a[0] * row, added.dtype), state)  # [B, H, known + 1, N]
    seen = (readout * transition(log_a, readout.dtype)).unsqueeze(1)  # the first token sees a state one step old
    echoes = (seen * states[:, :, :count]).view(1, batch * channels * count, -1)
    carried = evaluate(echoes, log_a, row, table).view(batch, channels, count * row)
    y = (y + carried[..., :length]).to(y.dtype)
    if not keep_state:
        return y, None
    after = states[:, :, whole]
    return y, final_state(signal[..., whole * row :].transpose(1, 2).float(), log_a, after) if rest else after


def _table(log_a: Tensor, row: int) -> Tensor | None:
    """Powers to multiply with, where channels share them; a table a channel would be large and used once."""
    return powers.table(log_a, row) if log_a.shape[0] == 1 else None


def _with_skip(taps: Tensor, skip: Tensor) -> Tensor:
    return torch.cat([taps[:, :1] + skip.unsqueeze(-1).to(taps.dtype), taps[:, 1:]], dim=-1)
