"""The cost of a model, without building it: parameters, FLOPs per token, memory per sequence."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from gss.config import ModelConfig
from gss.model import NothingDrawn, build_layer
from gss.nn.dense import norm
from gss.nn.state_space import StateSpace


@dataclass(frozen=True)
class Part:
    """A kind of layer (or the embedding, or the last norm) in a model."""

    name: str
    count: int
    parameters: int
    """Of all `count` of them."""
    state_space: int = 0
    """How many of these are state-space parameters."""


@dataclass(frozen=True)
class Accounts:
    """A model's costs, by part where that is informative."""

    parts: tuple[Part, ...]
    flops: dict[str, int]
    """FLOPs per token of a forward pass, by what they are spent on."""
    state_bytes: int
    """Memory that one sequence's state takes."""
    length: int
    """Sequence length that `flops` and `state_bytes` are for."""

    @property
    def parameters(self) -> int:
        """All of them; the tied embedding once."""
        return sum(part.parameters for part in self.parts)


def account(config: ModelConfig, length: int = 4096) -> Accounts:
    """Parameters by part, FLOPs per token and state bytes per sequence, for sequences of `length` tokens."""
    if length < 1:
        raise ValueError(f"the length must be at least 1, not {length}")
    parts = [Part("embedding (tied)", 1, config.vocab_size * config.width)]
    flops = {"dense": 2 * config.vocab_size * config.width, "mixing": 0}
    state_scalars, counts = 0, 8  # the position
    with torch.device("meta"), NothingDrawn():
        for kind in dict.fromkeys(config.layers):
            layer, count = build_layer(kind, config), config.layers.count(kind)
            spaces = [module for module in layer.modules() if isinstance(module, StateSpace)]
            in_spaces = count * sum(p.numel() for space in spaces for p in space.parameters())
            parts.append(Part(f"{kind} layers", count, count * _parameters(layer), in_spaces))
            weights = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
            flops["dense"] += 2 * weights * count
            flops["mixing"] += math.ceil(count * layer.mixing_flops(length))
            slots = layer.state_slots().values()
            sizes = [[length if size is None else size for size in slot.shape] for slot in slots if not slot.integer]
            state_scalars += count * sum(map(math.prod, sizes))
            counts += count * 8 * sum(slot.integer for slot in slots)
        parts.append(Part("last norm", 1, _parameters(norm(config.width, config))))
    return Accounts(tuple(parts), flops, 4 * state_scalars + counts, length)


def flops_per_token(config: ModelConfig, length: int) -> int:
    """FLOPs per token of a forward pass over sequences of `length`; a training step costs three times as much.

    Dense products and mixing: attention over the keys that a token sees on average, convolutions by FFT. Making
    their kernels is left out: it is paid once per batch, not per token.
    """
    return sum(account(config, length).flops.values())


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
