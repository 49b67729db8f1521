"""How layers decode: plans that read one token after another, without gradients, on any device.

A plan starts from a state, changes its own copies in place, and can return the state at any time: between two steps it
is equivalent to the layer. A layer without a plan of its own is decoded by its `forward` (`DecodePlan`). Rows may join
and leave between steps, at a cost that depends only on the size of their own state.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gss.nn.decoding import Block, DecodePlan, without_gaps
from gss.nn.state import LayerState
from gss.nn.state_space import DiagonalStateSpace, StateSpaceLayer
from gss.nn.windows import as_ring, in_order
from gss.ops import cpu
from gss.ops.products import MOST_ROWS
from gss.ops.state_space import carried_output, final_state, transition
from gss.ops.vandermonde import exponential, powers

if TYPE_CHECKING:
    from gss.nn.attention import TransformerBlock

# cuDNN's attention is left out: it makes a plan for every new length, which costs milliseconds, and here each is new.
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Tokens for which a row of a cache has room at least.
_LEAST_ROOM = 64

Module = TypeVar("Module", bound=nn.Module)


class RowBuffer:
    """A tensor of its own whose rows (dimension 0) come and go in place: room is left, and few rows are moved."""

    def __init__(self, tensor: Tensor) -> None:
        self._room = self.tensor = tensor

    def add(self, tensor: Tensor) -> None:
        """Put rows after those that are there."""
        before, after = len(self.tensor), len(self.tensor) + len(tensor)
        if after > len(self._room):
            room = self._room.new_zeros(2 * after, *self._room.shape[1:])
            room[:before] = self.tensor
            self._room = room
        self._room[before:after] = tensor
        self.tensor = self._room[:after]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; only those whose place changes are copied."""
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        if moved:
            places, sources = (list(side) for side in zip(*moved, strict=True))
            self._room[places] = self._room[sources]
        self.tensor = self._room[: len(rows)]


class StateSpacePlan(DecodePlan):
    """A layer whose tokens mix in state spaces: its own `forward`, with every state space in its blocked form."""

    def __init__(self, layer: StateSpaceLayer, state: LayerState, block: Block) -> None:
        self._block, spaces = block, layer.spaces()
        self._spaces = {name: BlockedStateSpace(space, state[name], block) for name, space in spaces.items()}
        self._layer = replaced(layer, {space: self._spaces[name] for name, space in spaces.items()})

    def step(self, x: Tensor) -> Tensor:
        return self._layer(x, None, False)[0]

    def ahead(self) -> int:
        return self._block.size - self._block.read

    def rewind(self, count: int) -> None:
        pass  # inputs after the block's cursor are written over

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
    """A twin of a module that shares its parameters, with other modules in place of some of its parts."""
    if module in by:
        return by[module]  # type: ignore[return-value]
    twin: Module = object.__new__(type(module))  # copy.copy would call the class that FSDP2 has put in its place
    twin.__dict__.update(module.__dict__)
    twin._compiled_call_impl = None  # which would call the module itself
    twin._modules = {name: child and replaced(child, by) for name, child in module._modules.items()}
    return twin


