"""Block-Recurrent Transformers: blocks on windows that read, and one of which writes, a recurrent state.

The state's vectors move on once a window: the recurrent block's tokens, of the window and the one before, are what
they attend to. Within a window every reading block attends to the vectors as they came in. `RecurrentLayer` is one
block between others of any kind ("Rec"); `FeedbackLayer` is a whole stack that runs window by window, every block of
which reads the vectors ("Feedback"), with keys and values made once by the recurrent one.
"""

import torch
from torch import Tensor, nn

from gss.config import ModelConfig
from gss.nn.documents import Documents
from gss.nn.recurrent_cell import Memory, StateCell
from gss.nn.state import LayerState, SequenceLayer, Slot, state_dtype
from gss.nn.window_attention import WindowBlock, attend
from gss.nn.windows import Windows


class RecurrentStack(SequenceLayer):
    """Blocks that run window by window around one recurrent state; `writer` is the block whose tokens update it.

    The state of a sequence: two windows of keys and values a block, the vectors, and how much was read. A row that
    has read nothing starts from the learned vectors, whatever its slot holds: the start is then part of every
    forward pass, where sharded and replicated training expect a parameter's gradient to come from.
    """

    def __init__(self, config: ModelConfig, blocks: int, writer: int) -> None:
        super().__init__()
        self.window = config.attention.window
        self.writer = writer
        self.blocks = nn.ModuleList(WindowBlock(config, reads_state=True) for _ in range(blocks))
        self.cell = StateCell(config)

    def state_slots(self) -> dict[str, Slot]:
        cache = self._blocks()[0].cache_slot()
        caches = {f"{what}{i}": cache for i in range(len(self.blocks)) for what in ("keys", "values")}
        return {**caches, "vectors": Slot(tuple(self.cell.initial.shape)), "length": Slot((), integer=True)}

    def mixing_flops(self, length: int) -> float:
        block, cell = self._blocks()[0], self.cell
        vectors, inner = cell.initial.shape[0], block.heads * block.head_width
        a_token = 4 * inner * (block.attention.keys_seen(length) + vectors) * len(self.blocks)
        # The cell's products are a window's, not a token's, as whoever counts dense layers takes them to be.
        read, update = cell.dense_flops()
        update_attention = 4 * inner * vectors * (vectors + 2 * self.window)
        windows, updates = -(-length // self.window), length // self.window
        cell_total = windows * read + updates * (update + update_attention)
        return a_token + cell_total / length - (read + update) / vectors

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        keep_state: bool = True,
        documents: Documents | None = None,
    ) -> tuple[Tensor, LayerState]:
        if documents is not None:
            return documents.mix(lambda rows: self._run(rows, None, False)[0], x), {}
        return self._run(x, state, keep_state)

    def _run(self, x: Tensor, state: LayerState | None, keep_state: bool) -> tuple[Tensor, LayerState]:
        windows = Windows(self.window, x.shape[1], state["length"] if state else None)
        vectors = self._start(x.shape[0], state)
        tokens = windows.spread(x)
        parts = windows.parts
        caches = [_Cache(windows, state, i) for i in range(len(self.blocks))]
        biases = {
            slots: [block.attention.bias(windows, slots) for block in self._blocks()]
            for slots in {part.stop - part.start for part in parts}
        }
        outputs = []
        for part in parts:
            hidden = tokens if windows.single else tokens[:, part]
            memory = self.cell.read(vectors)
            previous = windows.has_previous(part)
            for i, block in enumerate(self._blocks()):
                queries, keys, values, state_queries = block.project(hidden)
                keys, values = caches[i].extend(keys, values, part)
                bias = biases[part.stop - part.start][i]
                attended = block.attention.in_window(queries, keys, values, bias, previous)
                assert state_queries is not None
                hidden = block.finish(hidden, attended, attend(state_queries, memory.keys, memory.values))
            outputs.append(hidden)
            if keep_state or part is not parts[-1]:
                vectors = self._moved_on(vectors, memory, windows, part, caches[self.writer])
        y = windows.collect(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1))
        if len(parts) == 1 and torch.is_grad_enabled():
            y = y + self.cell.no_update()  # data-parallel training waits for a gradient of every parameter
        if not keep_state:
            return y, {}
        after: LayerState = {"vectors": vectors}
        for i, cache in enumerate(caches):
            after[f"keys{i}"], after[f"values{i}"] = (tensor.to(vectors.dtype) for tensor in cache.remaining())
        return y, {**after, "length": windows.read(x)}

    def _start(self, batch: int, state: LayerState | None) -> Tensor:
        """The vectors that the first window comes in with, [B, S, E]: learned ones where nothing was read."""
        learned = self.cell.initial.to(state_dtype(self.cell.initial.dtype)).expand(batch, -1, -1)
        if state is None:
            return learned.clone()  # a state is a value: it must not change with the parameter
        return torch.where((state["length"] == 0)[:, None, None], learned, state["vectors"])

    def _moved_on(self, vectors: Tensor, memory: Memory, windows: Windows, part: slice, cache: "_Cache") -> Tensor:
        """The vectors after a window, in the rows that have read all of it."""
        filled, previous = windows.filled(part), windows.has_previous(part)
        if not isinstance(filled, Tensor) and not filled:
            return vectors
        keys, values = cache.latest
        seen = None
        if isinstance(previous, Tensor):
            own = torch.arange(2 * self.window, device=keys.device) >= self.window
            seen = previous.unsqueeze(1) | own
        elif not previous:
            keys, values = keys[:, self.window :], values[:, self.window :]
        if not isinstance(filled, Tensor):
            return self.cell.update(vectors, memory, keys, values, seen)
        rows = filled.nonzero().squeeze(1)
        if not len(rows):
            return vectors
        memory = Memory(*(tensor[rows] for tensor in memory))
        seen = None if seen is None else seen[rows]
        return vectors.index_copy(0, rows, self.cell.update(vectors[rows], memory, keys[rows], values[rows], seen))

    def _blocks(self) -> list[WindowBlock]:
        return [block for block in self.blocks if isinstance(block, WindowBlock)]


