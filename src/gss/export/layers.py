"""The ONNX form of each kind of layer: a piece of 1 to 64 tokens and a state in, outputs and the next state out.

There is no FFT: over such a short piece, a state space is a convolution with its first 64 taps, and the contribution of
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
from gss.ops.positions import rotary_frequencies

LONGEST = 64  # the most tokens in a piece
State = dict[str, str]
_EXPORTED = "GSS, GSS2 and attention on chunks or over a sliding window"


class Piece:
    """What all layers need to know about a piece: the number of tokens, and their positions."""

    def __init__(self, graph: Graph, tokens: str, position: str) -> None:
        self.count = graph("Shape", tokens)  # L, as one number
        self.position = position
        self.last = graph("Sub", graph("Size", tokens), graph.constant(np.array(1)))  # a scalar, to take table rows by
        self.places = graph("Add", graph.first(np.arange(LONGEST), self.count, 0), position)  # [L]
        self._known: dict[Any, Any] = {}

    def windows(self, graph: Graph, taps: int) -> str:
        """Where each token and those before it are in a piece that `taps` − 1 tokens precede: [L, taps]."""
        if taps not in self._known:
            table = np.arange(LONGEST)[:, None] + np.arange(taps)
            self._known[taps] = graph.first(table, self.count, 0)
        return str(self._known[taps])

    def rotations(self, graph: Graph, base: float, width: int) -> list[str]:
        """Factors [L, 1, d] for `_turned` that turn queries and keys to their positions."""
        key = (base, width)
        if key not in self._known:
            cos, sin = waves(graph, self, rotary_frequencies(width, base, torch.device("cpu")).numpy())
            both = graph("Concat", cos, cos, axis=1), graph("Concat", graph("Neg", sin), sin, axis=1)
            self._known[key] = [graph("Unsqueeze", wave, graph.whole(1)) for wave in both]
        return list(self._known[key])

    def visible(self, graph: Graph, layer: TransformerBlock) -> str:
        """Which slots of the cache and tokens of the piece each token attends to: [L, W + L].

        Caches are rings: slot s holds the newest token read whose place is s modulo W. Tokens of an earlier chunk
        that a layer on chunks finds there are not seen.
        """
        key = (layer.chunk, layer.sliding, "seen")
        if key not in self._known:
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
            self._known[key] = graph("And", near, graph("LessOrEqual", places, own))
        return str(self._known[key])


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
    """A layer's outputs [L, E] and the state after them, or the rows that belong into its rings."""
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
    both = graph.activation(graph.dense(normed, layer.inner, layer.gate), layer.activation)
    widths = graph.whole(layer.inner.out_features, layer.gate.out_features)
    inner, gate = graph.several("Split", 2, both, widths, axis=1)
    y, after = _state_space(graph, layer.state_space, graph.norm(inner, layer.inner_norm), state["modes"], piece)
    return graph.dense(graph("Mul", graph.dense(y, layer.context), gate), layer.output, plus=x), {"modes": after}


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
    if layer.gated is None:
        hidden = graph.activation(graph.dense(normed, layer.inner), layer.activation)
    else:
        both = graph.dense(normed, layer.inner, layer.gated)
        inner, gate = graph.several("Split", 2, both, axis=1, num_outputs=2)
        hidden = graph("Mul", graph.activation(inner, layer.activation), gate)
    return graph.dense(hidden, layer.outer, plus=x)


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
    fading = [graph("Gather", graph.constant(part.numpy()), piece.last) for part in _planes(powers[1:, None], 1)]
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
    """Complex numbers, their real and imaginary parts the halves of x along an axis, times those of `_halves`."""
    other = graph("Concat", *reversed(graph.several("Split", 2, x, axis=axis, num_outputs=2)), axis=axis)
    return graph("Add", graph("Mul", x, factor[0]), graph("Mul", other, factor[1]))


def _halves(numbers: torch.Tensor) -> tuple[Array, Array]:
    """Complex factors [h, 64, N] in the form of `_turned`, [h, 64, 2N]: the real part, and the imaginary part."""
    real, imaginary = torch.cat([numbers.real] * 2, -1), torch.cat([-numbers.imag, numbers.imag], -1)
    return (real.float().numpy(), imaginary.float().numpy())


