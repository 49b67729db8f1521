"""How layers decode on a CPU with one C call per step (`gss.ops.cpu`), for a few rows in float32.

More rows, autocast and `GSS_FAST=0` use PyTorch, on the same buffers.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gss.nn.attention import TransformerBlock
from gss.nn.attention_plan import AttentionPlan
from gss.nn.decode_plans import RowBuffer, StateSpacePlan
from gss.nn.decoding import Block, DecodePlan
from gss.nn.dense import FeedForward
from gss.nn.gss import GSSLayer
from gss.nn.gss2 import GSS2Layer
from gss.nn.quantized import QuantizedLinear, packed_weight
from gss.nn.state import LayerState
from gss.ops import cpu, matrix_state
from gss.ops.positions import rotary_frequencies
from gss.ops.products import MOST_ROWS, matrix, suits

# Floats in a vector register of the C functions.
_LANES = 16
# `struct cache` of kernels.c: a row's keys and values, the tokens for which it has room, and the tokens read.
_CACHE = cpu.record(*"ppll")


def usable(layer: nn.Module, *activations: str) -> bool:
    """Whether the C functions are available and support a layer's precision, products and activations."""
    dense = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    plain = all(type(module) in (nn.Linear, QuantizedLinear) for module in dense)  # no LoRA
    precise = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in layer.parameters())
    if not (plain and precise) or cpu.library() is None:
        return False
    return all(map(suits, map(packed_weight, dense))) and all(each in cpu.ACTIVATIONS for each in activations)


def _call(name: str, types: str, struct: ctypes.Structure, x: Tensor, *arguments: Any) -> Tensor | None:
    """A layer's outputs [B, L, E] from the C function (struct, B, L, arguments of these types, x, outputs).

    None if PyTorch must compute them.
    """
    found = cpu.function(name, f"pll{types}pp")
    if found is None or len(x) * x.shape[1] > MOST_ROWS or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    found(ctypes.byref(struct), *x.shape[:2], *map(cpu.pointer, (*arguments, x, y)))
    return y


def _tensors(layer: nn.Module) -> list[Tensor]:
    """The tensors that a structure points to, to keep them alive even if the layer gets other ones."""
    return [tensor.detach() for tensor in (*layer.parameters(), *layer.buffers())]


def _norm(norm: nn.LayerNorm | nn.RMSNorm) -> ctypes.Structure:
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    epsilon = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    return cpu.structure(isinstance(norm, nn.LayerNorm), float(epsilon), norm.weight, bias)


def _matrices(*dense: nn.Linear | None) -> list[ctypes.Structure]:
    return [matrix(packed_weight(each), each.bias) if each else cpu.MATRIX() for each in dense]


def _feedforward(layer: FeedForward) -> ctypes.Structure:
    matrices = _matrices(layer.inner, layer.gated, layer.outer)
    return cpu.structure(_norm(layer.norm), *matrices, cpu.ACTIVATIONS[layer.activation])


class CompiledGSSPlan(StateSpacePlan):
    def __init__(self, layer: GSSLayer, state: LayerState, block: Block) -> None:
        super().__init__(layer, state, block)
        self._space, self._kept = self._spaces["modes"], _tensors(layer)
        norms = map(_norm, (layer.norm, layer.inner_norm))
        matrices = _matrices(layer.inner, layer.gate, layer.context, layer.output)
        taps = self._space.reversed_taps
        self._struct = cpu.structure(*norms, *matrices, cpu.ACTIVATIONS[layer.activation], block.size, taps)

    def step(self, x: Tensor) -> Tensor:
        space = self._space
        y = _call("gss_layer", "lpp", self._struct, x, self._block.read, space.inputs.tensor, space.carried.tensor)
        return super().step(x) if y is None else y


