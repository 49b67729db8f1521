"""Decoding on a GPU: a step of a GSS model as one CUDA graph of a few kernels a layer, tokens chosen on the device.

The same answers as `gss.decode.Decoder` in reduced precision, to rounding: weights are rounded to bfloat16 once, the
state, the residual stream and every sum stay float32. `gss.decode.decoder` picks this class where it can be used.
"""

import math

import torch
from torch import Tensor, nn

from gss.model import LanguageModel
from gss.nn.gss import GSSLayer
from gss.nn.state import ModelState
from gss.nn.state_space import DiagonalStateSpace
from gss.ops.gpu.decode_step import Buffers, Tiles, Weights, launch_fold, launch_step
from gss.ops.kernel import kernel
from gss.ops.recurrence import carried_output, final_state

UNROLL = 8
"""Steps in the graph that chooses its own tokens: one launch for that many."""

_WIDEST = 8192
_MOST_CHANNELS = 2048
_LONGEST_BLOCK = 128


def supports(model: LanguageModel, block: int) -> bool:
    """Whether a model is of the parts that the kernels have: GSS layers with eigenvalues that all channels share."""
    parameters = list(model.parameters())
    return (
        all(isinstance(layer, GSSLayer) and layer.state_space.log_step is None for layer in model.layers)
        and all(type(p.data) is Tensor and p.dtype in (torch.float32, torch.bfloat16) for p in parameters)
        and model.config.width <= _WIDEST
        and model.config.channels <= _MOST_CHANNELS
        and block <= _LONGEST_BLOCK
    )


def reduced_precision(model: LanguageModel) -> bool:
    """Whether a model is asked to run in bfloat16: by its parameters or by autocast around the call."""
    weight = model.embedding.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type) == torch.bfloat16
    return weight.dtype == torch.bfloat16


class GraphDecoder:
    """A GSS model that goes on from a state, a token of each row at a time; the interface of `gss.decode.Decoder`.

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
        self._spaces = [layer.state_space for layer in _layers(model)]
        self._weights = weights or prepare(model, block)
        device = self._weights.head.device
        on_gpu = device.type == "cuda"
        if tiles is None:
            tiles = Tiles(overlap=on_gpu and torch.cuda.get_device_capability(device) >= (9, 0))
        self._tiles, self._block = tiles, block
        self._buffers = Buffers(self._weights, state.batch, tiles)
        self._load(state)
        self._graphs = {steps: self._capture(steps) for steps in (1, min(UNROLL, block))} if on_gpu else {}

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the next token of each row, [B]."""
        self._buffers.tokens.copy_(tokens)
        self._advance(1)
        logits = self._buffers.logits.clone()
        self._end_block()
        return logits

    @torch.no_grad()
    def greedy(self, tokens: Tensor, count: int) -> Tensor:
        """The `count` tokens that follow the next token of each row, [B] → [B, count], the likeliest each time.

        The last of them has been chosen and not yet read, as if `step` had been called `count` times.
        """
        if count < 1:
            raise ValueError(f"at least 1 token is chosen, not {count}")
        self._buffers.tokens.copy_(tokens)
        chosen, left = [], count
        while left:
            start, run = self._read, min(left, self._block - self._read)
            self._advance(run)
            chosen.append(self._buffers.history[start : start + run].clone())
            self._end_block()
            left -= run
        return torch.cat(chosen).T

    @torch.no_grad()
    def state(self) -> ModelState:
        """The state after what has been read."""
        modes = torch.complex(*self._buffers.state.unbind(1))  # [D, B, H, N]
        if self._read:
            inputs = self._buffers.inputs[:, : self._read].transpose(1, 2)  # [D, B, read, H]
            with torch.autocast(modes.device.type, enabled=False):
                pairs = zip(self._spaces, inputs, modes, strict=True)
                modes = torch.stack([final_state(u, space.discretized()[1], held) for space, u, held in pairs])
        layers = tuple({"modes": held} for held in torch.view_as_real(modes))
        return ModelState(self._buffers.position.clone(), layers)

    def _load(self, state: ModelState) -> None:
        """Start a block from a state."""
        buffers = self._buffers
        buffers.position.copy_(state.position)
        with torch.autocast(buffers.x.device.type, enabled=False):
            for layer, (space, held) in enumerate(zip(self._spaces, state.layers, strict=True)):
                buffers.state[layer] = held["modes"].movedim(-1, 0)
                modes = torch.view_as_complex(held["modes"].float().contiguous())
                readout, log_a = space.discretized()
                buffers.echo[layer] = carried_output(modes, readout, log_a, self._block).transpose(0, 1)
        self._rewind()

    def _rewind(self) -> None:
        self._read = 0
        self._buffers.read.fill_(self._block - 1)  # the first step moves on to place 0

    def _advance(self, steps: int) -> None:
        while steps:
            run = max((n for n in self._graphs if n <= steps), default=1)
            if self._graphs:
                self._graphs[run].replay()
            else:
                launch_step(self._weights, self._buffers, self._tiles)
            self._read += run
            steps -= run

    def _end_block(self) -> None:
        if self._read == self._block:
            launch_fold(self._weights, self._buffers, self._tiles)
            self._read = 0  # as the device's own place becomes with the next step

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        """The step's kernels, `steps` times over, as a graph; the state is as it was before."""
        buffers = self._buffers
        position = buffers.position.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch_step(self._weights, buffers, self._tiles)  # compiles; writes to nothing that is read again
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(steps):
                launch_step(self._weights, buffers, self._tiles)
        buffers.position.copy_(position)
        self._rewind()
        return graph


