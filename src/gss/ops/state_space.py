"""The diagonal state space as functions: from parameters to a kernel, its convolution, and the state between pieces.

The continuous system x' = λx + u, y = Re(C x) with diagonal λ becomes x_k = Ā x_{k−1} + B̄ u_k, so the kernel is
K_k = Re Σ_n C_n B̄_n Ā_n^k. Everything here works on the pair (log Ā, C·B̄): powers of Ā are taken from its logarithm,
and B̄ is folded into the read-out. The state s [B, H, N] is thus the plain sum Σ_j Ā^j u_{k−j} after token k, and the
output is Re Σ_n (C·B̄)_n s_n. A sequence gives the same output wherever it is cut.

Parameters are small (N or H·N numbers), so their arithmetic is done in float64 whatever the model's precision: rounding
λ to float32 would cause an error of a tenth of a radian at position 65,536.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gss.choices import DISCRETIZATIONS
from gss.ops.vandermonde import evaluate, exponential, project


def eigenvalues(log_decay: Tensor, frequency: Tensor, imaginary: str) -> Tensor:
    """λ [N], complex128, from its stored real and imaginary halves.

    The real part is −exp(log_decay). `imaginary` is "exp" (the paper: exponentiated) or "plain" (DSS, S4D).
    """
    frequency = frequency.double()
    return torch.complex(-torch.exp(log_decay.double()), frequency.exp() if imaginary == "exp" else frequency)


def discretize(eigenvalue: Tensor, log_step: Tensor | None, method: str) -> tuple[Tensor, Tensor]:
    """(log Ā, B̄), each [G, N] complex128: G = 1 for the unit step (the paper's), H for a step Δ per channel.

    `method` is one of `gss.choices.DISCRETIZATIONS`.
    """
    step = torch.ones(1, 1, dtype=torch.float64, device=eigenvalue.device)
    if log_step is not None:
        step = torch.exp(log_step.double()).unsqueeze(-1)  # [H, 1]
    return DISCRETIZATIONS[method](eigenvalue.unsqueeze(0), step)


def kernel(readout: Tensor, log_a: Tensor, length: int, skip: Tensor | None = None) -> Tensor:
    """K [H, L] for a read-out C·B̄ [H, N] (complex) and modes log Ā [G, N]; with the skip D [H], K₀ + D comes first."""
    weights = readout.unsqueeze(0) if log_a.shape[0] == 1 else readout.unsqueeze(1)  # [1, H, N] or [H, 1, N]
    taps = evaluate(weights, log_a, length).flatten(0, 1)
    if skip is None:
        return taps
    return torch.cat([taps[:, :1] + skip.unsqueeze(-1).to(taps.dtype), taps[:, 1:]], dim=-1)


def convolve(signal: Tensor, kernel: Tensor) -> Tensor:
    """y[b, k, h] = Σ_{j≤k} kernel[h, j]·signal[b, k−j, h]: [B, L, H], by FFT, for any length."""
    return _Convolve.apply(signal, kernel)


@functools.cache
def fft_length(least: int) -> int:
    """The smallest even number ≥ `least` with no prime factor over 5: every FFT library has a fast path for it."""
    odd = (3**i * 5**j for i in range(21) for j in range(14))  # more than enough for any tensor
    return min(each << max(1, (-(-least // each) - 1).bit_length()) for each in odd)


def _spectrum(signal: Tensor, size: int) -> Tensor:
    """FFT over time of [B, L, H], as [B, H, size/2+1]; transposed and padded in one copy."""
    batch, length, channels = signal.shape
    padded = signal.new_empty(batch, channels, size)
    padded[..., :length] = signal.transpose(1, 2)
    padded[..., length:] = 0
    return torch.fft.rfft(padded)


class _Convolve(torch.autograd.Function):
    """Saves the spectra: one FFT of three fewer in the backward pass than starting over."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, kernel: Tensor) -> Tensor:
        length = signal.shape[1]
        # Any size from 2L − 1 up keeps the circular convolution's wrap-around out of the first L outputs.
        size = fft_length(2 * length - 1)
        signal_f = _spectrum(signal, size)
        kernel_f = torch.fft.rfft(kernel, n=size)
        ctx.save_for_backward(signal_f, kernel_f)
        ctx.length, ctx.size = length, size
        return torch.fft.irfft(signal_f * kernel_f, n=size)[..., :length].transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        signal_f, kernel_f = ctx.saved_tensors
        grad_f = _spectrum(grad, ctx.size)
        grad_signal = grad_kernel = None
        if ctx.needs_input_grad[1]:
            correlation = torch.linalg.vecdot(signal_f, grad_f, dim=0)  # Σ_b conj(u)·g
            grad_kernel = torch.fft.irfft(correlation, n=ctx.size)[..., : ctx.length].contiguous()
        if ctx.needs_input_grad[0]:
            grad_f = grad_f.mul_(kernel_f.conj())
            grad_signal = torch.fft.irfft(grad_f, n=ctx.size)[..., : ctx.length].transpose(1, 2).contiguous()
        return grad_signal, grad_kernel


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
    return added if state is None else carried_state(state, log_a * length) + added


def carried_state(state: Tensor, log_decay: Tensor) -> Tensor:
    """exp(log_decay) · state, multiplied in float64 on a stored state of lower precision.

    Roundings then average out over millions of tokens, where a rounded factor would turn and shrink a slow mode the
    same wrong way each time and drift in proportion to their number.
    """
    return (exponential(log_decay) * state).to(state.dtype)


def step(signal: Tensor, state: Tensor, readout: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """One token: signal [B, H], state [B, H, N], a = Ā [G, N] complex128 → output [B, H] and the next state.

    The update is float64 arithmetic on a stored state of lower precision, as in `carried_state`.
    """
    state = torch.addcmul(signal.unsqueeze(-1).to(a.dtype), a, state).to(state.dtype)
    output = torch.linalg.vecdot(readout.conj().expand_as(state), state).real
    return output, state


def transition(log_a: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(log_a) in `dtype`, the exponential itself taken in float64."""
    return exponential(log_a).to(dtype)
