"""GSS2: a Gated State Space whose tokens choose what to write and what to read, with a feed-forward after it.

As in GSS, the transition is diagonal, complex and the same for every token. Unlike in GSS, the input and output vectors
of the state space are computed from the token, like keys and queries in attention. The state is then a matrix per head,
modes × values, of constant size: a query retrieves what a token wrote under a matching key (docs/models.md).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gss.choices import ACTIVATIONS
from gss.config import ModelConfig
from gss.nn.context import Stretch, across_ranks, by_decay, by_recent
from gss.nn.decoding import Block, DecodePlan, GPUPlan
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.documents import each_document_alone
from gss.nn.state import LayerState, SequenceLayer, Slot, state_dtype
from gss.nn.state_space import StateSpace, initial_decay, initial_frequency
from gss.ops import fast, matrix_state
from gss.ops.norm import normalize


class GSS2Layer(SequenceLayer):
    """x + (norm(y) ∗ swish(norm(x)·W_z))·W_o, then a feed-forward; y is the state space's of q, k and v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, values = config.matrix_state.heads, config.matrix_state.value_width
        inner = heads * values
        keys = heads * 2 * config.state_space.modes
        self.norm = norm(config.width, config)
        self.query, self.key = dense(config.width, keys, config), dense(config.width, keys, config)
        self.value, self.gate = dense(config.width, inner, config), dense(config.width, inner, config)
        self.short = ShortConvolution(2 * keys + inner, config.matrix_state.taps)
        self.feature_map = config.matrix_state.feature_map
        self.state_space = KeyedStateSpace(config)
        self.output_scale = nn.Parameter(torch.ones(inner))
        self.output = dense(inner, config.width, config, last=True)
        self.dropout = nn.Dropout(config.dropout)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> tuple[Tensor, LayerState]:
        normed = normalize(self.norm, x)
        y, after = self.mix(self._projected(normed), state, keep_state)  # [B, L, h, D]
        y = F.rms_norm(y, y.shape[-1:], eps=1e-6).flatten(2) * self.output_scale
        x = x + self.dropout(self.output(y.to(normed.dtype) * F.silu(self.gate(normed))))
        return self.feedforward(x), after

    def _projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side; on a GPU by one product, so that nothing is copied."""
        layers = (self.query, self.key, self.value)
        if fast.half(x) is None or any(type(layer) is not nn.Linear for layer in layers):
            return torch.cat([layer(x) for layer in layers], dim=-1)
        weight = torch.cat(tuple(layer.weight for layer in layers))
        return F.linear(
            x, weight, None if self.query.bias is None else torch.cat(tuple(layer.bias for layer in layers))
        )

    @each_document_alone
    def mix(
        self, projected: Tensor, state: LayerState | None = None, keep_state: bool = True
    ) -> tuple[Tensor, LayerState]:
        """The short convolution and the state space: [B, L, queries + keys + values] → [B, L, h, D]."""
        half = fast.half(projected) if projected.shape[1] > 1 and not isinstance(state, Stretch) else None
        if half is not None:
            from gss.ops.gpu import short

            if len(self.short.taps) == short.TAPS and self.feature_map in short.FEATURE_MAPS:
                return self._mix_on_gpu(projected.to(half), state, keep_state)
        convolved, recent = self.short(projected, state, keep_state)
        y, modes = self.state_space(self._activated(convolved), state and state["modes"], keep_state)
        return y, {"modes": modes, "recent": recent["recent"]} if keep_state else {}

    def _activated(self, x: Tensor) -> Tensor:
        """The feature map of queries and keys, and swish of values."""
        if self.feature_map == "swish":
            return F.silu(x)
        keys, values = x.tensor_split([2 * self.query.out_features], dim=-1)
        return torch.cat([ACTIVATIONS[self.feature_map](keys), F.silu(values)], dim=-1)

    def _mix_on_gpu(self, x: Tensor, state: LayerState | None, keep_state: bool) -> tuple[Tensor, LayerState]:
        """`mix` with GPU kernels."""
        from gss.ops.gpu.short import short_mix

        space = self.state_space
        recent, modes = (None, None) if state is None else (state["recent"], state["modes"])
        with torch.autocast(x.device.type, enabled=False):
            rate = space.rate()
            scales = space.scales(rate)
            queries, keys, values = short_mix(x, self.short.taps, scales, recent, space.heads, self.feature_map)
            y, modes = matrix_state.scan(queries, keys, values, rate, modes, skip=space.skip)
        if not keep_state:
            return y, {}
        return y, {"modes": modes, "recent": self.short.kept(x, recent)}

    def state_slots(self) -> dict[str, Slot]:
        space = self.state_space
        taps, channels = self.short.taps.shape
        return {
            "modes": Slot((space.heads, 2 * space.modes, self.value.out_features // space.heads)),
            "recent": Slot((taps - 1, channels)),
        }

    def decode_plan(self, state: LayerState, block: Block) -> DecodePlan | None:
        from gss.nn.cpu_plans import CompiledGSS2Plan

        return CompiledGSS2Plan(self, state) if CompiledGSS2Plan.fits(self) else None

    def gpu_plan(self, block: int) -> GPUPlan | None:
        from gss.nn.gpu_plans import GSS2Plan

        return GSS2Plan(self) if GSS2Plan.fits(self) else None

    def mixing_flops(self, length: int) -> float:
        space = self.state_space
        keys, values = 2 * space.modes, self.value.out_features // space.heads
        chunk = min(matrix_state.CHUNK, length)
        taps, channels = self.short.taps.shape
        return space.heads * (chunk * (keys + values) + 4 * keys * values) + 2 * taps * channels


class ShortConvolution(nn.Module):
    """Each channel's sum over its last few tokens, with learned weights; it starts near the identity."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        drawn = torch.empty(taps, channels).normal_(std=1 / (4 * math.sqrt(taps)))
        self.taps = nn.Parameter(drawn)  # the newest token's first
        with torch.no_grad():
            self.taps[0] += 1

    @property
    def reach(self) -> int:
        """Tokens that the state holds."""
        return len(self.taps) - 1

    @across_ranks(by_recent)
    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> tuple[Tensor, LayerState]:
        """x [B, L, channels] after the taps − 1 tokens in the state (None: zeros), and those for the next piece."""
        before = self.reach
        known = F.pad(x, (0, 0, before, 0)) if state is None else torch.cat([state["recent"].to(x.dtype), x], dim=1)
        length = x.shape[1]
        y = sum(known[:, before - k : before - k + length] * tap.to(x.dtype) for k, tap in enumerate(self.taps))
        assert isinstance(y, Tensor)
        # A copy, so that the state does not keep the whole piece alive.
        return y, {"recent": known[:, length:].to(state_dtype(self.taps.dtype), copy=True)} if keep_state else {}

    def kept(self, x: Tensor, recent: Tensor | None) -> Tensor:
        """The recent tokens after a piece, as `forward` returns them."""
        before = x.new_zeros(len(x), self.reach, x.shape[2]) if recent is None else recent.to(x.dtype)
        known = torch.cat([before, x[:, -self.reach :]], dim=1)
        return known[:, known.shape[1] - self.reach :].to(state_dtype(self.taps.dtype))


