"""The ONNX form of each kind of layer: a piece of 1 to 64 tokens and a state in, outputs and the next state out.

There is no FFT: over so short a piece, a state space is a convolution with its first 64 taps, and the contribution of
the previous state is one product with powers of its modes. Tables of powers are computed in float64. A graph reads one
sequence, so tensors have no batch dimension; complex numbers are two planes, real and imaginary.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import nn

from gss.export.graph import Array, Graph
from gss.nn.attention import TransformerBlock
from gss.nn.dense import FeedForward
from gss.nn.dss import DSSBlock, DSSMixer
from gss.nn.gss import GSSLayer
from gss.nn.gss2 import GSS2Layer
from gss.nn.state_space import DiagonalStateSpace

LONGEST = 64  # the most tokens in a piece
State = dict[str, str]
_EXPORTED = "GSS, GSS2 and attention on chunks or over a sliding window"


class Piece:
    """What all layers need to know about a piece: the number of tokens, and their positions."""

    def __init__(self, graph: Graph, tokens: str, position: str) -> None:
        self.count = graph("Shape", tokens)  # L, as one number
        self.position = position
        self.last = graph("Sub", self.count, graph.whole(1))
        self.places = graph("Add", graph.first(np.arange(LONGEST), self.count, 0), position)  # [L]
        self._visible: dict[Any, str] = {}

    def visible(self, graph: Graph, layer: TransformerBlock) -> str:
        """Which slots of the cache and tokens of the piece each token attends to: [L, W + L].

        Caches are rings: slot s holds the newest token read whose place is s modulo W. Tokens of an earlier chunk
        that a layer on chunks finds there are not seen.
        """
        key = (layer.chunk, layer.sliding)
        if key not in self._visible:
            assert layer.reach is not None
            window, one = graph.whole(layer.reach), graph.whole(1)
            newest = graph("Sub", self.position, one)
            back = graph("Mod", graph("Sub", newest, graph.constant(np.arange(layer.reach))), window)
            held = graph("Sub", newest, back)
            held = graph("Where", graph("Less", held, graph.whole(0)), graph.whole(1 << 60), held)  # nothing yet
            places = graph("Concat", held, self.places, axis=0)  # [W + L]
            own = graph.reshaped(self.places, -1, 1)
            if layer.chunk:
                near = graph("Equal", graph("Div", places, window), graph("Div", own, window))
            else:
                near = graph("Greater", places, graph("Sub", own, window))
            self._visible[key] = graph("And", near, graph("LessOrEqual", places, own))
        return self._visible[key]

    def kept(self, graph: Graph, cache: str, new: str, window: int) -> str:
        """The cache [W, …] with the tokens of the piece [L, …] written to their slots."""
        places = self.places
        if window < LONGEST:
            newest = graph.whole(-window), graph.whole(1 << 60), graph.whole(0)
            places, new = graph("Slice", places, *newest), graph("Slice", new, *newest)
        slots = graph.reshaped(graph("Mod", places, graph.whole(window)), -1, 1)
        return graph("ScatterND", cache, slots, new)


def state_shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's state in a graph; layers that cannot be exported are refused."""
    if isinstance(layer, GSSLayer | DSSBlock):
        if any(space.log_step is not None for space in layer.spaces().values()):
            raise ValueError(f"state spaces with a step per channel (DSS) have no ONNX export: {_EXPORTED} have one")
        return {name: (2, space.channels, space.config.modes) for name, space in layer.spaces().items()}
    if isinstance(layer, GSS2Layer):
        return {name: tuple(size or 0 for size in slot.shape) for name, slot in layer.state_slots().items()}
    if isinstance(layer, TransformerBlock) and layer.reach is not None:
        return dict.fromkeys(("keys", "values"), (layer.reach, layer.heads, layer.head_width))
    if isinstance(layer, TransformerBlock):
        raise ValueError(f"full attention has no ONNX export, as its state grows with the text: {_EXPORTED} have one")
    raise ValueError(f"{type(layer).__name__} has no ONNX export: {_EXPORTED} have one")


def add_layer(graph: Graph, layer: nn.Module, x: str, state: State, piece: Piece) -> tuple[str, State]:
    """A layer's outputs [L, E] and the state after them."""
    if isinstance(layer, GSSLayer):
        return _gss(graph, layer, x, state, piece)
    if isinstance(layer, DSSBlock):
        return _dss(graph, layer, x, state, piece)
    if isinstance(layer, GSS2Layer):
        return _gss2(graph, layer, x, state, piece)
    assert isinstance(layer, TransformerBlock)
    return _attention(graph, layer, x, state, piece)