@torch.no_grad()
def prepare(model: LanguageModel, block: int) -> Weights:
    """A model's weights as the kernels read them."""
    layers, config = _layers(model), model.config
    wavenumber = None
    if config.positions == "sinusoidal":
        half = torch.arange(config.width // 2, dtype=torch.float64, device=model.embedding.weight.device)
        wavenumber = torch.exp(-half * (math.log(1e4) / max(config.width // 2 - 1, 1))) / (2 * math.pi)
    with torch.autocast(model.embedding.weight.device.type, enabled=False):
        tables = [_tables(layer.state_space, block) for layer in layers]
    taps, power, into, readout, out_of = (torch.stack(table) for table in zip(*tables, strict=True))
    return Weights(
        embedding=model.embedding.weight.detach(),
        head=model.embedding.weight.to(torch.bfloat16).detach(),
        final_norm=_norm(model.norm),
        norm=_stacked([_norm(layer.norm) for layer in layers]),
        inner_norm=_stacked([_norm(layer.inner_norm) for layer in layers]),
        gate_inner=_stacked([_dense(layer.gate, layer.inner) for layer in layers]),
        context=_stacked([_dense(layer.context) for layer in layers]),
        output=_stacked([_dense(layer.output) for layer in layers]),
        taps=taps,
        power=power,
        into=into,
        readout=readout,
        out_of=out_of,
        wavenumber=wavenumber,
        activation=config.activation,
        centred=config.norm == "layernorm",
        epsilon=config.norm_epsilon,
    )


def _tables(space: DiagonalStateSpace, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Taps [W, H], a^W [2, N], a^(W−1−j) [2, W, N], readout [2, H, N] and a^(k+1) [2, N, W], float32."""
    readout, log_a = space.discretized()
    taps = kernel(readout, log_a, block)
    taps[:, 0] += space.skip
    power = torch.exp(log_a[0] * torch.arange(block + 1, device=log_a.device).unsqueeze(-1))  # [W + 1, N]
    planes = torch.stack([power.real, power.imag]).float()
    sign = torch.tensor([1.0, -1.0], device=planes.device)[:, None, None]
    return (
        taps.T.float().contiguous(),
        planes[:, block],
        planes[:, :block].flip(1),
        torch.view_as_real(readout).movedim(-1, 0).float(),
        (planes[:, 1:] * sign).transpose(1, 2).contiguous(),
    )


def _layers(model: LanguageModel) -> list[GSSLayer]:
    return [layer for layer in model.layers if isinstance(layer, GSSLayer)]


def _norm(norm: nn.Module) -> tuple[Tensor, Tensor]:
    scale, shift = norm.get_parameter("weight"), getattr(norm, "bias", None)
    return scale.detach().float(), torch.zeros_like(scale).float() if shift is None else shift.detach().float()


def _dense(*parts: nn.Linear) -> tuple[Tensor, Tensor]:
    """The weights of layers that read the same input, one above the other, and their biases (0 where there is none)."""
    weight = torch.cat([part.weight.detach().to(torch.bfloat16) for part in parts])
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
    return weight, torch.cat([bias.detach().float() for bias in biases])


def _stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, second = zip(*pairs, strict=True)
    return torch.stack(first), torch.stack(second)
