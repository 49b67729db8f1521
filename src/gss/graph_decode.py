"""Decoding on a GPU: a step of a GSS model, pure or hybrid, as one CUDA graph, tokens chosen on the device.

The same answers as `gss.decode.Decoder` in reduced precision, to rounding: weights are rounded to bfloat16 once, the
state, the residual stream and every sum stay float32. `gss.decode.decoder` picks this class where it can be used.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gss.model import LanguageModel
from gss.nn.attention import TransformerBlock
from gss.nn.gss import GSSLayer
from gss.nn.state import LayerState, ModelState
from gss.nn.state_space import DiagonalStateSpace
from gss.ops.gpu.decode_step import launch_fold, launch_step
from gss.ops.gpu.decode_tensors import AttentionWeights, Buffers, Pair, Tiles, Weights
from gss.ops.positions import sinusoid_frequencies
from gss.ops.recurrence import carried_output, final_state, transition

UNROLL = 8
"""Steps in the graph that chooses its own tokens: one launch for that many."""

_WIDEST = 4096
_MOST_CHANNELS = 1024
_LONGEST_BLOCK = 128
# Buffers this many times too large for their rows are replaced by smaller ones.
_SPARSE = 4


def supports(model: LanguageModel, block: int) -> bool:
    """Whether a model is of the parts that a graph has: GSS layers with eigenvalues that all channels share, and
    Transformer blocks on chunks between them.
    """
    parameters = list(model.parameters())
    return (
        all(_fits(layer) for layer in model.layers)
        and any(isinstance(layer, GSSLayer) for layer in model.layers)
        and not (model.training and model.config.dropout)
        and model.config.head_scale is None
        and all(type(p.data) is Tensor and p.dtype in (torch.float32, torch.bfloat16) for p in parameters)
        and model.config.width <= _WIDEST
        and model.config.channels <= _MOST_CHANNELS
        and block <= _LONGEST_BLOCK
    )


def _fits(layer: nn.Module) -> bool:
    if isinstance(layer, TransformerBlock):
        plain = layer.rotary_base is None and layer.query_norm is None and layer.feedforward.gated is None
        return plain and layer.chunk is not None and layer.heads * layer.head_width <= _WIDEST
    return isinstance(layer, GSSLayer) and layer.state_space.log_step is None


def reduced_precision(model: LanguageModel) -> bool:
    """Whether a model is asked to run in bfloat16: by its parameters or by autocast around the call."""
    weight = model.embedding.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type) == torch.bfloat16
    return weight.dtype == torch.bfloat16


class GraphDecoder:
    """A model that goes on from a state, a token of each row at a time; the interface of `gss.decode.Decoder`.

    >>> decoder = GraphDecoder(model, state)
    >>> logits = decoder.step(tokens)                    # [B] → [B, V], float32
    >>> chosen = decoder.greedy(logits.argmax(-1), 100)  # [B] → [B, 100], the likeliest token each time
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        state: ModelState,
        block: int = 64,
        tiles: Tiles | None = None,
        weights: Weights | None = None,
    ) -> None:
        """`weights` (of `prepare`) may be shared by decoders of a model whose parameters do not change."""
        if block < 1:
            raise ValueError(f"a block has at least 1 token, not {block}")
        if not supports(model, block):
            raise ValueError("the model has parts that the kernels lack: use gss.decode.decoder, which picks what fits")
        model.check_state(state, state.batch)
        self._model, self._block = model, block
        self._weights = weights or prepare(model, block)
        device = self._weights.head.device
        self._on_gpu = device.type == "cuda"
        self._capability = torch.cuda.get_device_capability(device) if self._on_gpu else (0, 0)
        self._given_tiles = tiles
        with torch.autocast(device.type, enabled=False):
            self._spaces = [layer.state_space.discretized() for layer in _layers(model)]
        self._read = 0
        self._joined: list[int] = []  # where in the block each row came
        self._make_room(state.batch)
        self.join(state)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the next token of each row, [B]."""
        rows = len(self._joined)
        self._buffers.tokens[:rows].copy_(tokens)
        self._advance(1)
        logits = self._buffers.logits[:rows].clone()
        self._end_block()
        return logits

    @torch.no_grad()
    def greedy(self, tokens: Tensor, count: int) -> Tensor:
        """The `count` tokens that follow the next token of each row, [B] → [B, count], the likeliest each time.

        The last of them has been chosen and not yet read, as if `step` had been called `count` times.
        """
        if count < 1:
            raise ValueError(f"at least 1 token is chosen, not {count}")
        rows = len(self._joined)
        self._buffers.tokens[:rows].copy_(tokens)
        chosen, left = [], count
        while left:
            start, run = self._read, min(left, self._block - self._read)
            self._advance(run)
            chosen.append(self._buffers.history[start : start + run, :rows].clone())
            self._end_block()
            left -= run
        return torch.cat(chosen).T

    @torch.no_grad()
    def state(self) -> ModelState:
        """The state after what has been read."""
        rows = len(self._joined)
        states = {"gss": iter(self._modes()), "attention": iter(self._cached())}
        layers = tuple(next(states[kind]) for kind in self._weights.kinds)
        return ModelState(self._buffers.position[:rows].clone(), layers)

    def _modes(self) -> list[LayerState]:
        """The states of the GSS layers."""
        rows, buffers = len(self._joined), self._buffers
        since = self._read - buffers.joined[:rows, None, None]
        states: list[LayerState] = []
        with torch.autocast(buffers.x.device.type, enabled=False):
            for layer, (_, log_a) in enumerate(self._spaces):
                held = torch.complex(*buffers.state[layer, :, :rows])
                if self._read:
                    inputs = buffers.inputs[layer, : self._read, :rows].transpose(0, 1)
                    held = final_state(inputs, log_a, None) + transition(log_a * since, held.dtype) * held
                states.append({"modes": torch.view_as_real(held)})
        return states

    def _cached(self) -> list[LayerState]:
        """The states of the Transformer blocks."""
        rows, buffers = len(self._joined), self._buffers
        states: list[LayerState] = []
        for *cached, length in zip(buffers.keys, buffers.values, buffers.lengths, strict=True):
            keys, values = (held[:rows].transpose(1, 2).float() for held in cached)
            states.append({"keys": keys, "values": values, "length": length[:rows].clone()})
        return states

    @torch.no_grad()
    def join(self, state: ModelState) -> None:
        """Add the sequences of a state after those that are there, each at its own position."""
        self._model.check_state(state, state.batch)
        first, last = len(self._joined), len(self._joined) + state.batch
        if last > self._buffers.batch:
            self._make_room(_power_of_two(last))
        buffers, read = self._buffers, self._read
        buffers.position[first:last] = state.position
        buffers.inputs[:, :, first:last] = 0
        buffers.joined[first:last] = read
        with torch.autocast(buffers.x.device.type, enabled=False):
            modes_of = [held for held in state.layers if "modes" in held]
            for layer, ((readout, log_a), held) in enumerate(zip(self._spaces, modes_of, strict=True)):
                modes = held["modes"].float().contiguous()
                buffers.state[layer, :, first:last] = modes.movedim(-1, 0)
                echo = carried_output(torch.view_as_complex(modes), readout, log_a, self._block - read)
                buffers.echo[layer, read:, first:last] = echo.transpose(0, 1)
        cached = [held for held in state.layers if "keys" in held]
        for index, held in enumerate(cached):
            buffers.keys[index][first:last] = held["keys"].transpose(1, 2)
            buffers.values[index][first:last] = held["values"].transpose(1, 2)
            buffers.lengths[index, first:last] = held["length"]
        self._joined += [read] * state.batch

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order (none is fine, until others join).

        Rows that stay where they are cost nothing: to take row i out, put the last one in its place.
        """
        if len(rows) > self._buffers.batch:
            self._make_room(_power_of_two(len(rows)))
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        if moved:
            places, sources = (list(side) for side in zip(*moved, strict=True))
            for tensor in self._buffers.by_row():
                tensor[places] = tensor[sources]
        self._joined = [self._joined[row] for row in rows]
        enough = _power_of_two(max(1, len(rows)))
        if enough <= self._buffers.batch // _SPARSE:
            self._make_room(enough)

    def _make_room(self, batch: int) -> None:
        """Buffers for so many rows; their graphs are captured when they are first used."""
        before, rows = getattr(self, "_buffers", None), len(self._joined)
        self._tiles = self._given_tiles or Tiles.for_batch(batch, self._capability)
        self._buffers = Buffers(self._weights, batch, self._tiles)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if before is not None:
            for tensor, held in zip(self._buffers.by_row(), before.by_row(), strict=True):
                tensor[:rows] = held[:rows]
        self._seek()

    def _seek(self) -> None:
        """Tell the device where in the block the last token was."""
        self._buffers.read.fill_((self._read - 1) % self._block)

    def _advance(self, steps: int) -> None:
        while steps:
            run = UNROLL if steps >= UNROLL else 1
            if self._on_gpu:
                if run not in self._graphs:
                    self._graphs[run] = self._capture(run)
                self._graphs[run].replay()
            else:
                for _ in range(run):
                    launch_step(self._weights, self._buffers, self._tiles)
            self._read += run
            steps -= run

    def _end_block(self) -> None:
        if self._read == self._block:
            late = any(self._joined)
            launch_fold(self._weights, self._buffers, self._tiles, late)
            self._read = 0  # as the device's own place becomes with the next step
            if late:
                self._joined = [0] * len(self._joined)
                self._buffers.joined.zero_()

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        """The step's kernels, `steps` times over, as a graph; what the next step reads is as it was before."""
        buffers = self._buffers
        counters = (buffers.tokens, buffers.position, buffers.lengths)
        before = [counter.clone() for counter in counters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch_step(self._weights, buffers, self._tiles)  # compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(steps):
                launch_step(self._weights, buffers, self._tiles)
        for counter, held in zip(counters, before, strict=True):
            counter.copy_(held)
        self._seek()
        return graph


@torch.no_grad()
def prepare(model: LanguageModel, block: int) -> Weights:
    """A model's weights as the kernels read them."""
    layers, config = _layers(model), model.config
    wavenumber = None
    if config.positions == "sinusoidal":
        wavenumber = sinusoid_frequencies(config.width, model.embedding.weight.device) / (2 * math.pi)
    with torch.autocast(model.embedding.weight.device.type, enabled=False):
        tables = [_tables(layer.state_space, block) for layer in layers]
    taps, into, readout, out_of = (torch.stack(table) for table in zip(*tables, strict=True))
    return Weights(
        kinds=config.layers,
        attention=tuple(_attention(layer) for layer in model.layers if isinstance(layer, TransformerBlock)),
        embedding=model.embedding.weight.detach(),
        head=model.embedding.weight.to(torch.bfloat16).detach(),
        final_norm=_norm(model.norm),
        norm=_stacked([_norm(layer.norm) for layer in layers]),
        inner_norm=_stacked([_norm(layer.inner_norm) for layer in layers]),
        gate_inner=_stacked([_dense(layer.gate, layer.inner) for layer in layers]),
        context=_stacked([_dense(layer.context) for layer in layers]),
        output=_stacked([_dense(layer.output) for layer in layers]),
        taps=taps,
        into=into,
        readout=readout,
        out_of=out_of,
        wavenumber=wavenumber,
        activation=config.activation,
        centred=config.norm == "layernorm",
        epsilon=config.norm_epsilon,
    )


def _attention(block: TransformerBlock) -> AttentionWeights:
    assert block.chunk is not None
    return AttentionWeights(
        norm=_norm(block.norm),
        query_key_value=_dense(block.query_key_value),
        output=_dense(block.output),
        feedforward_norm=_norm(block.feedforward.norm),
        inner=_dense(block.feedforward.inner),
        outer=_dense(block.feedforward.outer),
        heads=block.heads,
        chunk=block.chunk,
    )


def _tables(space: DiagonalStateSpace, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Taps [W, H], a^(W−j) [2, W + 1, N], readout [2, H, N] and a^(k+1) [2, N, W] (conjugate), float32."""
    readout, log_a = space.discretized()
    power = torch.exp(log_a[0] * torch.arange(block + 1, device=log_a.device).unsqueeze(-1))  # [W + 1, N]
    planes = torch.stack([power.real, power.imag]).float()
    conjugate = torch.stack([power.real, -power.imag]).float()
    return (
        space.taps(block).T.float().contiguous(),
        planes.flip(1),
        torch.view_as_real(readout).movedim(-1, 0).float(),
        conjugate[:, 1:].transpose(1, 2).contiguous(),
    )


def _power_of_two(rows: int) -> int:
    """Room for rows that come and go: of few sizes, since each has kernels to compile."""
    return 1 << (rows - 1).bit_length()


def _layers(model: LanguageModel) -> list[GSSLayer]:
    return [layer for layer in model.layers if isinstance(layer, GSSLayer)]


def _norm(norm: nn.Module) -> Pair:
    scale, shift = norm.get_parameter("weight"), getattr(norm, "bias", None)
    return scale.detach().float(), torch.zeros_like(scale).float() if shift is None else shift.detach().float()


def _dense(*parts: nn.Linear) -> Pair:
    """The weights of layers that read the same input, one above the other, and their biases (0 where there is none)."""
    weight = torch.cat([part.weight.detach().to(torch.bfloat16) for part in parts])
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
    return weight, torch.cat([bias.detach().float() for bias in biases])


def _stacked(pairs: list[Pair]) -> Pair:
    first, second = zip(*pairs, strict=True)
    return torch.stack(first), torch.stack(second)