def _gss(graph: Graph, layer: GSSLayer, x: str, state: State, piece: Piece) -> tuple[str, State]:
    normed = graph.norm(x, layer.norm)
    inner = graph.activation(graph.dense(normed, layer.inner), layer.activation)
    y, after = _state_space(graph, layer.state_space, graph.norm(inner, layer.inner_norm), state["modes"], piece)
    gate = graph.activation(graph.dense(normed, layer.gate), layer.activation)
    out = graph.dense(graph("Mul", graph.dense(y, layer.context), gate), layer.output)
    return graph("Add", out, x), {"modes": after}


def _dss(graph: Graph, layer: DSSBlock, x: str, state: State, piece: Piece) -> tuple[str, State]:
    after = {}
    for i, mixer in enumerate(layer.mixers):
        assert isinstance(mixer, DSSMixer)
        name = f"modes{i}"
        y, after[name] = _state_space(graph, mixer.state_space, graph.norm(x, mixer.norm), state[name], piece)
        value, gate = graph.several("Split", 2, graph.dense(graph("Gelu", y), mixer.output), axis=1, num_outputs=2)
        x = graph("Add", x, graph("Mul", value, graph("Sigmoid", gate)))
    return _feedforward(graph, layer.feedforward, x), after


def _feedforward(graph: Graph, layer: FeedForward, x: str) -> str:
    normed = graph.norm(x, layer.norm)
    hidden = graph.activation(graph.dense(normed, layer.inner), layer.activation)
    if layer.gated is not None:
        hidden = graph("Mul", hidden, graph.dense(normed, layer.gated))
    return graph("Add", x, graph.dense(hidden, layer.outer))


def _state_space(graph: Graph, space: DiagonalStateSpace, u: str, state: str, piece: Piece) -> tuple[str, str]:
    """u [L, H] and modes [2, H, N] → y [L, H] and the next modes."""
    with torch.no_grad():
        readout, log_a = (t.to(torch.complex128) for t in space.discretized())
        taps = space.taps(LONGEST).flip(-1).float().numpy()
        powers = torch.exp(log_a[0] * torch.arange(LONGEST + 1).unsqueeze(-1))  # [65, N]
    signal = graph.transposed(u, 1, 0)  # [H, L]
    # What the state adds: Re(C·B̄ ∗ s ∗ Ā^(l+1)) summed over the modes, the minus of i² in the table.
    weights = _turned_planes(graph, state, *(graph.constant(part.float().numpy()) for part in _planes(readout)))
    table = torch.stack([powers[1:].real, -powers[1:].imag]).float().numpy()  # [2, 64, N]
    each = graph("MatMul", weights, graph.transposed(graph.first(table, piece.count, 1), 0, 2, 1))  # [2, H, L]
    carried = graph("ReduceSum", each, graph.whole(0))  # [1, H, L]
    batch = graph("Unsqueeze", signal, graph.whole(0))
    kernel = graph.constant(taps[:, None])
    own = graph("Conv", batch, kernel, group=len(taps), pads=[LONGEST - 1, 0], kernel_shape=[LONGEST])
    y = graph.transposed(graph("Squeeze", graph("Add", own, carried), graph.whole(0)), 1, 0)
    # What the piece leaves: Σ_j Ā^(L−1−j) u_j, on top of Ā^L s. Added up in float64, as in `gss.ops.state_space`.
    left = torch.stack([powers[:LONGEST].real, powers[:LONGEST].imag]).flip(1).float().numpy()  # [2, 64, N]
    newest = graph("Slice", graph.constant(left), graph("Neg", piece.count), graph.whole(LONGEST), graph.whole(1))
    added = graph("MatMul", signal, newest)  # [2, H, N]
    fading = [graph("Gather", graph.constant(part.numpy()), piece.last) for part in _planes(powers[1:], 1)]
    fading[1] = graph.transposed(fading[1], 1, 0, 2)
    kept = _turned_planes(graph, graph("Cast", state, to=TensorProto.DOUBLE), *fading)
    after = graph("Add", kept, graph("Cast", added, to=TensorProto.DOUBLE))
    return y, graph("Cast", after, to=TensorProto.FLOAT)