def _gss2(graph: Graph, layer: GSS2Layer, x: str, state: State, piece: Piece) -> tuple[str, State]:
    channels, inner = layer.short.taps.shape[1], layer.gate.out_features
    read = graph.dense(graph.norm(x, layer.norm), layer.query, layer.key, layer.value, layer.gate)
    parts, gate = graph.several("Split", 2, read, graph.whole(channels, inner), axis=1)
    known = graph("Concat", state["recent"], parts, axis=0)  # [taps − 1 + L, channels]
    taps = graph.constant(layer.short.taps.detach().flip(0).float().numpy())
    seen = graph("Mul", graph("Gather", known, piece.windows(graph, layer.short.reach + 1)), taps)
    convolved = graph("ReduceSum", seen, graph.whole(1), keepdims=0)
    recent = graph("Slice", known, piece.count, graph.whole(1 << 60), graph.whole(0))
    y, modes = _keyed(graph, layer, convolved, state["modes"], piece)
    y = _unit(graph, y, layer.value.out_features // layer.state_space.heads)
    normal = graph.reshaped(graph.transposed(y, 1, 0, 2), 0, -1)  # [L, h·D]
    y = graph("Mul", graph("Mul", normal, graph.parameter(layer.output_scale)), graph.activation(gate, "swish"))
    x = graph.dense(y, layer.output, plus=x)
    return _feedforward(graph, layer.feedforward, x), {"modes": modes, "recent": recent}


def _keyed(graph: Graph, layer: GSS2Layer, x: str, state: str, piece: Piece) -> tuple[str, str]:
    """[L, queries + keys + values], not activated, and S [h, 2N, D] → y [h, L, D] and the next S, as
    `ops.matrix_state` has a chunk.

    Queries and keys are turned from and to the middle of a piece of 64, so that no power overflows; then from the
    state before the piece, and to its end. What is turned is one array of queries and keys, [2h, L, 2N].
    """
    space = layer.state_space
    heads, modes, middle = space.heads, space.modes, LONGEST // 2
    split = graph.several("Split", 2, x, graph.whole(heads * 4 * modes, layer.value.out_features), axis=1)
    both, values = (
        graph.transposed(graph.reshaped(graph.activation(part, name), 0, count, -1), 1, 0, 2)
        for part, count, name in zip(split, (2 * heads, heads), (layer.feature_map, "swish"), strict=True)
    )
    with torch.no_grad():
        rate = space.rate()  # [2, h, N]
        energy = torch.sqrt(-torch.expm1(2 * rate[0])).unsqueeze(1)  # [h, 1, N]
        factor = torch.exp(torch.complex(*rate).unsqueeze(1) * torch.arange(-LONGEST, LONGEST + 1).unsqueeze(-1))

    def powers(exponents: Any) -> torch.Tensor:
        return factor[:, LONGEST + torch.as_tensor(exponents)]  # [h, …, N]

    places, counts = np.arange(LONGEST), np.arange(1, LONGEST + 1)
    # By conj(λ^(j − c)) and λ^(c − j), then by conj(λ^(c + 1)) and λ^(L − 1 − c).
    near = torch.cat([powers(places - middle).conj() / math.sqrt(2 * modes), powers(middle - places) * energy])
    far = torch.cat([powers(np.full(LONGEST, middle + 1)).conj(), powers(counts - 1 - middle)])
    both = _turned(graph, _unit(graph, both, 2 * modes), [graph.first(t, piece.count, 1) for t in _halves(near)], 2)
    ends = _turned(graph, both, [_row(graph, table[:, :, None], piece) for table in _halves(far)], 2)
    (queries, keys), (early, late) = (graph.several("Split", 2, each, axis=0, num_outputs=2) for each in (both, ends))
    inside = graph("Trilu", graph("MatMul", queries, graph.transposed(keys, 0, 2, 1)), upper=0)
    y = graph("Add", graph("MatMul", inside, values), graph("MatMul", early, state))
    y = graph("Add", y, graph("Mul", values, graph.parameter(space.skip.reshape(-1, 1, 1))))
    # λ^L is near 1 for a slow mode; its difference from 1 keeps the digits that thousands of steps need.
    lost = _turned(graph, state, [_row(graph, table[..., None], piece) for table in _halves(powers(counts) - 1)], 1)
    change = graph("Add", lost, graph("MatMul", graph.transposed(late, 0, 2, 1), values))
    return y, graph("Add", state, change)


def _unit(graph: Graph, x: str, width: int) -> str:
    """Vectors divided by their root mean square."""
    return graph.rms(x, 1e-6, graph.constant(np.ones(width, np.float32)))


def _row(graph: Graph, table: Array, piece: Piece) -> str:
    """The entry of a table [h, 64, …] for the length of the piece, [h, …]."""
    return graph("Gather", graph.constant(table.swapaxes(0, 1)), piece.last)


def _attention(graph: Graph, layer: TransformerBlock, x: str, state: State, piece: Piece) -> tuple[str, State]:
    heads, width = layer.heads, layer.head_width
    projected = graph.dense(graph.norm(x, layer.norm), layer.query_key_value)
    both, values = graph.several("Split", 2, projected, graph.whole(2 * heads * width, heads * width), axis=1)
    both, values = graph.reshaped(both, 0, 2 * heads, width), graph.reshaped(values, 0, heads, width)  # [L, 2h or h, d]
    if layer.query_norm is not None and layer.key_norm is not None:
        queries, keys = graph.several("Split", 2, both, axis=1, num_outputs=2)
        both = graph("Concat", graph.norm(queries, layer.query_norm), graph.norm(keys, layer.key_norm), axis=1)
    if layer.rotary_base is not None:
        both = _turned(graph, both, piece.rotations(graph, layer.rotary_base, width), 2)
    queries, keys = graph.several("Split", 2, both, axis=1, num_outputs=2)
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
    x = graph.dense(attended, layer.output, plus=x)
    return _feedforward(graph, layer.feedforward, x), {"keys": keys, "values": values}


def waves(graph: Graph, piece: Piece, frequency: Array) -> tuple[str, str]:
    """Cosines and sines [L, …] of positions times frequencies; full turns are removed in float64."""
    place = graph.reshaped(graph("Cast", piece.places, to=TensorProto.DOUBLE), -1, 1)
    turns = graph("Mul", place, graph.constant(frequency / (2 * math.pi)))
    part = graph("Cast", graph("Sub", turns, graph("Floor", turns)), to=TensorProto.FLOAT)
    angle = graph("Mul", part, graph.number(2 * math.pi))
    return graph("Cos", angle), graph("Sin", angle)
