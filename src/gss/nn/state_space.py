"""The diagonal state space: H channels, each a sum of N decaying complex modes, and the initializations of its modes.

In parallel it is a convolution, step by step a recurrence. Both work on the same state, [B, H, N] complex numbers
stored as real pairs. Parameters are real too, because automatic mixed precision, sharding and collectives all have
trouble with complex ones. The arithmetic stays in float32 (or float64) under autocast.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gss.config import StateSpaceConfig
from gss.nn.context import across_ranks, by_decay
from gss.nn.decoding import Block, DecodePlan
from gss.nn.documents import each_document_alone
from gss.nn.state import LayerState, SequenceLayer, Slot, state_dtype
from gss.ops import fast
from gss.ops.state_space import carried_output, convolve, discretize, eigenvalues, final_state, kernel, step, transition


class StateSpace(nn.Module):
    """Decaying modes. To the optimizer, every parameter of such a module is a "state-space parameter"."""

    def time_constants(self) -> Tensor:
        """Tokens after which each mode has faded to 1/e, float64."""
        raise NotImplementedError

    def responses(self, length: int) -> Tensor:
        """The impulse response of each channel or mode over the next L outputs: [channels, L]."""
        raise NotImplementedError


class DiagonalStateSpace(StateSpace):
    """y = D·u + K∗u for each of H channels."""

    def __init__(self, channels: int, config: StateSpaceConfig) -> None:
        super().__init__()
        self.config = config
        self.channels = channels
        self.log_decay = nn.Parameter(torch.empty(config.modes))  # Re λ = −exp(log_decay)
        self.frequency = nn.Parameter(torch.empty(config.modes))  # Im λ, or its logarithm
        self.readout = nn.Parameter(torch.empty(channels, config.modes, 2))  # C as (real, imaginary)
        self.skip = nn.Parameter(torch.empty(channels))  # D
        self.log_step = nn.Parameter(torch.empty(channels)) if config.step_range else None  # log Δ
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameters according to the config's init fields."""
        if self.skip.is_meta:
            return  # nothing to draw, and drawing would import the compiler's arithmetic on shapes
        config = self.config
        decay, frequency = initial_decay(config), initial_frequency(config)
        self.log_decay.copy_(decay.log())
        self.frequency.copy_(frequency.log() if config.imaginary == "exp" else frequency)
        nn.init.normal_(self.skip)
        if config.step_range and self.log_step is not None:
            self.log_step.copy_(_log_uniform(self.channels, *config.step_range).log())
        nn.init.normal_(self.readout)
        self.readout.mul_(self._readout_scale().unsqueeze(-1))

    def discretized(self) -> tuple[Tensor, Tensor]:
        """(C·B̄ [H, N] in the compute precision, log Ā [G, N] complex128)."""
        log_a, drive = discretize(self.eigenvalues(), self.log_step, self.config.discretization)
        kind = state_dtype(self.readout.dtype)
        return torch.view_as_complex(self.readout.to(kind)) * drive.to(kind.to_complex()), log_a

    def mixing_flops(self, length: int) -> float:
        """Two real FFTs of size 2L and the product between them, per token; the kernel, which the batch shares, is not
        counted."""
        size = 2 * length
        return self.channels * (2 * 2.5 * size * math.log2(size) + 3 * size) / length

    def eigenvalues(self) -> Tensor:
        """λ [N], complex128."""
        return eigenvalues(self.log_decay, self.frequency, self.config.imaginary)

    @fast.uncompiled
    def taps(self, length: int) -> Tensor:
        """The kernel [H, L], D included in its first tap."""
        with torch.autocast(self.skip.device.type, enabled=False):
            return kernel(*self.discretized(), length, self.skip)

    @torch.no_grad()
    def time_constants(self) -> Tensor:
        """Tokens after which each mode has faded to 1/e: N, or H·N if each channel has its own Δ, float64."""
        return (-1 / self.discretized()[1].real).flatten()

    @torch.no_grad()
    def responses(self, length: int) -> Tensor:
        """The kernel [H, L], without D."""
        return kernel(*self.discretized(), length)

    @across_ranks(by_decay)
    @each_document_alone
    def forward(self, u: Tensor, state: Any = None, keep_state: bool = True) -> tuple[Tensor, Tensor | None]:
        """u [B, L, H] and a state [B, H, N, 2] → y [B, L, H] in the state's precision, and the next state.

        With GPU kernels under autocast, y has the reduced precision.
        """
        kind = fast.half(u)
        if kind is None or u.shape[1] == 1:
            return self._mix(u, state, keep_state)
        return self._mix_on_gpu(u.to(kind), state, keep_state)

    def left(self, u: Tensor) -> Tensor:
        """The state after u [B, L, H], starting from an empty one."""
        kind = fast.half(u)
        if kind is not None and self.log_step is None:  # a second convolution costs less than products in float32
            after = self._mix_on_gpu(u.to(kind), None, True)[1]
            assert after is not None
            return after
        with torch.autocast(u.device.type, enabled=False):
            return torch.view_as_real(final_state(u.to(state_dtype(self.readout.dtype)), self.discretized()[1], None))

    def faded(self, state: Tensor, tokens: int) -> Tensor:
        """The state [B, H, N, 2] after this many further tokens, all zero."""
        before = torch.view_as_complex(state)
        return torch.view_as_real(before * transition(self.discretized()[1] * tokens, before.dtype))

    def _mix_on_gpu(self, u: Tensor, state: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor | None]:
        """With kernels, whose layout has channels first. They handle the paper's form always, and other forms if one
        row of the FFT holds the signal and there is no state.
        """
        from gss.ops.gpu import fft, long
        from gss.ops.gpu.transpose import swapped

        if self.log_step is None and self.config.discretization == "zoh" and self.readout.dtype == torch.float32:
            parameters = (self.log_decay, self.frequency, self.readout, self.skip, self.config.imaginary == "exp")
            y, after, *_ = long.mix_long(swapped(u), *parameters, state, keep_state)
            return swapped(y), after if keep_state else None
        row = fft.row_length(u.shape[1])
        if state is None and not keep_state and u.shape[1] <= row:
            return swapped(fft.convolve_rows(swapped(u), self.taps(row))), None
        return self._mix(u, state, keep_state)

    @fast.uncompiled  # the compiler lacks complex arithmetic: one graph break per layer instead of many
    def _mix(self, u: Tensor, state: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(u.device.type, enabled=False):
            u = u.to(state_dtype(self.readout.dtype))
            readout, log_a = self.discretized()
            before = None if state is None else torch.view_as_complex(state)
            if u.shape[1] == 1:
                before = readout.new_zeros(u.shape[0], *readout.shape) if before is None else before
                y, after = step(u[:, 0], before, readout, transition(log_a, log_a.dtype))
                y = (y + self.skip.to(y.dtype) * u[:, 0]).unsqueeze(1)
                return y, torch.view_as_real(after) if keep_state else None
            y = convolve(u, kernel(readout, log_a, u.shape[1], self.skip))
            if before is not None:
                y = y + carried_output(before, readout, log_a, u.shape[1])
            return y, torch.view_as_real(final_state(u, log_a, before)) if keep_state else None

    def _readout_scale(self) -> Tensor:
        """The factor of the N(0,1) draws of C, per mode."""
        modes, kind = self.config.modes, self.config.readout_init
        if kind in ("unit", "inverse_sqrt", "inverse"):
            return torch.full((modes,), {"unit": 1.0, "inverse_sqrt": modes**-0.5, "inverse": 1 / modes}[kind])
        # Each mode's Σ_k |C B̄ Ā^k|² becomes 1/N. With a Δ per channel, at the geometric mean of its range.
        span = self.config.step_range
        log_step = torch.tensor([math.log(math.prod(span)) / 2]) if span else None
        log_a, drive = discretize(self.eigenvalues(), log_step, self.config.discretization)
        energy = drive.abs().square() / -torch.expm1(2 * log_a.real)
        equal_energy = (energy * modes).rsqrt().squeeze(0).to(self.readout.dtype)
        if kind == "equal_energy":
            return equal_energy
        half = modes // 2
        return torch.cat([torch.full((half,), modes**-0.5), 0.3 * equal_energy[half:]])


class StateSpaceLayer(SequenceLayer):
    """A layer that mixes tokens only in state spaces: the common part of GSS and DSS."""

    def spaces(self) -> dict[str, DiagonalStateSpace]:
        """The state spaces by the names of their states."""
        raise NotImplementedError

    def state_slots(self) -> dict[str, Slot]:
        return {name: Slot((space.channels, space.config.modes, 2)) for name, space in self.spaces().items()}

    def mixing_flops(self, length: int) -> float:
        return sum(space.mixing_flops(length) for space in self.spaces().values())

    def decode_plan(self, state: LayerState, block: Block) -> DecodePlan:
        from gss.nn.decode_plans import StateSpacePlan  # which knows this module

        return StateSpacePlan(self, state, block)


def skew_hippo_frequencies(modes: int) -> Tensor:
    """The positive imaginary parts of the eigenvalues of HiPPO's skew-symmetric part, ascending: [N] float64."""
    scale = torch.sqrt(2 * torch.arange(2 * modes, dtype=torch.float64) + 1)
    lower = torch.tril(torch.outer(scale, scale), diagonal=-1)
    # i·(M − Mᵀ)/2 is Hermitian with the same eigenvalues, rotated onto the real line.
    eigenvalue = torch.linalg.eigvalsh(1j * (lower - lower.T) / 2)
    return eigenvalue[modes:]


def initial_decay(config: StateSpaceConfig) -> Tensor:
    """−Re λ at the start: [N]."""
    slow = _log_uniform(config.modes, *config.decay_range)
    fast = torch.randn(config.modes, dtype=torch.float64).exp()
    if config.decay_init == "mixed":
        half = config.modes // 2
        return torch.cat([fast[:half], slow[half:]])
    return slow if config.decay_init == "log_uniform" else fast


def initial_frequency(config: StateSpaceConfig) -> Tensor:
    """Im λ at the start: [N], positive."""
    modes, kind = config.modes, config.frequency_init
    if kind == "skew_hippo":
        return skew_hippo_frequencies(modes)
    if kind == "linear":
        return 2 * math.pi * (torch.arange(modes, dtype=torch.float64) + 0.5) / modes
    normal = {"log_normal": modes, "mixed": modes // 2, "log_uniform": 0}[kind]  # how many modes
    drawn = torch.randn(normal, dtype=torch.float64).exp()
    return torch.cat([drawn, _log_uniform(modes - normal, *config.frequency_range)])


def _log_uniform(count: int, low: float, high: float) -> Tensor:
    return torch.empty(count, dtype=torch.float64).uniform_(math.log(low), math.log(high)).exp()
