"""How layers decode: plans that read token by token, without gradients, on any device.

A plan starts from a state, updates its own copy in place, and can return the state between any two steps. A layer
without a plan of its own is decoded by its `forward` (`DecodePlan`). Rows may join and leave between steps, at a cost
that depends only on the size of their own state.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gss.nn.decoding import Block, DecodePlan
from gss.nn.state import LayerState
from gss.nn.state_space import DiagonalStateSpace, StateSpaceLayer
from gss.ops import cpu
from gss.ops.state_space import carried_output, final_state, transition
from gss.ops.vandermonde import exponential, powers

Module = TypeVar("Module", bound=nn.Module)


class RowBuffer:
    """A tensor whose rows (dimension 0) are added and removed in place, with spare room and few copies."""

    def __init__(self, tensor: Tensor) -> None:
        self._room = self.tensor = tensor

    def add(self, tensor: Tensor) -> None:
        before, after = len(self.tensor), len(self.tensor) + len(tensor)
        if after > len(self._room):
            room = self._room.new_zeros(2 * after, *self._room.shape[1:])
            room[:before] = self.tensor
            self._room = room
        self._room[before:after] = tensor
        self.tensor = self._room[:after]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; only rows that move are copied."""
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        if moved:
            places, sources = (list(side) for side in zip(*moved, strict=True))
            self._room[places] = self._room[sources]
        self.tensor = self._room[: len(rows)]


class StateSpacePlan(DecodePlan):
    """A layer whose tokens mix in state spaces: its own `forward`, with blocked state spaces."""

    def __init__(self, layer: StateSpaceLayer, state: LayerState, block: Block) -> None:
        self._block, spaces = block, layer.spaces()
        self._spaces = {name: BlockedStateSpace(space, state[name], block) for name, space in spaces.items()}
        self._layer = replaced(layer, {space: self._spaces[name] for name, space in spaces.items()})

    def step(self, x: Tensor) -> Tensor:
        return self._layer(x, None, False)[0]

    def ahead(self) -> int:
        return self._block.size - self._block.read

    def rewind(self, count: int) -> None:
        pass  # inputs after the block's cursor will be overwritten

    def fold(self) -> None:
        for space in self._spaces.values():
            space.fold()

    def state(self) -> LayerState:
        return {name: space.modes() for name, space in self._spaces.items()}

    def join(self, state: LayerState) -> None:
        for name, space in self._spaces.items():
            space.join(state[name])

    def keep(self, rows: Sequence[int]) -> None:
        for space in self._spaces.values():
            space.keep(rows)


def replaced(module: Module, by: Mapping[Any, nn.Module]) -> Module:
    """A copy of a module that shares its parameters, with some of its submodules replaced."""
    if module in by:
        return by[module]  # type: ignore[return-value]
    twin: Module = object.__new__(type(module))  # copy.copy would call the class that FSDP2 has put in its place
    twin.__dict__.update(module.__dict__)
    twin._compiled_call_impl = None  # which would call the module itself
    twin._modules = {name: child and replaced(child, by) for name, child in module._modules.items()}
    return twin


