"""A token of each sequence through a Transformer block on chunks: plain operations on tensors that stay where they are.

So a CUDA graph can hold them between the kernels of GSS layers. A chunk's keys and values have a fixed size; which of
them a token sees is the device's to know. Some 15 small operations a block: what they take is mostly their weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gss.ops.gate import ACTIVATIONS
from gss.ops.gpu.stream import normed

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """A block's weights in bfloat16, with their biases; its norms in float32."""

    norm: Pair
    query_key_value: Pair  # [3·h·d, E]
    output: Pair  # [E, h·d]
    feedforward_norm: Pair
    inner: Pair  # [F, E]
    outer: Pair  # [E, F]
    heads: int
    chunk: int
    activation: str
    centred: bool
    epsilon: float


class Cache:
    """The current chunk of B sequences, and how many tokens each has read."""

    def __init__(self, weights: AttentionWeights, batch: int) -> None:
        weight = weights.output[0]
        size = (batch, weights.heads, weights.chunk, weight.shape[1] // weights.heads)
        self.keys, self.values = (weight.new_zeros(size) for _ in range(2))
        self.length = torch.zeros(batch, dtype=torch.int64, device=weight.device)

    def by_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is of one sequence each, the sequences first."""
        return self.keys, self.values, self.length


def read_token(weights: AttentionWeights, cache: Cache, x: Tensor) -> None:
    """The next token of each sequence through the block: the stream x [B, E] and the cache change in place."""

    def above(norm: Pair) -> Tensor:
        return normed(x, *norm, weights.epsilon, weights.centred, cache.keys.dtype)

    projected = F.linear(above(weights.norm), *weights.query_key_value)
    query, key, value = projected.view(len(x), 3, weights.heads, 1, -1).unbind(1)  # [B, h, 1, d]
    place = (cache.length % weights.chunk).view(-1, 1, 1, 1)
    for held, new in ((cache.keys, key), (cache.values, value)):
        held.scatter_(2, place.expand_as(new), new)
    visible = torch.arange(weights.chunk, device=x.device) <= place
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):  # which a graph can be sure to hold
        attended = F.scaled_dot_product_attention(query, cache.keys, cache.values, attn_mask=visible)
    x += F.linear(attended.flatten(1), *weights.output)
    inner = F.linear(above(weights.feedforward_norm), *weights.inner)
    x += F.linear(ACTIVATIONS[weights.activation](inner), *weights.outer)
    cache.length += 1
