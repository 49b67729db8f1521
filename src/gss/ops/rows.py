"""A state space on long signals in reduced precision, on a GPU: rows of a few thousand tokens, and states between.

Each row is convolved as if nothing came before it. What did come before reaches it through the state at its start,
the same way that a carried state reaches a piece. So the cost of a token does not grow with the length, and a
signal as short as one row, in training, needs no state at all.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gss.ops.gpu import fft
from gss.ops.gpu.transpose import contiguous
from gss.ops.kernel import kernel
from gss.ops.recurrence import carried_output, final_state, transition


def mix(
    signal: Tensor, readout: Tensor, log_a: Tensor, skip: Tensor, state: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    """y = D·u + K∗u for u [B, H, L] of 16 bits, going on from a state [B, H, N]; and the state after it."""
    batch, _, length = signal.shape
    row = fft.row_length(length)
    taps = kernel(readout, log_a, row, half=True)
    taps = torch.cat([taps[:, :1] + skip.unsqueeze(-1).to(taps.dtype), taps[:, 1:]], dim=-1)
    y = _ConvolveRows.apply(signal, taps)
    if length <= row:
        return _one_row(y, signal, readout, log_a, state, keep_state)

    whole, rest = divmod(length, row)
    count = whole + (rest > 0)
    known = whole if rest or keep_state else whole - 1  # rows whose final state someone needs
    rows = signal[..., : known * row].unflatten(-1, (known, row)).permute(0, 2, 3, 1).flatten(0, 1)  # [B·rows, T, H]
    added = final_state(rows.float(), log_a, None, half=True).unflatten(0, (batch, known))
    turn = transition(log_a * row, added.dtype)
    starts = [added.new_zeros(batch, *added.shape[2:]) if state is None else state]
    for i in range(known):
        starts.append(torch.addcmul(added[:, i], turn, starts[-1]))
    before = torch.stack(starts[:count], dim=1).flatten(0, 1)  # [B·rows, H, N]
    carried = carried_output(before, readout, log_a, row, half=True).unflatten(0, (batch, count))
    carried = carried.permute(0, 3, 1, 2).flatten(2)[..., :length]
    y = (y + carried).to(y.dtype)
    if not keep_state:
        return y, None
    if not rest:
        return y, starts[-1]
    return y, final_state(signal[..., whole * row :].transpose(1, 2).float(), log_a, starts[-1])


def _one_row(
    y: Tensor, signal: Tensor, readout: Tensor, log_a: Tensor, state: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    if state is not None:
        y = (y + carried_output(state, readout, log_a, y.shape[-1]).transpose(1, 2)).to(y.dtype)
    return y, final_state(signal.transpose(1, 2).float(), log_a, state) if keep_state else None


class _ConvolveRows(torch.autograd.Function):
    """Rows of T samples of a signal [B, H, L], each convolved with the taps [H, T] of its channel."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, taps: Tensor) -> Tensor:
        planes, largest = fft.spectrum(taps)
        ctx.save_for_backward(signal, planes, largest)
        return fft.convolve(signal, planes, largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        signal, planes, largest = ctx.saved_tensors
        grad = contiguous(grad)
        grad_signal = fft.convolve(grad, planes, largest, transpose=True) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_signal, None
        row = planes[0, 0].numel() // 2
        return grad_signal, fft.taps_of_spectrum(fft.correlation(signal, grad, row))