class _Cache:
    """One block's keys and values while a piece is read: the window before it, then every window of it."""

    def __init__(self, windows: Windows, state: LayerState | None, block: int) -> None:
        self.windows = windows
        self._given = (state[f"keys{block}"], state[f"values{block}"]) if state else (None, None)
        self._room: list[Tensor] = []
        self._runs: list[tuple[Tensor, Tensor]] = []

    def extend(self, keys: Tensor, values: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Add a window's new keys and values; returns those of the window before and this one, [B, W + slots, h, d]."""
        windows, size = self.windows, self.windows.window
        if not self._room:
            self._room = [windows.room(given, keys) for given in self._given]
            self._runs = [(self._room[0][:, :size], self._room[1][:, :size])]
        own = slice(size + part.start, size + part.stop)
        keys, values = (
            windows.merge(room[:, own], new, part) for room, new in zip(self._room, (keys, values), strict=True)
        )
        self._runs.append((keys, values))
        return self.latest

    @property
    def latest(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the last two windows."""
        (keys_before, values_before), (keys, values) = self._runs[-2:]
        return torch.cat([keys_before, keys], dim=1), torch.cat([values_before, values], dim=1)

    def remaining(self) -> tuple[Tensor, Tensor]:
        """What the next piece needs of them, [B, 2W, h, d] each."""
        keys, values = (torch.cat(run, dim=1) for run in zip(*self._runs, strict=True))
        return self.windows.remaining(keys), self.windows.remaining(values)


class RecurrentLayer(RecurrentStack):
    """One recurrent block; blocks of other kinds may stand before and after it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, blocks=1, writer=0)


class FeedbackLayer(RecurrentStack):
    """A whole stack of blocks that all read what one of them writes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, blocks=config.recurrent.blocks, writer=config.recurrent.block - 1)
