"""Block-Recurrent Transformers as plain loops over tokens, heads and keys, written from their description.

Slow on purpose: one row, one query, one key at a time, no masks, no blocks, no caches. Weights come from the modules
under test; how they are used is said here again.
"""

import math

import torch
from torch import Tensor

from gss.nn.block_recurrent import LSTMGate, RecurrentLayer, StateCell
from gss.nn.window_attention import WindowBlock


def bucket(distance: int) -> int:
    """32 buckets: distances under 16 have their own, then 16 on a logarithmic scale up to 128, the last beyond."""
    if distance < 16:
        return distance
    return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))


def normed(x: Tensor, scale: Tensor) -> Tensor:
    """RMSNorm with a scale alone."""
    return x / torch.sqrt((x * x).mean() + 1e-6) * scale


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum())


def heads(x: Tensor, count: int) -> list[Tensor]:
    return list(x.reshape(count, -1))


def softmax_sum(logits: list[Tensor], values: list[Tensor], width: int, sink: bool) -> Tensor:
    """Σ softmax·value; a sink is one more term of the denominator, exp(0)."""
    total = torch.zeros(width, dtype=torch.float64)
    denominator = torch.tensor(1.0 if sink else 0.0, dtype=torch.float64)
    for logit, value in zip(logits, values, strict=True):
        total = total + torch.exp(logit) * value
        denominator = denominator + torch.exp(logit)
    return total / denominator


def visible(position: int, window: int, whole_previous: bool) -> range:
    """Positions that a token attends to: never its own."""
    if whole_previous:
        return range(max(0, (position // window - 1) * window), position)
    return range(max(0, position - window), position)


class BlockLoop:
    """One block's tokens so far: its keys and values by position."""

    def __init__(self, block: WindowBlock) -> None:
        self.block = block
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []

    def token(self, x: Tensor, memory: "Memory | None" = None) -> Tensor:
        """The block's output for its next token x [E]."""
        block, attention = self.block, self.block.attention
        position = len(self.keys)
        projected = block.projection.weight @ normed(x, block.norm.weight)
        queries, keys, values, *second = projected.chunk(4 if memory else 3)
        self.keys.append([unit(k) for k in heads(keys, block.heads)])
        self.values.append(heads(values, block.heads))
        attended = []
        for head, query in enumerate(heads(queries, block.heads)):
            logits, seen = [], []
            for other in visible(position, attention.window, attention.whole_previous):
                bias = attention.table[bucket(position - other), head]
                logits.append((unit(query) @ self.keys[other][head] + bias) * attention.scale[head].abs())
                seen.append(self.values[other][head])
            attended.append(softmax_sum(logits, seen, block.head_width, sink=True))
        if memory:
            for head, query in enumerate(heads(second[0], block.heads)):
                logits = [unit(query) @ key[head] * block.state_scale[head].abs() for key in memory.keys]
                attended.append(softmax_sum(logits, [v[head] for v in memory.values], block.head_width, sink=False))
        x = x + block.output.weight @ torch.cat(attended)
        feedforward = block.feedforward
        inner = torch.relu(feedforward.inner.weight @ normed(x, feedforward.norm.weight))
        return x + feedforward.outer.weight @ inner


class Memory:
    """Keys and values of the state's vectors: normed, then told apart by their ids."""

    def __init__(self, cell: StateCell, vectors: list[Tensor]) -> None:
        self.identified = [normed(v, cell.norm.weight) + cell.identity[i] for i, v in enumerate(vectors)]
        both = [(cell.keys_values.weight @ v).chunk(2) for v in self.identified]
        self.keys = [[unit(k) for k in heads(key, cell.heads)] for key, _ in both]
        self.values = [heads(value, cell.heads) for _, value in both]


def update(
    cell: StateCell, vectors: list[Tensor], keys: list[list[Tensor]], values: list[list[Tensor]]
) -> list[Tensor]:
    """The vectors after attending to themselves and to tokens with these keys and values."""
    memory = Memory(cell, vectors)
    after = []
    for vector, identified in zip(vectors, memory.identified, strict=True):
        own, over_tokens = (cell.queries.weight @ identified).chunk(2)
        attended = []
        for queries, scale, seen_keys, seen_values in (
            (own, cell.scale, memory.keys, memory.values),
            (over_tokens, cell.token_scale, keys, values),
        ):
            for head, query in enumerate(heads(queries, cell.heads)):
                logits = [unit(query) @ key[head] * scale[head].abs() for key in seen_keys]
                attended.append(softmax_sum(logits, [v[head] for v in seen_values], cell.head_width, sink=False))
        after.append(gated(cell, vector, torch.cat(attended)))
    return after


def gated(cell: StateCell, vector: Tensor, attended: Tensor) -> Tensor:
    if cell.hidden is None:  # skip
        hidden, proposed = attended, cell.output.weight @ attended
    else:  # single
        hidden = torch.relu(cell.hidden.weight @ attended)
        proposed = torch.tanh(cell.output.weight @ hidden)
    gate = cell.gate
    if isinstance(gate, LSTMGate):
        forget = torch.sigmoid(gate.forget.weight @ hidden + gate.forget.bias + 1)
        admit = torch.sigmoid(gate.input.weight @ hidden + gate.input.bias - 1)
        return vector * forget + proposed * admit
    keep = torch.sigmoid(gate.bias)
    return keep * vector + (1 - keep) * proposed


def stack(layer: RecurrentLayer, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs [L, E] for one row x [L, E] from its start, and the vectors after it."""
    window = layer.window
    loops = [BlockLoop(block) for block in layer.blocks]
    vectors = list(layer.cell.initial)
    outputs = []
    for position, token in enumerate(x):
        memory = Memory(layer.cell, vectors)
        for loop in loops:
            token = loop.token(token, memory)
        outputs.append(token)
        if (position + 1) % window == 0:
            writer = loops[layer.writer]
            vectors = update(layer.cell, vectors, writer.keys[-2 * window :], writer.values[-2 * window :])
    return torch.stack(outputs), vectors