class BlockedStateSpace(nn.Module):
    """A diagonal state space that touches its modes once in a block of tokens instead of at every one.

    Within a block the output is what the state at the block's start still adds, computed for the whole block at
    once, and the block's own inputs convolved with the kernel's first taps. At its end the block is folded into the
    state. This is exact, and in the state's precision even under autocast; a block of W tokens reads and writes the
    state once instead of W times. A row that joins in the middle of a block has zeros for the inputs that it missed,
    and its state counts from where it joined. Between folds the modes are kept in float64: inputs whose mean is not 0
    round the same way each time, and over millions of tokens the error would add up.
    """

    def __init__(self, space: DiagonalStateSpace, modes: Tensor, block: Block) -> None:
        super().__init__()
        self._readout, self._log_a = space.discretized()
        self._block = block
        taps = space.taps(block.size)
        self.reversed_taps = taps.flip(-1)  # [H, W]: the newest input meets the last one
        # Where the channels share their modes, the table between states and outputs is small enough to keep.
        self._table = None
        if len(self._log_a) == 1:
            conjugate = powers(self._log_a[0], block.size, taps.dtype).conj()  # of Ā^k, [N, W]
            self._table = torch.stack([conjugate.real, conjugate.imag], dim=1).flatten(0, 1)  # [2N, W], as pairs lie
            self._readout = self._readout * transition(self._log_a, self._readout.dtype)
        self._modes = RowBuffer(torch.view_as_complex(modes).to(torch.complex128, copy=True))  # [B, H, N]
        self.inputs = RowBuffer(taps.new_zeros(modes.shape[0], *taps.shape))  # [B, H, W]
        self.carried = RowBuffer(taps.new_zeros(modes.shape[0], block.size, taps.shape[0]))  # [B, W, H]
        self._carry()

    def forward(self, u: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """u [B, L, H] → y [B, L, H] in the state's precision, as `DiagonalStateSpace` gives it without a state.

        The tokens are within the block; L is 1, or more where tokens are read ahead.
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
        """Move on to the next block."""
        decay, added = self._so_far()
        self._modes.tensor.mul_(decay).add_(added)
        self._carry()

    def modes(self) -> Tensor:
        """The state [B, H, N, 2] after what has been read."""
        modes = self._modes.tensor
        if self._block.read:
            decay, added = self._so_far()
            modes = decay * modes + added
        return torch.view_as_real(modes.to(self._readout.dtype, copy=True))

    def join(self, modes: Tensor) -> None:
        """Add the rows of a state [B, H, N, 2], wherever the others are in their block."""
        modes = torch.view_as_complex(modes)
        read, count = self._block.read, len(modes)
        self._modes.add(modes)
        self.inputs.add(self.inputs.tensor.new_zeros(count, *self.inputs.tensor.shape[1:]))
        self.carried.add(self.carried.tensor.new_zeros(count, *self.carried.tensor.shape[1:]))
        self.carried.tensor[-count:, read:] = self._output_of(modes, self._block.size - read)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        for held in (self._modes, self.inputs, self.carried):
            held.keep(rows)

    def _carry(self) -> None:
        self.carried.tensor.copy_(self._output_of(self._modes.tensor, self._block.size))

    def _output_of(self, modes: Tensor, length: int) -> Tensor:
        """What states add to the next outputs: [B, L, H]."""
        modes = modes.to(self._readout.dtype)
        with torch.autocast(modes.device.type, enabled=False):
            if self._table is None:
                return carried_output(modes, self._readout, self._log_a, length)
            pairs = torch.view_as_real(self._readout * modes).flatten(-2)  # [B, H, 2N]
            return (pairs @ self._table[:, :length]).transpose(1, 2)

    def _so_far(self) -> tuple[Tensor, Tensor]:
        """The block until now: what it leaves of the state at its start, in float64, and what it adds: [B, H, N]."""
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


class _Cache:
    """Keys and values [B, h, room, d] of some of a decoder's rows."""

    def __init__(self, rows: list[int], *buffers: Tensor) -> None:
        self.rows = rows
        self.buffers = [RowBuffer(buffer) for buffer in buffers]

    def add(self, rows: list[int], *buffers: Tensor) -> None:
        """Put rows after those that are there."""
        self.rows = self.rows + rows
        for held, new in zip(self.buffers, buffers, strict=True):
            held.add(new)

    def keep(self, places: Mapping[int, int]) -> None:
        """Keep the rows that have a place from now on."""
        order = without_gaps([row not in places for row in self.rows])
        self.rows = [places[self.rows[slot]] for slot in order]
        for held in self.buffers:
            held.keep(order)


class AttentionPlan(DecodePlan):
    """A Transformer block whose keys and values lie in buffers that are written in place.

    Without chunks, rows of about the same length share a buffer, which each of them at least half fills: a row takes
    memory in proportion to its own length, whatever else is in the batch. A sliding window that is full is a ring: a
    token takes the place of one that has left it, the last few of which are kept so that tokens can be taken back.
    """

    def __init__(self, layer: "TransformerBlock", state: LayerState) -> None:
        self._layer, self._window, self._chunked = layer, layer.reach or sys.maxsize, layer.chunk is not None
        self._most = self._window + MOST_ROWS - 1 if layer.sliding else self._window  # tokens that are kept
        self._device, self._lengths = state["length"].device, list[int]()
        self._caches: dict[int, _Cache] = {}  # by the tokens for which they have room
        self.join(state)

    def step(self, x: Tensor) -> Tensor:
        lengths = torch.tensor(self._lengths, device=self._device)
        projected = self._layer.positioned(self._layer.project(x), lengths)
        attended = [self._attend_all(*token) for token in zip(*(t.split(1, dim=1) for t in projected), strict=True)]
        return self._layer.finish(x, attended[0] if len(attended) == 1 else torch.cat(attended, dim=1))

    def ahead(self) -> int:
        return self._window - self._lengths[0] % self._window if self._chunked else MOST_ROWS

    def rewind(self, count: int) -> None:
        self._lengths = [length - count for length in self._lengths]

    def _attend_all(self, *projected: Tensor) -> Tensor:
        """Query, key and value of the next token → what it attends to, [B, 1, h, d] each."""
        self._make_room(1)
        together = [t.transpose(1, 2) for t in projected]  # [B, h, 1, d]
        in_order = list(range(len(self._lengths)))
        attended = torch.empty_like(together[0])
        for cache in self._caches.values():
            if cache.rows == in_order:
                attended = self._attend(cache, *together)
            else:
                attended[cache.rows] = self._attend(cache, *(t[cache.rows] for t in together))
        self._lengths = [length + 1 for length in self._lengths]
        return attended.transpose(1, 2)

    def _attend(self, cache: _Cache, query: Tensor, *new: Tensor) -> Tensor:
        """Query, key and value of the rows of a cache → what they attend to, [B, h, 1, d] each."""
        room = cache.buffers[0].tensor.shape[2]
        last = [self._lengths[row] % room if self._chunked else self._lengths[row] for row in cache.rows]
        filled = min(room, max(last) + 1)
        visible = None
        if len(set(last)) == 1:
            for held, token in zip(cache.buffers, new, strict=True):
                held.tensor[:, :, last[0] % room] = token[:, :, 0]
        else:
            index, rows = (torch.tensor(each, device=self._device) for each in (last, range(len(last))))
            for held, token in zip(cache.buffers, new, strict=True):
                held.tensor[rows, :, index % room] = token[:, :, 0].to(held.tensor)
        if len(set(last)) > 1 or last[0] >= self._window:
            end = torch.tensor(last, device=self._device).unsqueeze(1)
            age = (end - torch.arange(filled, device=self._device)) % room
            visible = (age < (end + 1).clamp(max=self._window))[:, None, None]
        keys, values = (held.tensor[:, :, :filled].to(query.dtype) for held in cache.buffers)
        with sdpa_kernel(_ANY_LENGTH):
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)

    def state(self) -> LayerState:
        if not self._lengths:
            return {name: tensor[:0] for name, tensor in self._layer.initial_state(1).items()}
        held = self._layer.reach or max(self._lengths)
        shape = (len(self._lengths), held, self._layer.heads, self._layer.head_width)
        state: LayerState = {"length": torch.tensor(self._lengths, device=self._device)}
        for number, name in enumerate(("keys", "values")):
            for cache in self._caches.values():
                tensor = cache.buffers[number].tensor.transpose(1, 2)
                if self._layer.sliding:
                    tensor = in_order(tensor, state["length"][cache.rows], held)
                whole = state.setdefault(name, tensor.new_zeros(shape))
                whole[cache.rows, : tensor.shape[1]] = tensor[:, :held]
        return state

    def join(self, state: LayerState) -> None:
        lengths: list[int] = state["length"].tolist()
        first = len(self._lengths)
        self._lengths += lengths
        rooms = [self._room(length) for length in lengths]
        for room in sorted(set(rooms)):
            chosen = [row for row, its in enumerate(rooms) if its == room]
            held = [state[name] if len(chosen) == len(rooms) else state[name][chosen] for name in ("keys", "values")]
            if self._layer.sliding:
                held = [as_ring(tensor, state["length"][chosen], room) for tensor in held]
            self._put(room, [first + row for row in chosen], *(tensor[:, :room].transpose(1, 2) for tensor in held))

    def keep(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        self._keep({row: place for place, row in enumerate(rows)})

    def _keep(self, places: Mapping[int, int], among: Sequence[int] | None = None) -> None:
        for room in list(self._caches) if among is None else among:
            self._caches[room].keep(places)
            if not self._caches[room].rows:
                del self._caches[room]  # frees the memory of long rows

    def _room(self, length: int) -> int:
        """How many tokens a row gets room for: at least one more than it has."""
        return self._window if self._chunked else min(self._most, max(_LEAST_ROOM, 1 << length.bit_length()))

    def _put(self, room: int, rows: list[int], *tensors: Tensor) -> None:
        """Add rows, keys and values [B, h, S, d], to those with room for this many tokens."""
        buffers = [F.pad(tensor, (0, 0, 0, room - tensor.shape[2])).contiguous() for tensor in tensors]  # copies
        if room in self._caches:
            self._caches[room].add(rows, *buffers)
        else:
            self._caches[room] = _Cache(rows, *buffers)

    def _make_room(self, count: int) -> None:
        """Give rows twice as much room where `count` more tokens would not fit."""
        for room in [] if self._chunked else [room for room in self._caches if room < self._most]:
            cache = self._caches[room]
            full = [slot for slot, row in enumerate(cache.rows) if self._lengths[row] + count > room]
            if full:
                rows = [cache.rows[slot] for slot in full]
                self._put(min(2 * room, self._most), rows, *(held.tensor[full] for held in cache.buffers))
                self._keep({row: row for row in cache.rows if row not in rows}, [room])
