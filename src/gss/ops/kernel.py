"""From state-space parameters to the convolution kernel.

The continuous system x' = λx + u, y = Re(C x) with diagonal λ becomes x_k = Ā x_{k−1} + B̄ u_k, so the kernel is
K_k = Re Σ_n C_n B̄_n Ā_n^k. What this module hands on is the pair (log Ā, C·B̄): powers of Ā are taken from its
logarithm, and B̄ is folded into the read-out so that the state itself is the plain sum Σ_j Ā^j u_{k−j}.

Parameters are small (N or H·N numbers), so this arithmetic is done in float64 whatever the model's precision: a
rounding of λ in float32 would be an error of a tenth of a radian at position 65,536.
"""

import torch
from torch import Tensor

from gss.choices import DISCRETIZATIONS
from gss.ops.vandermonde import evaluate


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
