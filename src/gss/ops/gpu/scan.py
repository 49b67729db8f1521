"""x_i = a·x_{i−1} + v_i over a few rows, all modes side by side: how states pass from row to row in `gss.ops.rows`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


def scan(added: Tensor, turn: Tensor, state: Tensor | None) -> Tensor:
    """The states [B, H, R + 1, N] before the first row and after each, for v [B, H, R, N] and a [N], complex64."""
    return _Scan.apply(added, turn, state)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, added: Tensor, turn: Tensor, state: Tensor | None) -> Tensor:
        batch, channels, rows, modes = added.shape
        states = torch.empty(batch, channels, rows + 1, modes, dtype=added.dtype, device=added.device)
        states[:, :, 0] = 0 if state is None else state
        _run(added.contiguous(), turn, states)
        ctx.save_for_backward(turn, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        turn, states = ctx.saved_tensors
        # The adjoint is the same recurrence from the last row to the first, with the conjugate of a.
        grad = grad.resolve_conj()
        total = torch.empty_like(states)
        total[:, :, -1] = grad[:, :, -1]
        _run(grad[:, :, :-1].contiguous(), turn, total, backwards=True)
        grad_turn = (states[:, :, :-1].conj() * total[:, :, 1:]).sum((0, 1, 2))
        return total[:, :, 1:], grad_turn, total[:, :, 0] if ctx.needs_input_grad[2] else None


def _run(added: Tensor, turn: Tensor, states: Tensor, backwards: bool = False) -> None:
    batch, channels, rows, modes = added.shape
    block = min(512, triton.next_power_of_2(modes))
    _scan_kernel[(batch * channels, triton.cdiv(modes, block))](
        torch.view_as_real(added), torch.view_as_real(turn.contiguous()), torch.view_as_real(states),
        modes, ROWS=rows, BACKWARDS=backwards, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scan_kernel(added, turn, states, modes, ROWS: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr):
    """states[i + 1] = a·states[i] + added[i]; backwards, states[i] = conj(a)·states[i + 1] + added[i]."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < modes
    channel = tl.program_id(0).to(tl.int64)
    a_re = tl.load(turn + n * 2, mask=mask, other=0.0)
    a_im = tl.load(turn + n * 2 + 1, mask=mask, other=0.0)
    if BACKWARDS:
        a_im = -a_im
    at = states + ((channel * (ROWS + 1) + (ROWS if BACKWARDS else 0)) * modes + n) * 2
    re = tl.load(at, mask=mask, other=0.0)
    im = tl.load(at + 1, mask=mask, other=0.0)
    for step in range(ROWS):
        row = ROWS - 1 - step if BACKWARDS else step
        source = added + ((channel * ROWS + row) * modes + n) * 2
        next_re = a_re * re - a_im * im + tl.load(source, mask=mask, other=0.0)
        im = a_re * im + a_im * re + tl.load(source + 1, mask=mask, other=0.0)
        re = next_re
        at = states + ((channel * (ROWS + 1) + (row if BACKWARDS else row + 1)) * modes + n) * 2
        tl.store(at, re, mask=mask)
        tl.store(at + 1, im, mask=mask)
