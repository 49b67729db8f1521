"""Position signals: sinusoids that are added to an embedding, and rotations of queries and keys."""

import math

import torch
from torch import Tensor


def sinusoid_frequencies(width: int, device: torch.device) -> Tensor:
    """Radians per token of each sine and cosine, [E/2] float64: wavelengths from 2π to 2π·10⁴ tokens."""
    half = torch.arange(width // 2, dtype=torch.float64, device=device)
    return torch.exp(-half * (math.log(1e4) / max(width // 2 - 1, 1)))


def sinusoids(position: Tensor, width: int) -> Tensor:
    """Signals [B, L, E] for positions [B, L]: sines, then cosines."""
    angle = position.unsqueeze(-1) * sinusoid_frequencies(width, position.device)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def rotary_frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Radians per token of each pair of a head's numbers, [d/2] float64."""
    half = width // 2
    return base ** -(torch.arange(half, dtype=torch.float64, device=device) / half)


def rotated(x: Tensor, position: Tensor | None, base: float) -> Tensor:
    """Vectors [B, L, …, d] turned by their positions, rows starting at `position` [B] (None: 0).

    The pair (x_i, x_{i + d/2}) is turned by base^(−2i/d) radians per token, so that a product of two vectors depends
    on their distance alone. Angles are float64: a rounding of one in float32 would grow with the position.
    """
    length, frequency = x.shape[1], rotary_frequencies(x.shape[-1], base, x.device)
    index = torch.arange(length, device=x.device).unsqueeze(0)
    if position is not None:
        index = index + position.unsqueeze(1)
    angle = (index.unsqueeze(-1) * frequency).reshape(len(index), length, *[1] * (x.ndim - 3), len(frequency))
    precise = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(precise), angle.sin().to(precise)
    first, second = x.to(precise).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
