"""Block-Recurrent Transformers: blocks on windows that read a recurrent state, which one of the blocks writes.

The vectors of the state are updated once per window: they attend to the tokens of the recurrent block, in this window
and the previous one. Within a window, every reading block attends to the vectors from before the window.
`RecurrentLayer` is a single block between others of any kind ("Rec"). `FeedbackLayer` is a whole stack that runs window
by window ("Feedback"): every block reads the vectors, with keys and values made once by the recurrent block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from gss.choices import ACTIVATIONS
from gss.config import ModelConfig
from gss.nn.context import across_ranks, in_turn
from gss.nn.dense import dense, norm
from gss.nn.documents import each_document_alone
from gss.nn.state import LayerState, Outputs, SequenceLayer, Slot, state_dtype
from gss.nn.window_attention import KeysValues, WindowAttention, WindowBlock, attend, unit
from gss.nn.windows import Windows


class CellMemory(NamedTuple):
    """The vectors as tokens of a window read them."""

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
    """s ← s⊙σ(W_f h + b_f + 1) + z⊙σ(W_i h + b_i − 1): the gates depend on h (see `StateCell`)."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.forget = dense(inputs, config.width, config, bias=True)
        self.input = dense(inputs, config.width, config, bias=True)

    def forward(self, vectors: Tensor, proposed: Tensor, hidden: Tensor) -> Tensor:
        forget, admit = (layer(hidden).to(vectors.dtype) for layer in (self.forget, self.input))
        return vectors * torch.sigmoid(forget + 1) + proposed.to(vectors.dtype) * torch.sigmoid(admit - 1)


class StateCell(nn.Module):
    """S learned initial vectors, the attention that updates them, and the gate of the update.

        memory = cell.read(vectors)                             # keys and values that tokens attend to
        vectors = cell.update(vectors, memory, (keys, values))  # after a window, over its tokens' keys and values

    The vectors attend to themselves and to the tokens; both results are concatenated to 2E. From these the layout
    computes the proposal z: "skip" with one dense layer, "single" with a feed-forward that ends in a tanh. The gate's
    input h is the 2E (skip) or the hidden activations of the feed-forward (single).
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
        identified = self.norm(vectors.to(self.identity.dtype)) + self.identity
        keys, values = self._split(self.keys_values(identified))
        return CellMemory(identified, unit(keys).to(values.dtype), values)

    def update(
        self,
        vectors: Tensor,
        memory: CellMemory,
        own: KeysValues,
        before: KeysValues | None = None,
        previous: bool | Tensor = False,
    ) -> Tensor:
        """The vectors after a window; its tokens, and `before` and `previous`, as in `WindowAttention.in_window`.

        Every vector sees every token of both windows: no bias, no causal mask.
        """
        kind, mask = memory.values.dtype, None
        keys, values = (tensor.to(kind) for tensor in own)
        if before is not None and previous is not False:
            keys, values = (torch.cat([old, new], 1).to(kind) for old, new in zip(before, own, strict=True))
        if isinstance(previous, Tensor):
            current = torch.arange(keys.shape[1], device=keys.device) >= keys.shape[1] - own[0].shape[1]
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


def _dense_weights(block: WindowBlock, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a block's dense layers in another precision, except those that LoRA computes."""
    layers = [(name, layer) for name, layer in block.named_modules() if isinstance(layer, nn.Linear)]
    return {f"{name}.weight": layer.weight.to(dtype) for name, layer in layers if "weight" in layer._parameters}


def _through(block: WindowBlock, weights: dict[str, Tensor], *window: Any) -> tuple[Tensor, KeysValues]:
    """One block on one window, with `weights` in place of some of its parameters."""
    return functional_call(block, weights, window) if weights else block(*window)


class _Work(NamedTuple):
    """The work of a window, as functions of modules and tensors.

    Compiled, one graph of each (or two, if the first window differs) serves all windows, blocks and layers.
    """

    bias: Callable[..., Tensor] = WindowAttention.bias
    read: Callable[..., CellMemory] = StateCell.read
    through: Callable[..., tuple[Tensor, KeysValues]] = _through
    update: Callable[..., Tensor] = StateCell.update


_PLAIN = _Work()


