"""Decoding on a GPU: steps of a model as CUDA graphs, including the sampler.

Up to rounding, the results are those of `gss.decode.Decoder` in reduced precision: weights are rounded to bfloat16
once; the residual stream and all sums stay float32, the modes of state spaces float64.

Rows have places in buffers for 1, 2, 4, 8, … rows (at first, for as many as there are). A row that leaves frees its
place and nothing moves. If there are too few places, or many more than rows, all rows move to other buffers. Buffers
and their graphs are kept.

A row that has been alone since it joined can speculate. A separate graph looks up a draft, reads it and the next token
as if they were rows, draws after each, and advances the row by the tokens that are kept, several times over. The host
learns how many those were when it asks for more.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from gss.decode.blocked import BLOCK, BlockedDecoder
from gss.decode.sampler import NONE, Draw, Sampler, Work
from gss.model import LanguageModel
from gss.nn.decoding import GPUPlan
from gss.nn.gpu_plans import WIDEST, norm_pair
from gss.nn.state import ModelState
from gss.ops.gpu.decode_launch import DRAFT, HISTORY, Draft, Form, Stream, Tiles
from gss.ops.gpu.gate import ACTIVATIONS
from gss.ops.positions import sinusoid_frequencies

UNROLL = 8
"""Steps in the largest graph: one launch for that many."""

_LONGEST_BLOCK = 128
# Rows in buffers this many times too large for them change to smaller ones.
_SPARSE = 4
# Layers whose blocks are folded side by side.
_BESIDE = 4
# Drafts in a graph, and tokens that one must give on average to be faster than reading one by one. (Of the 192M preset,
# reading 8 tokens at once takes 1.5 times as long as reading one.)
_DRAFTS = 4
_PAYS = 1.7


def plans(model: LanguageModel, block: int) -> list[GPUPlan]:
    """The plans of all layers; none where some layer, or the model, has a part that the kernels lack."""
    config = model.config
    plain = all(type(p.data) is Tensor and p.dtype in (torch.float32, torch.bfloat16) for p in model.parameters())
    known = config.activation in ACTIVATIONS and config.norm in ("layernorm", "rmsnorm")
    small = config.width <= WIDEST and 0 < block <= _LONGEST_BLOCK
    if not (plain and known and small) or (model.training and config.dropout):
        return []
    found = [layer.gpu_plan(block) for layer in model.sequence_layers()]
    return [plan for plan in found if plan] if all(found) else []


def reduced_precision(model: LanguageModel) -> bool:
    """Whether a model is asked to run in bfloat16: by its parameters or by autocast around the call."""
    weight = model.embedding.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type) == torch.bfloat16
    return weight.dtype == torch.bfloat16


class _Room:
    """Buffers for a number of rows, and the graphs that work on them."""

    def __init__(self, form: Form, layers: Sequence[GPUPlan], batch: int, head: Tensor) -> None:
        self._vocab_size, device = len(head), head.device
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self.stream = Stream(form, batch, self._vocab_size, Tiles.for_batch(batch, self._capability), device)
        self.layers = [plan.on(self.stream) for plan in layers]
        # A row alone has its settings in all places of a draft.
        self.sampler = Sampler(self._vocab_size, device, [], capacity=DRAFT if batch == 1 else batch)
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Draw]] = {}

    @cached_property
    def draft(self) -> tuple[Draft, list[GPUPlan]]:
        """The layers once more, for several tokens of the one row."""
        stream = Draft(self.stream, self._vocab_size, Tiles.for_draft(self._capability))
        return stream, [layer.on(stream) for layer in self.layers]


class GraphDecoder(BlockedDecoder):
    """A model that continues from a state as CUDA graphs; without a GPU, in Triton's interpreter, the same launches.

    >>> decoder = GraphDecoder(model, state)
    >>> logits = decoder.step(tokens)                    # [B] → [B, V], float32
    >>> tokens = decoder.generate(100).tokens            # [100, B], drawn on the device
    """

    stride = UNROLL
    _drafting = False  # whether the one row speculates
    _under_way: tuple[Tensor, torch.cuda.Event | None] | None = None  # tokens of drafts

    @torch.no_grad()
    def __init__(
        self, model: LanguageModel, state: ModelState, block: int = BLOCK, layers: Sequence[GPUPlan] = ()
    ) -> None:
        super().__init__(model, block)
        self._layers = layers or plans(model, block)
        if not self._layers:
            raise ValueError("the model has layers without GPU kernels: use gss.decode.decoder instead")
        config, weight = model.config, model.embedding.weight.detach()
        self._embedding, self._head, self._norm = weight, weight.to(torch.bfloat16), norm_pair(model.norm)
        self._wavenumber = None
        if config.positions == "sinusoidal":
            self._wavenumber = sinusoid_frequencies(config.width, weight.device) / (2 * math.pi)
        self._form = Form(
            width=config.width,
            block=block,
            activation=config.activation,
            centred=config.norm == "layernorm",
            epsilon=config.norm_epsilon,
            head_scale=model.head_scale,
        )
        self._rooms: dict[int, _Room] = {}
        self._enter(state.batch)
        self.join(state)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        self._settle()
        self._set_tokens(tokens)
        self._advance(1, None)
        return self._room.stream.logits[self._index]

    @torch.no_grad()
    def advance(self) -> Draw:
        self._settle()
        if not self._drafting:
            return self.generate(UNROLL)
        work, draft = self._sampler.work, self._room.draft[0]
        if self._gain < _PAYS:
            self._gain += 0.05  # until it is tried again
            drawn = self.generate(UNROLL)
            draft.note(drawn.tokens[:, 0])
            return drawn
        drawn = self._run(("drafts", work), lambda: self._read_drafts(work)).map(torch.clone)
        tokens, ready = drawn.tokens[:, 0], None
        if tokens.is_cuda:
            tokens = torch.empty_like(tokens, device="cpu", pin_memory=True).copy_(tokens, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._under_way = tokens, ready
        return drawn

    @torch.no_grad()
    def _settle(self) -> None:
        if self._under_way is None:
            return
        tokens, ready = self._under_way
        self._under_way = None
        if ready is not None:
            ready.synchronize()
        kept = (tokens.view(_DRAFTS, DRAFT) != NONE).sum(1).tolist()
        self._gain += 0.4 * (sum(kept) / sum(map(bool, kept)) - self._gain)
        self._room.draft[0].count(sum(kept))
        self._count(sum(kept))

    @torch.no_grad()
    def state(self) -> ModelState:
        self._settle()
        layers = tuple(layer.state(self._index, self._block) for layer in self._room.layers)
        return ModelState(self._room.stream.position[self._index], layers)

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        self._settle()
        if list(rows) != [0]:
            self._drafting = False
        self._block.keep(rows)
        self._set_places([self._places[row] for row in rows])
        self._sampler.rows = [self._sampler.rows[row] for row in rows]
        enough = _power_of_two(len(rows))
        if enough <= self._room.stream.batch // _SPARSE:
            self._change_room(enough)

    def _put(self, state: ModelState, sampler: Sampler, tokens: Tensor, read: Sequence[Sequence[int]]) -> None:
        if self._block.rows > self._room.stream.batch:
            self._change_room(_power_of_two(self._block.rows))
        free = sorted(set(range(self._room.stream.batch)) - set(self._places))
        self._place(state, sampler, range(state.batch), tokens, free[: state.batch])
        work = self._sampler.work
        # Other than greedily, 0.8 to 0.9 times as fast on an H200.
        wanted = work.argmax if self.speculate is None else self.speculate
        able = self._room.stream.batch == 1 and all(layer.drafts for layer in self._layers)
        self._drafting = wanted and able and not work.penalised  # what a penalty has seen is not taken back
        if self._drafting:
            self._gain = 2 * _PAYS
            before = self._on_device(read[0][-HISTORY:] if read else [])
            self._room.draft[0].remember(torch.cat([before, tokens]))

    def _place(
        self, state: ModelState, sampler: Sampler, rows: Sequence[int], tokens: Tensor, places: Sequence[int]
    ) -> None:
        """Put rows, and their settings from these rows of a sampler, into places of the room."""
        stream = self._room.stream
        index = self._on_device(places)
        stream.tokens[index], stream.position[index] = tokens, state.position
        stream.joined[index] = self._block.read
        alone = stream.batch == 1
        self._sampler.put(sampler, list(rows) * (DRAFT if alone else 1), list(range(DRAFT) if alone else places))
        self._sampler.rows += sampler.rows
        for layer, held in zip(self._room.layers, state.layers, strict=True):
            layer.put(held, index, self._block)
        self._set_places([*self._places, *places])
        stream.read.fill_(self._block.read - 1)  # the place of the last token

    def _set_places(self, places: list[int]) -> None:
        self._places = places
        self._index = self._on_device(places)

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        """Numbers on the device, without waiting for what it is doing."""
        device = self._embedding.device
        pinned = device.type == "cuda" and len(numbers) > 0
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)

    def _enter(self, size: int) -> None:
        """Change to the empty buffers for this many rows."""
        if size not in self._rooms:
            self._rooms[size] = _Room(self._form, self._layers, size, self._head)
        self._room, self._sampler = self._rooms[size], self._rooms[size].sampler
        self._sampler.rows = []
        self._set_places([])

    def _change_room(self, size: int) -> None:
        """Move the rows that have places to the buffers for this many."""
        before, places, index = self._room, self._places, self._index
        state = self.state() if places else None
        self._enter(size)
        if state is not None:
            self._block.joined[: len(places)] = [self._block.read] * len(places)  # their states have all that was read
            self._place(state, before.sampler, places, before.stream.tokens[index], range(len(places)))

    def _set_tokens(self, tokens: Tensor) -> None:
        self._room.stream.tokens[self._index] = tokens

    def _advance(self, count: int, work: Work | None) -> Draw:
        steps = UNROLL if min(count, self._block.size - self._block.read) >= UNROLL else 1
        drawn = self._run((steps, work), lambda: self._steps(steps, work)).map(lambda part: part[:, self._index])
        self._count(steps)
        return drawn

    def _fold(self) -> None:
        late = any(self._block.joined)
        self._run((late,), lambda: self._fold_layers(late))
        if late:
            self._room.stream.joined.zero_()

    def _run(self, key: tuple[object, ...], launches: Callable[[], Draw]) -> Draw:
        """Run launches: as they are the first time, which compiles their kernels, and from then on as a graph."""
        graphs = self._room.graphs
        if key in graphs:
            graph, drawn = graphs[key]
            graph.replay()
            return drawn
        drawn = launches()
        if self._embedding.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                graphs[key] = graph, launches()
        return drawn

    def _steps(self, steps: int, work: Work | None) -> Draw:
        """Read `tokens`; leave logits and the next tokens in their place, and everything moved on, `steps` times."""
        room, stream = self._room, self._room.stream
        tokens = torch.empty(steps, stream.batch, dtype=torch.int64, device=stream.device)
        drawn: list[Draw] = []
        for step in range(steps):
            given = drawn[-1].tokens if drawn else stream.tokens
            stream.embed(given, self._embedding, self._wavenumber, early=step > 0 and not drawn)
            self._read(stream, room.layers)
            if work is None or work.argmax:
                stream.choose(tokens[step])
            else:
                drawn.append(room.sampler.draw(stream.logits, stream.position, work))
        if not drawn:
            return Draw(tokens)
        stream.tokens.copy_(drawn[-1].tokens)
        return Draw.join(drawn, torch.stack)

    def _read(self, stream: Stream, layers: Sequence[GPUPlan]) -> None:
        """From embedded tokens to logits."""
        for layer in layers:
            layer.launch()
        stream.head(self._norm, self._head)

    def _read_drafts(self, work: Work) -> Draw:
        """Read the one row's next token and a draft, and keep what is drawn too, as often as the block has room: the
        tokens [_DRAFTS · DRAFT, 1] from there."""
        stream, layers = self._room.draft
        parts = []
        for _ in range(_DRAFTS):
            stream.begin(self._embedding, self._wavenumber)
            self._read(stream, layers)
            parts.append(Draw(torch.empty_like(stream.tokens)))
            if work.argmax:
                stream.choose(parts[-1].tokens)
            else:
                parts[-1] = self._room.sampler.draw(stream.logits, stream.position, work)
            stream.accept(parts[-1].tokens)
        return Draw.join(parts, torch.cat).map(lambda part: part.unsqueeze(1))

    def _fold_layers(self, late: bool) -> Draw:
        """Fold the blocks of all layers, some side by side."""
        layers, device = self._room.layers, self._embedding.device
        self._room.stream.read.fill_(-1)
        if device.type != "cuda":
            for layer in layers:
                layer.fold(late)
            return Draw(self._room.stream.tokens)
        beside = [torch.cuda.Stream(device) for _ in range(_BESIDE)]
        for number, stream in enumerate(beside):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for layer in layers[number::_BESIDE]:
                    layer.fold(late)
        for stream in beside:  # only now: a stream would wait for those that are waited for already
            torch.cuda.current_stream().wait_stream(stream)
        return Draw(self._room.stream.tokens)


def _power_of_two(rows: int) -> int:
    """The size of buffers for rows that come and go: one of few, each with kernels to compile and graphs to capture."""
    return 1 << (max(1, rows) - 1).bit_length()
