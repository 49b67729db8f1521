"""Causal convolution of a signal [B, L, H] with a kernel per channel [H, L], by FFT, for any length."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def convolve(signal: Tensor, kernel: Tensor) -> Tensor:
    """y[b, k, h] = Σ_{j≤k} kernel[h, j]·signal[b, k−j, h]: [B, L, H]."""
    return _Convolve.apply(signal, kernel)


def fft_length(least: int) -> int:
    """The smallest even number ≥ `least` with no prime factor over 5: every FFT library has a fast path for it."""
    best = 1 << max(1, (least - 1).bit_length())
    five = 1
    while five < best:
        three = five
        while three < best:
            # The smallest power of two, at least 2, that takes three·2^j to `least`.
            needed = -(-least // three)
            best = min(best, three << max(1, (needed - 1).bit_length()))
            three *= 3
        five *= 5
    return best


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