class BlockedStateSpace(nn.Module):
    """A diagonal state space that reads and writes its modes once per block of W tokens instead of at every token.

    Within a block, the output is the sum of what the state at its start contributes, computed for the whole block at
    once, and the block's own inputs convolved with the first taps of the kernel. At the end, the block is folded into
    the state. This is exact, and in the state's precision even under autocast. A row that joins within a block has
    zeros for the inputs that it missed, and its state counts from where it joined. Between folds the modes are kept in
    float64: if the mean of the inputs is not 0, they round the same way each time, and over millions of tokens the
    error would add up.
    """

    def __init__(self, space: DiagonalStateSpace, modes: Tensor, block: Block) -> None:
        super().__init__()
        self._readout, self._log_a = space.discretized()
        self._block = block
        taps = space.taps(block.size)
        self.reversed_taps = taps.flip(-1)  # [H, W]: the last one multiplies the newest input
        # If the channels share their modes, the table between states and outputs is small enough to store.
        self._table = None
        if len(self._log_a) == 1:
            conjugate = powers(self._log_a[0], block.size, taps.dtype).conj()  # of Ā^k, [N, W]
            self._table = torch.stack([conjugate.real, conjugate.imag], dim=1).flatten(0, 1)  # [2N, W]: real, imaginary
            self._readout = self._readout * transition(self._log_a, self._readout.dtype)
        self._modes = RowBuffer(torch.view_as_complex(modes).to(torch.complex128, copy=True))  # [B, H, N]
        self.inputs = RowBuffer(taps.new_zeros(modes.shape[0], *taps.shape))  # [B, H, W]
        self.carried = RowBuffer(taps.new_zeros(modes.shape[0], block.size, taps.shape[0]))  # [B, W, H]
        self._carry()

    def forward(self, u: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """u [B, L, H] → y [B, L, H] in the state's precision, with the interface of `DiagonalStateSpace`.

        The tokens are within the block; L is 1, or more to read tokens ahead.
        """
        read, size, length = self._block.read, self._block.size, u.shape[1]
        inputs, taps, carried = self.inputs.tensor, self.reversed_taps, self.carried.tensor
        plain = taps.dtype == torch.float32 and taps.device.type == "cpu"
        if plain and (steps := cpu.function("gss_blocked_steps", "lllllppppp")) is not None:
            u = u.float().contiguous()
            y = torch.empty_like(u)
            tensors = (u, inputs, taps, carried, y)
            steps(len(u), length, len(taps), size, read, *map(cpu.pointer, tensors))
            return y, None
        inputs[:, :, read : read + length] = u.transpose(1, 2)
        with torch.autocast(u.device.type, enabled=False):
            ends = range(read + 1, read + length + 1)
            parts = [torch.einsum("bhw,hw->bh", inputs[:, :, :end], taps[:, size - end :]) for end in ends]
            return torch.stack(parts, dim=1) + carried[:, read : read + length], None

    def fold(self) -> None:
        decay, added = self._so_far()
        self._modes.tensor.mul_(decay).add_(added)
        self._carry()

    def modes(self) -> Tensor:
        """The state [B, H, N, 2] after the tokens read so far."""
        modes = self._modes.tensor
        if self._block.read:
            decay, added = self._so_far()
            modes = decay * modes + added
        return torch.view_as_real(modes.to(self._readout.dtype, copy=True))

    def join(self, modes: Tensor) -> None:
        """Append the rows of a state [B, H, N, 2], at any place in the block."""
        modes = torch.view_as_complex(modes)
        read, count = self._block.read, len(modes)
        self._modes.add(modes)
        self.inputs.add(self.inputs.tensor.new_zeros(count, *self.inputs.tensor.shape[1:]))
        self.carried.add(self.carried.tensor.new_zeros(count, *self.carried.tensor.shape[1:]))
        self.carried.tensor[-count:, read:] = self._output_of(modes, self._block.size - read)

    def keep(self, rows: Sequence[int]) -> None:
        for held in (self._modes, self.inputs, self.carried):
            held.keep(rows)

    def _carry(self) -> None:
        self.carried.tensor.copy_(self._output_of(self._modes.tensor, self._block.size))

    def _output_of(self, modes: Tensor, length: int) -> Tensor:
        """The contribution of states to the next outputs: [B, L, H]."""
        modes = modes.to(self._readout.dtype)
        with torch.autocast(modes.device.type, enabled=False):
            if self._table is None:
                return carried_output(modes, self._readout, self._log_a, length)
            pairs = torch.view_as_real(self._readout * modes).flatten(-2)  # [B, H, 2N]
            return (pairs @ self._table[:, :length]).transpose(1, 2)

    def _so_far(self) -> tuple[Tensor, Tensor]:
        """The block so far: the factor by which the state at its start has decayed, in float64, and what the block adds
        to it; [B, H, N] each.
        """
        block = self._block
        signal = self.inputs.tensor[:, :, : block.read]
        with torch.autocast(signal.device.type, enabled=False):
            if self._table is None:
                added = final_state(signal.transpose(1, 2), self._log_a, None)
            else:
                pairs = signal.flip(-1) @ self._table[:, : block.read].T  # [B, H, 2N]
                added = torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).conj()
            age: Tensor | int = block.read
            if any(block.joined):
                age = age - torch.tensor(block.joined, device=signal.device)[:, None, None]
            return exponential(self._log_a * age), added