def _planes(numbers: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Complex numbers in the form of `_turned_planes`: the real part, and the imaginary part with both signs."""
    return numbers.real, torch.stack([-numbers.imag, numbers.imag], dim=dim)


def _turned_planes(graph: Graph, x: str, real: str, imaginary: str) -> str:
    """Complex numbers [2, …] times others."""
    other = graph("Gather", x, graph.whole(1, 0))
    return graph("Add", graph("Mul", x, real), graph("Mul", other, imaginary))


def _turned(graph: Graph, x: str, factor: Sequence[str], axis: int) -> str:
    """Complex numbers, their real and imaginary parts the halves of x along an axis, times others."""
    (real, imaginary), (cos, sin) = graph.several("Split", 2, x, axis=axis, num_outputs=2), factor
    after = graph("Sub", graph("Mul", real, cos), graph("Mul", imaginary, sin))
    return graph("Concat", after, graph("Add", graph("Mul", real, sin), graph("Mul", imaginary, cos)), axis=axis)


def _gss2(graph: Graph, layer: GSS2Layer, x: str, state: State, piece: Piece) -> tuple[str, State]:
    normed = graph.norm(x, layer.norm)
    parts = [graph.dense(normed, part) for part in (layer.query, layer.key, layer.value)]
    known = graph("Concat", state["recent"], graph("Concat", *parts, axis=1), axis=0)  # [taps − 1 + L, channels]
    reach, convolved = layer.short.reach, ""
    for back, tap in enumerate(layer.short.taps.detach().float().numpy()):
        ends = graph.whole(reach - back), graph("Add", piece.count, graph.whole(reach - back))
        term = graph("Mul", graph("Slice", known, *ends, graph.whole(0)), graph.constant(tap))
        convolved = graph("Add", convolved, term) if convolved else term
    recent = graph("Slice", known, piece.count, graph.whole(1 << 60), graph.whole(0))
    y, modes = _keyed(graph, layer, graph.activation(convolved, "swish"), state["modes"], piece)
    normal = graph.reshaped(graph.transposed(graph.rms(y, 1e-6), 1, 0, 2), 0, -1)  # [L, h·D]
    gate = graph.activation(graph.dense(normed, layer.gate), "swish")
    y = graph("Mul", graph("Mul", normal, graph.parameter(layer.output_scale)), gate)
    x = graph("Add", x, graph.dense(y, layer.output))
    return _feedforward(graph, layer.feedforward, x), {"modes": modes, "recent": recent}


def _keyed(graph: Graph, layer: GSS2Layer, x: str, state: str, piece: Piece) -> tuple[str, str]:
    """[L, queries + keys + values] and S [h, 2N, D] → y [h, L, D] and the next S, as `ops.matrix_state` has a chunk.

    Queries and keys are turned from and to the middle of a piece of 64, so that no power overflows.
    """
    space = layer.state_space
    heads, modes, middle = space.heads, space.modes, LONGEST // 2
    widths = [heads * 2 * modes, heads * 2 * modes, layer.value.out_features]
    split = graph.several("Split", 3, x, graph.whole(*widths), axis=1)
    queries, keys, values = (graph.transposed(graph.reshaped(part, 0, heads, -1), 1, 0, 2) for part in split)
    with torch.no_grad():
        rate = space.rate()  # [2, h, N]
        energy = torch.sqrt(-torch.expm1(2 * rate[0])).repeat(1, 2).unsqueeze(1).float().numpy()  # [h, 1, 2N]
        factor = torch.exp(torch.complex(*rate).unsqueeze(1) * torch.arange(-LONGEST, LONGEST + 1).unsqueeze(-1))

    def powers(exponents: Any) -> tuple[Array, Array]:
        found = factor[:, LONGEST + torch.as_tensor(exponents)]
        return found.real.float().numpy(), found.imag.float().numpy()

    to_middle = middle - np.arange(LONGEST)
    cos, sin = powers(to_middle)  # [h, 64, N]
    back_cos, back_sin = powers(-to_middle)
    turn, back = ([graph.first(part, piece.count, 1) for part in t] for t in ((cos, sin), (back_cos, -back_sin)))
    keys = _turned(graph, graph("Mul", graph.rms(keys, 1e-6), graph.constant(energy)), turn, 2)
    queries = graph("Mul", graph.rms(queries, 1e-6), graph.number(1 / math.sqrt(2 * modes)))
    queries = _turned(graph, queries, back, 2)  # by conj(e^(−λ(c−i)))
    inside = graph("Trilu", graph("MatMul", queries, graph.transposed(keys, 0, 2, 1)), upper=0)
    before = _turned(graph, state, [graph.constant(part[..., None]) for part in powers(middle + 1)], 1)
    y = graph("Add", graph("MatMul", inside, values), graph("MatMul", queries, before))
    y = graph("Add", y, graph("Mul", values, graph.parameter(space.skip.reshape(-1, 1, 1))))
    added = graph("MatMul", graph.transposed(keys, 0, 2, 1), values)  # [h, 2N, D], as seen from the middle
    counts = np.arange(1, LONGEST + 1)
    after = [
        _turned(graph, what, [_row(graph, part, piece) for part in powers(exponents)], 1)
        for what, exponents in ((state, counts), (added, counts - 1 - middle))
    ]
    return y, graph("Add", *after)


def _row(graph: Graph, table: Array, piece: Piece) -> str:
    """The entry of a table [h, 64, N] for the length of the piece: [h, N, 1]."""
    rows = np.ascontiguousarray(table.transpose(1, 0, 2))[..., None]  # [64, h, N, 1]
    return graph("Squeeze", graph("Gather", graph.constant(rows), piece.last), graph.whole(0))


def _attention(graph: Graph, layer: TransformerBlock, x: str, state: State, piece: Piece) -> tuple[str, State]:
    heads, width = layer.heads, layer.head_width
    projected = graph.dense(graph.norm(x, layer.norm), layer.query_key_value)
    parts = graph.several("Split", 3, projected, axis=1, num_outputs=3)
    queries, keys, values = (graph.reshaped(part, 0, heads, width) for part in parts)  # [L, h, d]
    if layer.query_norm is not None and layer.key_norm is not None:
        queries, keys = graph.norm(queries, layer.query_norm), graph.norm(keys, layer.key_norm)
    if layer.rotary_base is not None:
        frequency = layer.rotary_base ** -(np.arange(width // 2) / (width // 2))
        turn = [graph("Unsqueeze", wave, graph.whole(1)) for wave in waves(graph, piece, frequency)]  # [L, 1, d/2]
        queries, keys = (_turned(graph, each, turn, 2) for each in (queries, keys))
    queries = graph("Mul", graph.transposed(queries, 1, 0, 2), graph.number(width**-0.5))
    # Cache and piece are attended to apart and meet in the softmax: joining them would copy the whole cache.
    pairs = [(state["keys"], state["values"]), (keys, values)]
    scores = [graph("MatMul", queries, graph.transposed(each, 1, 2, 0)) for each, _ in pairs]  # [h, L, W or L]
    seen = graph("Where", piece.visible(graph, layer), graph("Concat", *scores, axis=2), graph.number(-math.inf))
    sizes = graph("Concat", graph.whole(layer.reach or 0), piece.count, axis=0)
    shares = graph.several("Split", 2, graph("Softmax", seen, axis=-1), sizes, axis=2)
    parts = [
        graph("MatMul", share, graph.transposed(each, 1, 0, 2)) for share, (_, each) in zip(shares, pairs, strict=True)
    ]
    attended = graph.reshaped(graph.transposed(graph("Add", *parts), 1, 0, 2), 0, -1)
    x = graph("Add", x, graph.dense(attended, layer.output))
    new = {"keys": keys, "values": values}
    after = {name: piece.kept(graph, state[name], each, layer.reach or 0) for name, each in new.items()}
    return _feedforward(graph, layer.feedforward, x), after


def waves(graph: Graph, piece: Piece, frequency: Array) -> tuple[str, str]:
    """Cosines and sines [L, …] of positions times frequencies; full turns are removed in float64."""
    place = graph.reshaped(graph("Cast", piece.places, to=TensorProto.DOUBLE), -1, 1)
    turns = graph("Mul", place, graph.constant(frequency / (2 * math.pi)))
    part = graph("Cast", graph("Sub", turns, graph("Floor", turns)), to=TensorProto.FLOAT)
    angle = graph("Mul", part, graph.number(2 * math.pi))
    return graph("Cos", angle), graph("Sin", angle)
