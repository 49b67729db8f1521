"""The state space as plainly as the paper writes it, in float64, as a reference for tests.

Only loops and definitions: no FFT, no factoring of powers. Slow on purpose.
"""

import torch
from torch import Tensor


def eigenvalues(log_decay: Tensor, frequency: Tensor, imaginary: str = "exp") -> Tensor:
    """λ = −exp(log_decay) + i·exp(frequency), or + i·frequency when `imaginary` is "plain"."""
    log_decay, frequency = log_decay.double(), frequency.double()
    return torch.complex(-log_decay.exp(), frequency.exp() if imaginary == "exp" else frequency)


def discretize(eigenvalue: Tensor, step: Tensor | float = 1.0, method: str = "zoh") -> tuple[Tensor, Tensor]:
    """Ā and B̄ of x_k = Ā x_{k−1} + B̄ u_k, for B = 1."""
    if method == "zoh":
        transition = torch.exp(eigenvalue * step)
        return transition, (transition - 1) / eigenvalue
    return (1 + eigenvalue * step / 2) / (1 - eigenvalue * step / 2), step / (1 - eigenvalue * step / 2)


def kernel(readout: Tensor, eigenvalue: Tensor, length: int, method: str = "zoh", step: Tensor | float = 1.0) -> Tensor:
    """K[h, k] = Re Σ_n C[h, n]·B̄[n]·Ā[n]^k, each tap from its definition."""
    transition, drive = discretize(eigenvalue, step, method)
    taps = [(readout * drive * transition**k).real.sum(-1) for k in range(length)]
    return torch.stack(taps, dim=-1)  # [H, L]


def convolve(signal: Tensor, kernel: Tensor) -> Tensor:
    """y_k = Σ_{j≤k} K_j u_{k−j} for signal [B, L, H] and kernel [H, L]."""
    length = signal.shape[1]
    outputs = []
    for k in range(length):
        past = signal[:, : k + 1].flip(1)  # u_k, u_{k−1}, …, u_0
        outputs.append((past * kernel[:, : k + 1].T).sum(1))
    return torch.stack(outputs, dim=1)


def recur(
    signal: Tensor, readout: Tensor, transition: Tensor, drive: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; the state is x/B̄ (the drive is applied at the output, as in `gss.ops`)."""
    batch, length, channels = signal.shape
    if state is None:
        state = torch.zeros(batch, channels, readout.shape[-1], dtype=transition.dtype)
    outputs = []
    for k in range(length):
        state = transition * state + signal[:, k, :, None]
        outputs.append((readout * drive * state).real.sum(-1))
    return torch.stack(outputs, dim=1), state