class KeyedStateSpace(StateSpace):
    """The state space of each head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.modes = config.matrix_state.heads, config.state_space.modes
        # Re λ = −exp(log_decay), at most 1 per token; Im λ = exp(log_frequency)
        self.log_decay, self.log_frequency = (nn.Parameter(torch.empty(self.heads, self.modes)) for _ in range(2))
        for parameter, draw in ((self.log_decay, initial_decay), (self.log_frequency, initial_frequency)):
            if not parameter.is_meta:
                parameter.data.copy_(torch.stack([draw(config.state_space) for _ in range(self.heads)]).log())
        if config.matrix_state.multiscale and not self.log_decay.is_meta:
            self.log_decay.data = self.log_decay.data.flatten().sort(descending=True).values.view_as(self.log_decay)
        self.skip = nn.Parameter(torch.full((self.heads,), float(config.matrix_state.skip)))  # D

    def rate(self) -> Tensor:
        """λ, real and imaginary part, [2, h, N] float64."""
        decay = self.log_decay.double().exp().clamp(max=1.0)  # a faster mode would remember nothing, and overflow
        return torch.stack([-decay, self.log_frequency.double().exp()])

    @torch.no_grad()
    def time_constants(self) -> Tensor:
        return (-1 / self.rate()[0]).flatten()

    @torch.no_grad()
    def stretch(self, factor: float) -> None:
        """Divide λ by a factor, which multiplies all time constants. D shrinks with what modes write."""
        self.log_decay.sub_(math.log(factor))
        self.log_frequency.sub_(math.log(factor))
        self.skip.div_(math.sqrt(factor))

    @torch.no_grad()
    def responses(self, length: int) -> Tensor:
        """The response of each mode, [h·N, L], if query and key are the same unit vector."""
        rate = self.rate().flatten(1).unsqueeze(-1)  # [2, h·N, 1]
        response, _ = matrix_state.powers(rate, torch.arange(length, device=rate.device))
        return torch.sqrt(-torch.expm1(2 * rate[0])) * response

    @across_ranks(by_decay)
    def forward(self, x: Tensor, state: Any = None, keep_state: bool = True) -> tuple[Tensor, Tensor]:
        """Queries, keys and values side by side, [B, L, h·(2N + 2N + D)], and S [B, h, 2N, D] → y [B, L, h, D] and the
        next S.
        """
        with torch.autocast(x.device.type, enabled=False):
            rate = self.rate()
            return matrix_state.scan(*self._split(x, rate), rate, state, skip=self.skip)

    def left(self, x: Tensor) -> Tensor:
        """S after queries, keys and values, starting from an empty one."""
        with torch.autocast(x.device.type, enabled=False):
            rate = self.rate()
            _, keys, values = self._split(x, rate)
            return matrix_state.left(keys, values, rate)

    def faded(self, state: Tensor, tokens: int) -> Tensor:
        """S after this many further tokens, all zero."""
        return matrix_state.decayed(state, self.rate(), tokens)

    def energy(self, rate: Tensor) -> Tensor:
        """The factor of normed keys, [h, 2N]."""
        return torch.sqrt(-torch.expm1(2 * rate[0])).repeat(1, 2)

    def scales(self, rate: Tensor) -> Tensor:
        """The factors of each head's normed queries and keys, [2h, 2N] float32."""
        energy = self.energy(rate)
        return torch.cat([torch.full_like(energy, 1 / math.sqrt(2 * self.modes)), energy]).float()

    def _split(self, x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, L, h, 2N], of a length that makes every mode add the same energy, whatever its time
        constant, and values [B, L, h, D].
        """
        width = self.heads * 2 * self.modes
        parts = x.split([width, width, x.shape[-1] - 2 * width], dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        queries, keys = (F.rms_norm(t, t.shape[-1:], eps=1e-6) for t in (queries, keys))
        return queries / math.sqrt(2 * self.modes), keys * self.energy(rate).to(keys.dtype), values
