"""Dense products with weights of 32, 16, 8 or 4 bits: how weights are packed, and which operation multiplies by them.

A product of a few rows reads its whole matrix for a few operations, so a decoding step takes as long as reading the
weights, and half the bytes mean twice the speed. On a CPU, `linear` does this in C at the speed of memory
(`gss.ops.cpu`); elsewhere, and for many rows, the weights are unpacked and multiplied as usual.

8 and 4 bits are integers with a scale for every 64 inputs of an output. They lie in tiles of 16 outputs and, within
one, in slices of 4 inputs, so that a vector register holds one slice; 4-bit slices share their bytes in pairs. In C
the inputs are also rounded to 8 bits with a scale per 64, which adds about as much error as 8-bit weights.
"""

import ctypes
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gss.ops import cpu, fast

MOST_ROWS = 8
"""More rows than this are multiplied the usual way."""
GROUP, _TILE = 64, 16
BITS = {"bf16": 16, "int8": 8, "int4": 4}
"""Weights by name, and their bits."""
_KINDS = {32: 0, 16: 1, 8: 2, 4: 3}  # as kernels.c has them


class Packed(NamedTuple):
    """A matrix [O, I] as it is kept."""

    values: Tensor
    """[O, I] in float32 or bf16; bytes [O / 16, I / 4, 16, 4] (8 bits) or [O / 16, I / 8, 16, 4] (4 bits)."""
    scale: Tensor | None
    """[O / 16, I / 64, 16]."""
    outputs: int

    @property
    def bits(self) -> int:
        """Of each weight."""
        if self.scale is None:
            return 8 * self.values.element_size()
        return self.values.shape[1] // self.scale.shape[1] // 2

    @property
    def inputs(self) -> int:
        """I."""
        return self.values.shape[1] if self.scale is None else GROUP * self.scale.shape[1]


def shapes(outputs: int, inputs: int, bits: int) -> tuple[list[int], list[int] | None]:
    """The shapes of a packed matrix's values and scale."""
    if bits > 8:
        return [outputs, inputs], None
    tiles = -(-outputs // _TILE)
    return [tiles, inputs * bits // 32, _TILE, 4], [tiles, inputs // GROUP, _TILE]


def pack(weight: Tensor, bits: int) -> Packed:
    """A matrix [O, I] in fewer bits; in 8 and 4, I is a multiple of 64."""
    outputs, inputs = weight.shape
    if bits > 8:
        return Packed(weight.to(torch.bfloat16), None, outputs)
    groups = F.pad(weight.detach().float(), (0, 0, 0, -outputs % _TILE)).unflatten(1, (-1, GROUP))
    whole, scale = _rounded(groups, bits)
    slices = (whole + 2 ** (bits - 1)).to(torch.uint8).view(-1, _TILE, inputs // 4, 4).transpose(1, 2)
    if bits == 4:
        low, high = slices.unflatten(1, (-1, 2)).unbind(2)
        slices = low | (high << 4)
    return Packed(slices.contiguous(), scale.view(-1, _TILE, inputs // GROUP).transpose(1, 2).contiguous(), outputs)


def _rounded(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers for groups [..., 64] and the scales [...] with the least square error of a few that were tried."""
    most = 2 ** (bits - 1)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # with its sign, for −8 reaches farther than 7
    best = torch.full_like(extreme, math.inf)
    whole, scale = torch.zeros_like(groups), torch.ones_like(extreme)
    for shrink in (1.0,) if bits == 8 else (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
        tried = torch.where(extreme == 0, 1.0, extreme * (-shrink / most))
        numbers = (groups / tried).round().clamp(-most, most - 1)
        error = (numbers * tried - groups).square().sum(-1, keepdim=True)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
        whole = torch.where(better, numbers, whole)
    return whole, scale.squeeze(-1)


def unpacked(packed: Packed, rows: Tensor | None = None) -> Tensor:
    """The matrix [O, I] in float32 (bf16 as it is), or some rows of it: [..., I]."""
    values, scale, outputs = packed
    if scale is None:
        return values if rows is None else values[rows]
    if rows is None:  # a slice is moved as one integer
        slices = values.view(torch.int32).transpose(1, 2).contiguous().view(torch.uint8).flatten(0, 1)[:outputs]
        scale = scale.transpose(1, 2).flatten(0, 1)[:outputs]
    else:
        tile, lane = rows // _TILE, rows % _TILE
        slices, scale = values[tile, :, lane], scale[tile, :, lane]  # [..., I / 4 or I / 8, 4], [..., I / 64]
    if packed.bits == 4:
        slices = torch.stack([slices & 15, slices >> 4], dim=-2)
    groups = slices.flatten(scale.ndim - 1).unflatten(-1, (-1, GROUP)).float().sub_(2 ** (packed.bits - 1))
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2)


def suits(packed: Packed) -> bool:
    """Whether the C functions can multiply by a matrix."""
    return packed.bits in _KINDS and not packed.inputs % 32 and packed.values.is_contiguous()


def matrix(packed: Packed, bias: Tensor | None) -> ctypes.Structure:
    """A matrix as the C functions take it."""
    pointers = map(cpu.pointer, (packed.values, packed.scale, bias))
    return cpu.MATRIX(_KINDS[packed.bits], packed.inputs, packed.outputs, *pointers)


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a packed weight: the one place that decides how."""
    rows = x.numel() // packed.inputs
    plain = x.device.type == "cpu" and fast.without_gradients() and not torch.is_autocast_enabled("cpu")
    few = plain and 0 < rows <= MOST_ROWS and x.dtype == torch.float32 and suits(packed)
    if few and (found := cpu.function("gss_product", "plpp")) is not None:
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], packed.outputs)
        found(ctypes.byref(matrix(packed, bias)), rows, x.data_ptr(), y.data_ptr())
        return y
    weight = unpacked(packed)
    if plain and rows in (1, 2) and x.dtype == weight.dtype:
        return _by_parts(x, weight, bias, rows)
    return F.linear(x, weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype), bias)


def _by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """The product of one or two rows, the weight seen as a batch of parts.

    BLAS libraries often run such a product on one core, and well under what that core can read (MKL on an AMD EPYC: 10
    of 27 GB/s). This takes another way through them that keeps all cores reading.
    """
    outputs, inputs = weight.shape
    parts = math.gcd(outputs, 2 * torch.get_num_threads())
    left = weight.unflatten(0, (parts, -1))  # [parts, O / parts, I]
    right = x.reshape(rows, inputs).t().expand(parts, inputs, rows)
    y = torch.bmm(left, right) if bias is None else torch.baddbmm(bias.view(parts, -1, 1), left, right)
    return y.view(outputs, rows).t().reshape(*x.shape[:-1], outputs)
