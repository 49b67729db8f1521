"""How layers decode on a GPU: their weights in bfloat16, their buffers, and the kernel launches for a token.

Apart from the rounding of the weights, the algorithm is that of `gss.nn.decode_plans`: the state, the residual stream
and all sums stay float32. A layer's `gpu_plan` says whether there are kernels for it.
"""

import math

import torch
import triton
from torch import Tensor, nn

from gss.nn.attention import TransformerBlock
from gss.nn.decoding import Block, GPUPlan
from gss.nn.dense import FeedForward
from gss.nn.gss import GSSLayer
from gss.nn.gss2 import GSS2Layer
from gss.nn.state import LayerState
from gss.nn.windows import as_ring, in_order
from gss.ops.gpu import decode, decode_batch, decode_mixers
from gss.ops.gpu.decode_launch import Mixing, Pair, Stream, pad
from gss.ops.positions import rotary_frequencies
from gss.ops.state_space import carried_output, carried_state, final_state
from gss.ops.vandermonde import exponential

WIDEST = 4096
"""The widest vector that a kernel holds at once."""
_MOST_CHANNELS = 1024
_LARGEST_STATE = 2**14  # complex numbers of a head that a program holds


class GSSPlan(GPUPlan):
    """A GSS layer with eigenvalues that all channels share."""

    drafts = True
    _mixing: Mixing

    @torch.no_grad()
    def __init__(self, layer: GSSLayer, block: int) -> None:
        space = layer.state_space
        self.norm, self.inner_norm = norm_pair(layer.norm), norm_pair(layer.inner_norm)
        self.gate_inner = dense_pair(layer.gate, layer.inner)  # [F + H, E]
        self.context, self.output = dense_pair(layer.context), dense_pair(layer.output)  # [F, H], [E, F]
        with torch.autocast(space.skip.device.type, enabled=False):
            self.readout, self.log_a = space.discretized()
            taps = space.taps(block)
            power = exponential(self.log_a[0] * torch.arange(block + 1, device=taps.device).unsqueeze(-1))  # [W + 1, N]
        self.taps = taps.T.float().contiguous()  # [W, H]
        self.power = torch.stack([power.real, power.imag]).flip(1)  # [2, W + 1, N]: a^(W−j), in float64
        self.into = self.power.float()
        self.planes = torch.view_as_real(self.readout).movedim(-1, 0).float().contiguous()  # [2, H, N]
        conjugate = torch.stack([power.real, -power.imag]).float()
        self.out_of = conjugate[:, 1:].transpose(1, 2).contiguous()  # [2, N, W]: a^(k+1)

    @staticmethod
    def fits(layer: GSSLayer) -> bool:
        return layer.state_space.log_step is None and layer.state_space.channels <= _MOST_CHANNELS

    def make_room(self, stream: Stream) -> None:
        _, H, N = self.planes.shape
        F, W, B = len(self.context[0]), len(self.taps), stream.batch
        base, inner = (stream.scratch(name, H, dtype=torch.float32) for name in ("base", "inner"))
        if stream.draft:
            self._mixing = self._mixing._replace(base=base, inner=inner)
        else:
            self._modes = stream.room(2, B, H, N, dtype=torch.float64)
            self._mixing = Mixing(stream.room(W, B, H), self.taps, stream.room(W, B, H), base, inner)
        self._gate, self._gated = stream.scratch("gate", F), stream.scratch("gated", F)

    def launch(self) -> None:
        stream, form, mixing, (F, H) = self.stream, self.stream.form, self._mixing, self.context[0].shape
        stream.product(self.norm, self.gate_inner, self._gate, form.activation, mixing)
        given = (
            mixing.inner, *self.inner_norm, mixing.base, self.taps, mixing.inputs, stream.read,
            *self.context, self._gate, self._gated, form.epsilon,
        )  # fmt: skip
        if stream.batch == 1:
            tile = stream.tiles.context_one
            rows = tile.rows_of(H)
            decode.context_one[(triton.cdiv(F, rows),)](
                *given, F, H, form.centred, H_PAD=pad(H), ROWS=rows, **stream.launch(tile)
            )
        else:
            tile = stream.tiles.context_many
            columns = max(16, min(tile.columns_of(stream.batch), 2**14 // pad(H)))
            rows = max(16, min(tile.rows, 2**15 // pad(H)))
            decode_batch.context_many[(triton.cdiv(F, rows), triton.cdiv(stream.batch, columns))](
                *given, stream.batch, F, H, form.centred,
                H_PAD=pad(H, 16), ROWS=rows, COLUMNS=columns, DRAFT=stream.draft, **stream.launch(tile),
            )  # fmt: skip
        stream.add(self._gated, self.output)

    def fold(self, late: bool) -> None:
        stream, tile, W, (_, H, N) = self.stream, self.stream.tiles.fold, len(self.taps), self.planes.shape
        precision = stream.tiles.fold_precision
        if triton.knobs.runtime.interpret:  # the interpreter knows no bf16x3
            precision = "ieee"
        decode_mixers.fold_block[(triton.cdiv(stream.batch * H, tile.rows),)](
            self._modes, self._mixing.inputs, stream.joined, self.power, self.into, self.planes, self.out_of,
            self._mixing.carried, stream.batch * H, H, N, W, late,
            W_PAD=pad(W, 16), ROWS=tile.rows, MODES=tile.depth, PRECISION=precision,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def put(self, state: LayerState, places: Tensor, block: Block) -> None:
        modes = state["modes"].float().contiguous()
        self._modes[:, places] = modes.double().movedim(-1, 0)
        self._mixing.inputs[:, places] = 0
        with torch.autocast(modes.device.type, enabled=False):
            left = block.size - block.read
            carried = carried_output(torch.view_as_complex(modes), self.readout, self.log_a, left)
        self._mixing.carried[block.read :, places] = carried.transpose(0, 1)

    def state(self, places: Tensor, block: Block) -> LayerState:
        modes = torch.complex(*self._modes[:, places])
        if block.read:
            age = torch.tensor([block.read - joined for joined in block.joined[: len(places)]], device=modes.device)
            with torch.autocast(modes.device.type, enabled=False):
                added = final_state(self._mixing.inputs[: block.read, places].transpose(0, 1), self.log_a, None)
                modes = added + carried_state(modes, self.log_a * age[:, None, None])
        return {"modes": torch.view_as_real(modes.to(torch.complex64))}


class TransformerPlan(GPUPlan):
    """A Transformer block that attends on chunks or over a sliding window."""

    def __init__(self, layer: TransformerBlock) -> None:
        self.norm, self.feedforward = norm_pair(layer.norm), FeedForwardPlan(layer.feedforward)
        self.query_key_value, self.output = dense_pair(layer.query_key_value), dense_pair(layer.output)
        self.heads, self.head_width = layer.heads, layer.head_width
        self.kept, self.ring = layer.reach or 0, not layer.chunk
        self.drafts = not self.ring  # a token takes the place of one that its predecessors need
        weight = layer.output.weight
        self.frequency = None
        if layer.rotary_base is not None:
            frequency = rotary_frequencies(layer.head_width, layer.rotary_base, weight.device)
            self.frequency = frequency / (2 * math.pi)  # turns per token
        norms = [layer.query_norm, layer.key_norm]
        self.scales = [norm_pair(norm)[0] for norm in norms if norm is not None]

    @staticmethod
    def fits(layer: TransformerBlock) -> bool:
        known = layer.query_norm is None or isinstance(layer.query_norm, nn.RMSNorm)
        return known and layer.reach is not None and layer.heads * layer.head_width <= WIDEST

    def make_room(self, stream: Stream) -> None:
        B, across, kept = stream.batch, self.heads * self.head_width, (self.heads, self.kept, self.head_width)
        if not stream.draft:
            self._keys, self._values = (stream.room(B, *kept, dtype=torch.bfloat16) for _ in range(2))
        self._length = stream.counter()
        self._slice, self._slices = stream.tiles.attention_slices(self.kept, B)
        self._projected = stream.scratch("projected", 3 * across)
        self._attended = stream.scratch("attended", self._slices * across)
        self._peak, self._total = (
            stream.scratch(name, self._slices * self.heads, dtype=torch.float32) for name in ("peak", "total")
        )

    def launch(self) -> None:
        stream = self.stream
        stream.product(self.norm, self.query_key_value, self._projected, "none")
        tile = stream.tiles.attend
        unused = self._length
        decode_mixers.attend[(stream.batch * self.heads, self._slices)](
            self._projected, *(self.scales or (unused, unused)), unused if self.frequency is None else self.frequency,
            self._keys, self._values, self._length, self._attended, self._peak, self._total,
            self.head_width**-0.5, stream.form.epsilon, self.heads, self.head_width, self.kept, self._slice,
            WHOLE=stream.batch > 1, RING=self.ring, NORM=bool(self.scales), ROTARY=self.frequency is not None,
            WIDTH_PAD=pad(self.head_width), KEYS=tile.rows_of(2 * self.head_width), DRAFT=stream.draft > 0,
            **stream.launch(tile),
        )  # fmt: skip
        if stream.batch == 1:
            tile, (E, across) = stream.tiles.attended_one, self.output[0].shape
            rows = tile.rows_of(across)
            decode_mixers.attended_output_one[(triton.cdiv(E, rows),)](
                self._attended, self._peak, self._total, *self.output, stream.x,
                E, self.heads, self.head_width, self._slices,
                COLUMNS=pad(across), SLICES_PAD=pad(self._slices), ROWS=rows, **stream.launch(tile),
            )  # fmt: skip
        else:
            stream.add(self._attended, self.output)
        self.feedforward.launch(stream)

    def put(self, state: LayerState, places: Tensor, block: Block) -> None:
        for held, name in ((self._keys, "keys"), (self._values, "values")):
            tokens = as_ring(state[name], state["length"], self.kept) if self.ring else state[name]
            held[places] = tokens.transpose(1, 2).to(held.dtype)
        self._length[places] = state["length"]

    def state(self, places: Tensor, block: Block) -> LayerState:
        length = self._length[places]
        keys, values = (held[places].transpose(1, 2).float() for held in (self._keys, self._values))
        if self.ring:
            keys, values = (in_order(held, length, self.kept) for held in (keys, values))
        else:  # beyond what was read, a draft may have left NaN
            slot = torch.arange(self.kept, device=length.device)
            known = (slot <= ((length - 1) % self.kept).unsqueeze(1))[:, :, None, None]
            keys, values = (held.where(known, 0) for held in (keys, values))
        return {"keys": keys, "values": values, "length": length}


class GSS2Plan(GPUPlan):
    """A GSS2 layer."""

    @torch.no_grad()
    def __init__(self, layer: GSS2Layer) -> None:
        space = layer.state_space
        self.norm, self.feedforward = norm_pair(layer.norm), FeedForwardPlan(layer.feedforward)
        self.projections = dense_pair(layer.query, layer.key, layer.value, layer.gate)
        self.output, self.taps = dense_pair(layer.output), layer.short.taps.detach().float()
        self.feature_map = layer.feature_map
        self.heads, self.modes, self.values = space.heads, space.modes, layer.value.out_features // space.heads
        rate = space.rate()
        step = exponential(torch.complex(*rate))
        self.step = torch.stack([step.real, step.imag]).float()  # [2, h, N]
        self.energy = torch.sqrt(-torch.expm1(2 * rate[0])).float()  # [h, N]
        self.skip, self.scale = space.skip.detach().float(), layer.output_scale.detach().float()

    @staticmethod
    def fits(layer: GSS2Layer) -> bool:
        space = layer.state_space
        return space.modes * layer.value.out_features // space.heads <= _LARGEST_STATE

    def make_room(self, stream: Stream) -> None:
        taps, channels = self.taps.shape
        self._modes = stream.room(stream.batch, self.heads, 2 * self.modes, self.values)
        self._recent = stream.room(stream.batch, taps - 1, channels)
        self._projected = stream.scratch("keyed", channels + self.heads * self.values)
        self._gated = stream.scratch("gated", self.heads * self.values)

    def launch(self) -> None:
        stream, modes, values = self.stream, pad(self.modes), pad(self.values)
        warps = min(16, max(4, modes * values // 1024))  # a state in fewer warps does not fit into their registers
        stream.product(self.norm, self.projections, self._projected, "none")
        decode_mixers.keyed_step[(stream.batch * self.heads,)](
            self._projected, self._recent, self.taps, self._modes, self.step, self.energy, self.skip, self.scale,
            self._gated, (2 * self.modes) ** -0.5, self.heads, self.modes, self.values, len(self.taps),
            self.feature_map, N_PAD=modes, D_PAD=values, **stream.launch() | {"num_warps": warps},
        )  # fmt: skip
        stream.add(self._gated, self.output)
        self.feedforward.launch(stream)

    def put(self, state: LayerState, places: Tensor, block: Block) -> None:
        self._modes[places], self._recent[places] = state["modes"].float(), state["recent"].float()

    def state(self, places: Tensor, block: Block) -> LayerState:
        return {"modes": self._modes[places], "recent": self._recent[places]}


class FeedForwardPlan:
    """The feed-forward at the end of a layer."""

    def __init__(self, layer: FeedForward) -> None:
        self.norm, self.outer = norm_pair(layer.norm), dense_pair(layer.outer)
        self.inner = dense_pair(layer.inner) if layer.gated is None else dense_pair(layer.inner, layer.gated)
        self.gated = layer.gated is not None

    def launch(self, stream: Stream) -> None:
        activation, F = stream.form.activation, self.outer[0].shape[1]
        hidden = stream.scratch("hidden", len(self.inner[0]))
        stream.product(self.norm, self.inner, hidden, "none" if self.gated else activation)
        if self.gated:
            both, hidden = hidden, stream.scratch("gated hidden", F)
            decode_mixers.gate_hidden[(triton.cdiv(F, 256), stream.batch)](
                both, hidden, F, activation, COLUMNS=256, **stream.launch()
            )
        stream.add(hidden, self.outer)


def norm_pair(norm: nn.Module) -> Pair:
    """A norm's scale and its shift (0 where there is none), float32."""
    scale, shift = norm.get_parameter("weight"), getattr(norm, "bias", None)
    return scale.detach().float(), torch.zeros_like(scale).float() if shift is None else shift.detach().float()


def dense_pair(*parts: nn.Linear) -> Pair:
    """The weights of layers that read the same input, one above the other, and their biases (0 where there is none)."""
    weight = torch.cat([part.weight.detach().to(torch.bfloat16) for part in parts])
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
    return weight, torch.cat([bias.detach().float() for bias in biases])
