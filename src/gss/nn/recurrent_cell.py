"""The recurrent state of a Block-Recurrent Transformer: S vectors that are updated after every window.

    memory = cell.read(vectors)                            # keys and values that tokens attend to
    vectors = cell.update(vectors, memory, (keys, values)) # after a window, over its tokens' keys and values

Knows vectors, keys and values; nothing of windows' bookkeeping or of the tokens' own blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gss.choices import ACTIVATIONS
from gss.config import ModelConfig
from gss.nn.dense import dense, norm
from gss.nn.window_attention import KeysValues, attend, unit


class CellMemory(NamedTuple):
    """What is read of the vectors while a window of tokens is."""

    identified: Tensor
    """The normed vectors with their ids added, [B, S, E]."""
    keys: Tensor
    """[B, S, h, d], of length 1."""
    values: Tensor
    """[B, S, h, d]."""


class FixedGate(nn.Module):
    """s ← g⊙s + (1 − g)⊙z with g = σ(b) learned per channel: an exponential moving average."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.width).normal_(std=0.1))

    def forward(self, vectors: Tensor, proposed: Tensor, hidden: Tensor) -> Tensor:
        keep = torch.sigmoid(self.bias)
        return keep * vectors + (1 - keep) * proposed.to(vectors.dtype)


class LSTMGate(nn.Module):
    """s ← s⊙σ(W_f h + b_f + 1) + z⊙σ(W_i h + b_i − 1): what is kept and what is added depend on what was seen."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.forget = dense(inputs, config.width, config, bias=True)
        self.input = dense(inputs, config.width, config, bias=True)

    def forward(self, vectors: Tensor, proposed: Tensor, hidden: Tensor) -> Tensor:
        forget, admit = (layer(hidden).to(vectors.dtype) for layer in (self.forget, self.input))
        return vectors * torch.sigmoid(forget + 1) + proposed.to(vectors.dtype) * torch.sigmoid(admit - 1)


class StateCell(nn.Module):
    """S learned vectors to start from, the attention that updates them, and the gate that lets the update in.

    Attention to themselves and to the tokens is put side by side, 2E wide. The layout makes the proposal z of it:
    "skip" by one dense layer; "single" by a feed-forward that ends in a tanh. The gate sees the 2E (skip) or the
    feed-forward's hidden activations (single).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        recurrent = config.recurrent
        self.heads = config.attention.heads
        self.head_width = config.attention.head_width or config.width // self.heads
        inner = self.heads * self.head_width
        self.initial = nn.Parameter(torch.empty(recurrent.vectors, config.width).normal_(std=0.1))
        self.identity = nn.Parameter(torch.empty(recurrent.vectors, config.width).normal_())
        self.norm = norm(config.width, config)
        self.keys_values = dense(config.width, inner, config, blocks=2)
        self.queries = dense(config.width, inner, config, blocks=2)  # over the vectors, over the tokens
        self.scale = nn.Parameter(torch.ones(self.heads))
        self.token_scale = nn.Parameter(torch.ones(self.heads))
        self.hidden = None
        hidden = 2 * inner
        if recurrent.layout == "single":
            hidden = config.feedforward_width
            self.hidden = dense(2 * inner, hidden, config)
        self.activation = ACTIVATIONS[config.activation]
        self.output = dense(hidden, config.width, config)
        self.gate = FixedGate(config) if recurrent.gate == "fixed" else LSTMGate(config, hidden)

    def read(self, vectors: Tensor) -> CellMemory:
        """Keys and values of vectors [B, S, E]."""
        identified = self.norm(vectors) + self.identity
        keys, values = self._split(self.keys_values(identified))
        return CellMemory(identified, unit(keys).to(values.dtype), values)

    def update(
        self,
        vectors: Tensor,
        memory: CellMemory,
        own: KeysValues,
        before: KeysValues | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """The vectors after a window; its tokens, and `before` and `previous`, as in `WindowAttention.in_window`.

        Every vector sees every token of both windows: no bias, no causal mask.
        """
        keys, values = (tensor.to(memory.values.dtype) for tensor in own)
        mask = None
        if before is not None:
            keys, values = (
                torch.cat([old.to(new.dtype), new], 1) for old, new in zip(before, (keys, values), strict=True)
            )
            if previous is not None:
                current = torch.arange(keys.shape[1], device=keys.device) >= before[0].shape[1]
                mask = (previous.unsqueeze(1) | current)[:, None, None]
        queries, token_queries = self._split(self.queries(memory.identified))
        over_vectors = attend(unit(queries, self.scale), memory.keys, memory.values)
        over_tokens = attend(unit(token_queries, self.token_scale), keys, values, mask)
        attended = torch.cat([over_vectors.flatten(2), over_tokens.flatten(2)], dim=-1)
        if self.hidden is None:
            return self.gate(vectors, self.output(attended), attended)
        hidden = self.activation(self.hidden(attended))
        return self.gate(vectors, torch.tanh(self.output(hidden)), hidden)

    def no_update(self) -> Tensor:
        """Zero, with a gradient of zero for every parameter that only an update uses."""
        modules = [module for module in (self.queries, self.hidden, self.output, self.gate) if module is not None]
        parameters = [self.scale, self.token_scale, *(p for module in modules for p in module.parameters())]
        return torch.stack([parameter.sum() for parameter in parameters]).sum() * 0

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.unflatten(-1, (2, self.heads, self.head_width)).unbind(2)
        return first, second

    def dense_flops(self) -> tuple[int, int]:
        """Of the dense layers, for all vectors: of a `read` and of an `update`."""
        layers = [module for module in self.modules() if isinstance(module, nn.Linear)]
        reading = 2 * self.keys_values.weight.numel()
        vectors = self.initial.shape[0]
        return vectors * reading, vectors * (2 * sum(layer.weight.numel() for layer in layers) - reading)
