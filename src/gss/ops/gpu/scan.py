"""x_i = a·x_{i−1} + v_i over a few rows, all modes side by side: how states pass from row to row in `gss.ops.rows`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 256


def scan(added: Tensor, turn: Tensor, state: Tensor | None) -> Tensor:
    """The states [B, R + 1, H, N] before the first row and after each, for v [B, R, H, N] and a [G, N], complex64."""
    return _Scan.apply(added, turn, state)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, added: Tensor, turn: Tensor, state: Tensor | None) -> Tensor:
        batch, rows, channels, modes = added.shape
        states = torch.empty(batch, rows + 1, channels, modes, dtype=added.dtype, device=added.device)
        if state is None:
            states[:, 0].zero_()
        else:
            states[:, 0] = state
        turn = turn.contiguous()
        _run(added.contiguous(), turn, states)
        ctx.save_for_backward(turn, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        turn, states = ctx.saved_tensors
        # The adjoint is the same recurrence from the last row to the first, with the conjugate of a.
        total = torch.empty_like(states)
        grad = grad.resolve_conj()
        total[:, -1] = grad[:, -1]
        _run(grad[:, :-1].contiguous(), turn, total, backwards=True)
        products = states[:, :-1].conj() * total[:, 1:]
        grad_turn = products.sum((0, 1, 2)).unsqueeze(0) if turn.shape[0] == 1 else products.sum((0, 1))
        return total[:, 1:], grad_turn, total[:, 0] if ctx.needs_input_grad[2] else None


def _run(added: Tensor, turn: Tensor, states: Tensor, backwards: bool = False) -> None:
    batch, rows, channels, modes = added.shape
    width = channels * modes
    _scan_kernel[(triton.cdiv(width, _BLOCK), batch)](
        torch.view_as_real(added), torch.view_as_real(turn), torch.view_as_real(states),
        width, modes if turn.shape[0] == 1 else width,
        ROWS=rows, BACKWARDS=backwards, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scan_kernel(added, turn, states, width, period, ROWS: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr):
    """states[i + 1] = a·states[i] + added[i]; backwards, states[i] = conj(a)·states[i + 1] + added[i]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    batch = tl.program_id(1).to(tl.int64)
    a_re = tl.load(turn + (i % period) * 2, mask=mask, other=0.0)
    a_im = tl.load(turn + (i % period) * 2 + 1, mask=mask, other=0.0)
    if BACKWARDS:
        a_im = -a_im
    first = ROWS if BACKWARDS else 0
    at = states + ((batch * (ROWS + 1) + first) * width + i) * 2
    re = tl.load(at, mask=mask, other=0.0)
    im = tl.load(at + 1, mask=mask, other=0.0)
    for step in range(ROWS):
        row = ROWS - 1 - step if BACKWARDS else step
        source = added + ((batch * ROWS + row) * width + i) * 2
        next_re = a_re * re - a_im * im + tl.load(source, mask=mask, other=0.0)
        im = a_re * im + a_im * re + tl.load(source + 1, mask=mask, other=0.0)
        re = next_re
        at = states + ((batch * (ROWS + 1) + (row if BACKWARDS else row + 1)) * width + i) * 2
        tl.store(at, re, mask=mask)
        tl.store(at + 1, im, mask=mask)
