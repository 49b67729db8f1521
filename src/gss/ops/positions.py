"""Positional encodings: sinusoids added to an embedding, and rotations of queries and keys."""

import math

import torch
from torch import Tensor

from gss.ops import fast


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


@fast.operation("gss::rotary_table")
def rotary_table(position: Tensor, length: int, width: int, base: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines [2, B, L, d/2] of the angles at `position` [B] and the positions after it.

    Angles are float64: rounding one to float32 would cost more the farther the position. The table is an operation of
    its own because a compiler would otherwise compute it again, in float64, for every element that it is applied to.
    """
    index = position.unsqueeze(1) + torch.arange(length, device=position.device)
    angle = index.unsqueeze(-1) * rotary_frequencies(width, base, position.device)
    return torch.stack([angle.cos(), angle.sin()]).to(dtype)


@rotary_table.register_fake
def _(position: Tensor, length: int, width: int, base: float, dtype: torch.dtype) -> Tensor:
    return position.new_empty(2, len(position), length, width // 2, dtype=dtype)


def rotated(x: Tensor, position: Tensor | None, base: float) -> Tensor:
    """Vectors [B, L, …, d] turned by their positions, rows starting at `position` [B] (None: 0).

    The pair (x_i, x_{i + d/2}) is turned by base^(−2i/d) radians per token, so that a product of two vectors depends
    on their distance alone.
    """
    length, width = x.shape[1], x.shape[-1]
    if position is None:
        position = torch.zeros(1, dtype=torch.int64, device=x.device)
    precise = torch.promote_types(x.dtype, torch.float32)
    table = rotary_table(position, length, width, base, precise)
    cos, sin = table.reshape(2, len(position), length, *[1] * (x.ndim - 3), width // 2).unbind()
    first, second = x.to(precise).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
