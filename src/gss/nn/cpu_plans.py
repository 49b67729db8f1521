"""How layers decode on a CPU where their whole step is one call of C (`gss.ops.cpu`)."""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gss.nn.decode_plans import StateSpacePlan
from gss.nn.decoding import Block
from gss.nn.quantized import packed_weight
from gss.nn.state import LayerState
from gss.ops import cpu
from gss.ops.products import MOST_ROWS, matrix, suits

if TYPE_CHECKING:
    from gss.nn.gss import GSSLayer


class CompiledGSSPlan(StateSpacePlan):
    """A GSS layer whose steps are one call of C, for a few rows on a CPU; others take the usual way."""

    def __init__(self, layer: "GSSLayer", state: LayerState, block: Block) -> None:
        super().__init__(layer, layer.spaces(), state, block)
        self._space = self._spaces["modes"]
        dense = [layer.inner, layer.gate, layer.context, layer.output]
        norms = [layer.norm, layer.inner_norm]
        packed = [packed_weight(each) for each in dense]
        # What the structure points to is kept alive by the layer and the state space.
        self._struct = cpu.Layer(
            *(cpu.Norm(isinstance(n, nn.LayerNorm), n.eps, *map(cpu.pointer, (n.weight, _bias(n)))) for n in norms),
            *(matrix(weight, each.bias) for weight, each in zip(packed, dense, strict=True)),
            block.size,
            self._space.reversed_taps.data_ptr(),
        )

    @staticmethod
    def fits(layer: "GSSLayer") -> bool:
        """Whether the C functions can do this layer, and are there."""
        dense = [layer.inner, layer.gate, layer.context, layer.output]
        plain = layer.norm.weight.device.type == "cpu" and layer.norm.weight.dtype == torch.float32
        widths = all(suits(packed_weight(each)) for each in dense)
        return plain and layer.activation == "gelu" and widths and cpu.library() is not None

    def step(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        found = cpu.library()
        if found is None or batch * length > MOST_ROWS or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().step(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        tensors = (*self._space.buffers_of_rows(), x, y)
        found.gss_layer(ctypes.byref(self._struct), batch, length, self._block.read, *map(cpu.pointer, tensors))
        return y


def _bias(norm: nn.LayerNorm | nn.RMSNorm) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None