class RecurrentLayer(SequenceLayer):
    """Blocks that run window by window around one recurrent state; `writer` is the block whose tokens update it. By
    default it is a single block between layers of other kinds.

    The state of a sequence: two windows of keys and values per block, the vectors, and the number of tokens read. A row
    that has read nothing starts from the learned vectors, whatever its slot contains. They are therefore part of every
    forward pass, as sharded and replicated training require of parameters.
    """

    def __init__(self, config: ModelConfig, blocks: int = 1, writer: int = 0) -> None:
        super().__init__()
        self.window = config.attention.window
        self.writer = writer
        self.blocks = nn.ModuleList(WindowBlock(config, reads_state=True) for _ in range(blocks))
        self.cell = StateCell(config)
        self._compiled: _Work | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the work of a window with `torch.compile`, but not the loop, whose graph would grow with the length.

        Only for training: without gradients, pieces come in many shapes, each of which would be compiled.
        """
        compiled: Any = [torch.compile(function, *args, **kwargs) for function in _PLAIN]
        self._compiled = _Work(*compiled)

    def state_slots(self) -> dict[str, Slot]:
        cache = self._blocks()[0].cache_slot()
        caches = {f"{what}{i}": cache for i in range(len(self.blocks)) for what in ("keys", "values")}
        return {**caches, "vectors": Slot(tuple(self.cell.initial.shape)), "length": Slot((), integer=True)}

    def mixing_flops(self, length: int) -> float:
        block, cell = self._blocks()[0], self.cell
        vectors, inner = cell.initial.shape[0], block.heads * block.head_width
        per_token = 4 * inner * (block.attention.keys_seen(length) + vectors) * len(self.blocks)
        # The cell's products happen once per window, but are counted once per token with all other dense layers.
        read = 2 * cell.keys_values.weight.numel()
        update = 2 * sum(layer.weight.numel() for layer in cell.modules() if isinstance(layer, nn.Linear)) - read
        update_attention = 4 * inner * (vectors + 2 * self.window)
        windows, updates = -(-length // self.window), length // self.window
        cell_total = vectors * (windows * read + updates * (update + update_attention))
        return per_token + cell_total / length - (read + update)

    @across_ranks(in_turn)
    @each_document_alone
    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        windows = Windows(self.window, x.shape[1], state["length"] if state else None)
        vectors, tokens = self._start(x.shape[0], state), windows.spread(x)
        parts, blocks = windows.parts, self._blocks()
        nothing = x.new_zeros(()).expand(x.shape[0], 2 * self.window, blocks[0].heads, blocks[0].head_width)
        given = [(state[f"keys{i}"], state[f"values{i}"]) if state else (nothing, nothing) for i in range(len(blocks))]
        # Each block's keys and values: the window before the piece, then every window of it.
        runs: list[list[KeysValues]] = [[(keys[:, : self.window], values[:, : self.window])] for keys, values in given]
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else blocks[0].projection.weight.dtype
        # Compiled code runs only in training and on whole windows.
        compiled = self._compiled if windows.index is None and torch.is_grad_enabled() else None
        works = [compiled if compiled and part.stop - part.start == self.window else _PLAIN for part in parts]
        # Autocast caches the weights that it casts; a compiled graph would cast them in every window.
        weights = [_dense_weights(block, dtype) if autocast and self._compiled in works else {} for block in blocks]
        biases = {
            slots: [work.bias(block.attention, windows, slots, dtype) for block in blocks]
            for slots, work in {part.stop - part.start: work for part, work in zip(parts, works, strict=True)}.items()
        }
        outputs = []
        for part, work in zip(parts, works, strict=True):
            # Contiguous, because strides that depend on the piece's length would each be compiled.
            hidden = tokens if windows.single else tokens[:, part].clone(memory_format=torch.contiguous_format)
            memory = work.read(self.cell, vectors)
            previous, kept = windows.has_previous(part), windows.kept(part, given)
            before = [run[-1] for run in runs]
            for i, block in enumerate(blocks):
                bias = biases[part.stop - part.start][i]
                window = (hidden, (memory.keys, memory.values), bias, before[i], previous, kept[i])
                hidden, own = work.through(block, weights[i], *window)
                runs[i] = [*runs[i][-2:], own]  # a row in the middle of its window needs two of the previous ones
            outputs.append(hidden)
            if keep_state or part is not parts[-1]:
                move = (memory, runs[self.writer][-1], before[self.writer], previous)
                vectors = self._moved_on(work, windows.filled(part), vectors, *move)
        y = windows.collect(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1))
        if len(parts) == 1 and torch.is_grad_enabled():
            y = y + self.cell.no_update()  # data-parallel training waits for a gradient of every parameter
        if not keep_state:
            return y, {}
        after: LayerState = {"vectors": vectors}
        needed = 1 + len(parts) - windows.done // self.window  # windows that the next piece may look at
        for i, run in enumerate(runs):
            left = (windows.remaining(torch.cat(each, dim=1)) for each in zip(*run[-needed:], strict=True))
            after[f"keys{i}"], after[f"values{i}"] = (tensor.to(vectors.dtype) for tensor in left)
        return y, {**after, "length": windows.read(x)}

    def _start(self, batch: int, state: LayerState | None) -> Tensor:
        """The vectors before the first window, [B, S, E]: the learned ones for rows that have read nothing."""
        learned = self.cell.initial.to(state_dtype(self.cell.initial.dtype)).expand(batch, -1, -1)
        if state is None:
            return learned.clone()  # a state is a value: it must not change with the parameter
        return torch.where((state["length"] == 0)[:, None, None], learned, state["vectors"])

    def _moved_on(self, work: _Work, filled: bool | Tensor, vectors: Tensor, *window: Any) -> Tensor:
        """The vectors after a window (the other arguments of `StateCell.update`), updated in rows that completed it."""
        if not isinstance(filled, Tensor):
            return work.update(self.cell, vectors, *window) if filled else vectors
        rows = filled.nonzero().squeeze(1)
        if not len(rows):
            return vectors
        chosen = tree_map_only(Tensor, lambda tensor: tensor[rows], (vectors, *window))
        return vectors.index_copy(0, rows, work.update(self.cell, *chosen))

    def _blocks(self) -> list[WindowBlock]:
        return [block for block in self.blocks if isinstance(block, WindowBlock)]


class FeedbackLayer(RecurrentLayer):
    """A stack of blocks that all read the vectors, which one of them writes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, blocks=config.recurrent.blocks, writer=config.recurrent.block - 1)