class CompiledGSS2Plan(DecodePlan):
    """A GSS2 layer. It keeps the state after every token of a step, so that the last tokens can be taken back."""

    def __init__(self, layer: GSS2Layer, state: LayerState) -> None:
        self._layer, self._kept, self._at = layer, _tensors(layer), 0
        space, taps = layer.state_space, layer.short.taps
        # Both are the state after the first token of a step; `_ahead` has those after further tokens of a single row.
        self._states = RowBuffer(state["modes"].clone())
        self._recent = RowBuffer(self._after_one(state["recent"]))
        self._ahead = state["modes"].new_empty(0)
        rate = space.rate()
        self._factor = torch.stack(matrix_state.powers(rate, 1)).float().contiguous()  # [2, h, N]
        self._energy = space.energy(rate).float().contiguous()  # [h, 2N]
        self._struct = cpu.structure(
            _norm(layer.norm),
            *_matrices(layer.query, layer.key, layer.value, layer.gate, layer.output),
            _feedforward(layer.feedforward),
            *(space.heads, space.modes, state["modes"].shape[-1], len(taps), cpu.ACTIVATIONS[layer.feature_map]),
            *(taps, self._factor, self._energy, space.skip, layer.output_scale),
        )

    @staticmethod
    def fits(layer: GSS2Layer) -> bool:
        widths = (layer.value.out_features // layer.state_space.heads, layer.query.out_features)
        fits = not any(width % _LANES for width in widths)
        return fits and usable(layer, layer.feedforward.activation, layer.feature_map)

    def step(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > 1 and not len(self._ahead):
            self._ahead = self._states.tensor.new_empty(MOST_ROWS - 1, *self._states.tensor.shape[1:])
        buffers = (self._states.tensor, self._ahead, self._recent.tensor)
        y = _call("gss2_layer", "lppp", self._struct, x, self._at, *buffers)
        if y is None:
            assert length == 1
            y, after = self._layer(x, self._now())
            self._put(after)
        self._at = length - 1
        return y

    def ahead(self) -> int:
        return 1 if torch.is_autocast_enabled("cpu") else MOST_ROWS  # only the C function keeps a state per token

    def rewind(self, count: int) -> None:
        self._at -= count

    def state(self) -> LayerState:
        return {name: tensor.clone() for name, tensor in self._now().items()}

    def join(self, state: LayerState) -> None:
        self._settle()
        self._states.add(state["modes"])
        self._recent.add(self._after_one(state["recent"]))

    def keep(self, rows: Sequence[int]) -> None:
        self._settle()
        for held in (self._states, self._recent):
            held.keep(rows)

    def _now(self) -> LayerState:
        modes = self._ahead[self._at - 1 : self._at] if self._at else self._states.tensor
        return {"modes": modes, "recent": self._recent.tensor[:, self._at + 1 : self._at + 1 + self._layer.short.reach]}

    def _put(self, state: LayerState) -> None:
        self._states.tensor.copy_(state["modes"])
        self._recent.tensor.copy_(self._after_one(state["recent"]))

    def _settle(self) -> None:
        """Make the present state the one after the first token of a step."""
        if self._at:
            self._put(self._now())
            self._at = 0

    def _after_one(self, recent: Tensor) -> Tensor:
        return nn.functional.pad(recent, (0, 0, 1, MOST_ROWS - 1))


class CompiledAttentionPlan(AttentionPlan):
    def __init__(self, layer: TransformerBlock, state: LayerState) -> None:
        super().__init__(layer, state)
        self._frequency, self._kept = None, _tensors(layer)
        if layer.rotary_base is not None:
            self._frequency = rotary_frequencies(layer.head_width, layer.rotary_base, torch.device("cpu"))
        self._struct = cpu.structure(
            _norm(layer.norm),
            *_matrices(layer.query_key_value, layer.output),
            _feedforward(layer.feedforward),
            *(layer.heads, self._window, self._chunked, self._frequency),
        )

    @staticmethod
    def fits(layer: TransformerBlock) -> bool:
        plain = layer.query_norm is None and not layer.head_width % _LANES
        return plain and usable(layer, layer.feedforward.activation)

    def step(self, x: Tensor) -> Tensor:
        self._make_room(x.shape[1])
        buffers = [held.tensor for cache in self._caches.values() for held in cache.buffers]
        y = None
        if all(buffer.dtype == torch.float32 for buffer in buffers):
            y = _call("gss_transformer", "p", self._struct, x, self._rows())
        if y is None:
            return super().step(x)
        self._lengths = [length + x.shape[1] for length in self._lengths]
        return y

    def _rows(self) -> Any:
        rows = (_CACHE * len(self._lengths))()
        for room, cache in self._caches.items():
            tensors = [held.tensor for held in cache.buffers]
            size = math.prod(tensors[0].shape[1:]) * tensors[0].element_size()
            for place, row in enumerate(cache.rows):
                places = (tensor.data_ptr() + place * size for tensor in tensors)
                rows[row] = _CACHE(*places, room, self._lengths[row])
        return rows
