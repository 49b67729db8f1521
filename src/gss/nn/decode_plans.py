"""How layers decode: plans that read one token after another, without gradients, on any device.

A plan starts from a state, changes its own copies in place, and gives the state back at any time: between two steps it
is exactly the layer. A layer that has no plan of its own is decoded by its `forward` (`ForwardPlan`). Rows may join and
leave between steps, and one that does costs about as much as it holds, whatever else is in the batch.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gss.nn.decoding import Block, without_gaps
from gss.nn.state import LayerState, ModelState, SequenceLayer
from gss.nn.state_space import DiagonalStateSpace
from gss.nn.windows import rolled
from gss.ops import cpu
from gss.ops.recurrence import carried_output, carried_state, final_state, transition
from gss.ops.vandermonde import powers

if TYPE_CHECKING:
    from gss.nn.attention import TransformerBlock

Module = TypeVar("Module", bound=nn.Module)

# cuDNN's attention is left out: it makes a plan for every new length, which costs milliseconds, and here each is new.
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Tokens for which a row of a cache has room at least.
_LEAST_ROOM = 64


class Rows:
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
        """Go on with these rows, in this order; only those whose place changes are copied."""
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        if moved:
            places, sources = (list(side) for side in zip(*moved, strict=True))
            self._room[places] = self._room[sources]
        self.tensor = self._room[: len(rows)]


class ForwardPlan:
    """Any layer, by its own contract."""

    def __init__(self, layer: SequenceLayer, state: LayerState) -> None:
        self._layer, self._state = layer, state

    def step(self, x: Tensor) -> Tensor:
        y, self._state = self._layer(x, self._state)
        return y

    def ahead(self) -> int:
        return 1

    def rewind(self, count: int) -> None:
        assert not count, "a state cannot go back"

    def fold(self) -> None:
        pass

    def state(self) -> LayerState:
        return self._state

    def join(self, state: LayerState) -> None:
        position = torch.zeros(0, dtype=torch.int64)  # not this layer's to know
        self._state = ModelState.join([ModelState(position, (each,)) for each in (self._state, state)]).layers[0]

    def keep(self, rows: Sequence[int]) -> None:
        self._state = {name: tensor[list(rows)] for name, tensor in self._state.items()}


class StateSpacePlan:
    """A layer whose tokens mix in state spaces: its own `forward`, with every state space in its blocked form."""

    def __init__(
        self, layer: SequenceLayer, spaces: dict[str, DiagonalStateSpace], state: LayerState, block: Block
    ) -> None:
        self._block = block
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
    state. Exact, in the state's precision under autocast too, and of the state's memory traffic one part in a block's
    size is left. A row that joins in the middle of a block has zeros for the inputs that it missed, and its state
    counts from where it joined.
    """

    def __init__(self, space: DiagonalStateSpace, modes: Tensor, block: Block) -> None:
        super().__init__()
        self._readout, self._log_a = space.discretized()
        self._block = block
        taps = space.taps(block.size)
        self.reversed_taps = taps.flip(-1)  # [H, W]: the newest input meets the last one
        # Where the channels share their modes, the table that turns a state into its output is small enough to keep.
        self._powers = powers(self._log_a[0], block.size, taps.dtype).flatten(0, 1) if len(self._log_a) == 1 else None
        self._modes = Rows(torch.view_as_complex(modes).clone())  # [B, H, N]
        self._inputs = Rows(taps.new_zeros(modes.shape[0], *taps.shape))  # [B, H, W]
        self._carried = Rows(taps.new_zeros(modes.shape[0], block.size, taps.shape[0]))  # [B, W, H]
        self._carry()

    def forward(self, u: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """u [B, L, H] → y [B, L, H] in the state's precision, as `DiagonalStateSpace` gives it without a state.

        The tokens are within the block; L is 1, or more where tokens are read ahead.
        """
        read, size, length = self._block.read, self._block.size, u.shape[1]
        inputs, taps, carried = self._inputs.tensor, self.reversed_taps, self._carried.tensor
        if taps.dtype == torch.float32 and taps.device.type == "cpu" and (found := cpu.library()) is not None:
            u = u.float().contiguous()
            y = torch.empty_like(u)
            tensors = (u, inputs, taps, carried, y)
            found.gss_blocked_steps(len(u), length, len(taps), size, read, *map(cpu.pointer, tensors))
            return y, None
        inputs[:, :, read : read + length] = u.transpose(1, 2)
        with torch.autocast(u.device.type, enabled=False):
            ends = range(read + 1, read + length + 1)
            parts = [torch.einsum("bhw,hw->bh", inputs[:, :, :end], taps[:, size - end :]) for end in ends]
            return torch.stack(parts, dim=1) + carried[:, read : read + length], None

    def buffers_of_rows(self) -> tuple[Tensor, Tensor]:
        """The inputs of the block so far, and what the state at its start adds to its outputs."""
        return self._inputs.tensor, self._carried.tensor

    def fold(self) -> None:
        """Move on to the next block."""
        self._modes.tensor.copy_(self._folded())
        self._carry()

    def modes(self) -> Tensor:
        """The state [B, H, N, 2] after what has been read."""
        return torch.view_as_real(self._folded() if self._block.read else self._modes.tensor.clone())

    def join(self, modes: Tensor) -> None:
        """Add the rows of a state [B, H, N, 2], wherever the others are in their block."""
        modes = torch.view_as_complex(modes)
        read, count = self._block.read, len(modes)
        self._modes.add(modes)
        self._inputs.add(self._inputs.tensor.new_zeros(count, *self._inputs.tensor.shape[1:]))
        self._carried.add(self._carried.tensor.new_zeros(count, *self._carried.tensor.shape[1:]))
        self._carried.tensor[-count:, read:] = self._output_of(modes, self._block.size - read)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        for held in (self._modes, self._inputs, self._carried):
            held.keep(rows)

    def _carry(self) -> None:
        self._carried.tensor.copy_(self._output_of(self._modes.tensor, self._block.size))

    def _output_of(self, modes: Tensor, length: int) -> Tensor:
        """What states add to the next outputs: [B, L, H]."""
        with torch.autocast(modes.device.type, enabled=False):
            if self._powers is None:
                return carried_output(modes, self._readout, self._log_a, length)
            weights = self._readout * transition(self._log_a, self._readout.dtype) * modes
            return (torch.cat([weights.real, -weights.imag], dim=-1) @ self._powers[:, :length]).transpose(1, 2)

    def _folded(self) -> Tensor:
        block, modes = self._block, self._modes.tensor
        signal = self._inputs.tensor[:, :, : block.read].transpose(1, 2)
        with torch.autocast(modes.device.type, enabled=False):
            if not any(block.joined):
                return final_state(signal, self._log_a, modes)
            ages = torch.tensor([block.read - joined for joined in block.joined], device=modes.device)
            carried = carried_state(modes, self._log_a * ages[:, None, None])
            return final_state(signal, self._log_a, None) + carried


class _Cache:
    """Keys and values [B, h, room, d] of some of a decoder's rows."""

    def __init__(self, rows: list[int], *buffers: Tensor) -> None:
        self.rows = rows
        self.buffers = [Rows(buffer) for buffer in buffers]

    def add(self, rows: list[int], *buffers: Tensor) -> None:
        """Put rows after those that are there."""
        self.rows = self.rows + rows
        for held, new in zip(self.buffers, buffers, strict=True):
            held.add(new)

    def keep(self, places: Mapping[int, int]) -> None:
        """Go on with the rows that have a place from now on."""
        order = without_gaps([row not in places for row in self.rows])
        self.rows = [places[self.rows[slot]] for slot in order]
        for held in self.buffers:
            held.keep(order)


class AttentionPlan:
    """A Transformer block whose keys and values lie in buffers that are written in place.

    Without chunks, rows of about the same length share a buffer, which each fills at least by half: what a row takes
    is in proportion to its own length, whatever else is in the batch. A sliding window that is full is a ring, in which
    a token takes the place of the one that leaves.
    """

    def __init__(self, layer: "TransformerBlock", state: LayerState) -> None:
        self._layer, self._window, self._chunked = layer, layer.reach or sys.maxsize, layer.chunk is not None
        self._device, self._lengths = state["length"].device, list[int]()
        self._caches: dict[int, _Cache] = {}  # by the tokens for which they have room
        self.join(state)

    def step(self, x: Tensor) -> Tensor:
        lengths = torch.tensor(self._lengths, device=self._device)
        projected = self._layer.positioned(self._layer.project(x), lengths)
        attended = [self._attend_all(*token) for token in zip(*(t.split(1, dim=1) for t in projected), strict=True)]
        return self._layer.finish(x, attended[0] if len(attended) == 1 else torch.cat(attended, dim=1))

    def ahead(self) -> int:
        left = self._window - (self._lengths[0] % self._window if self._chunked else self._lengths[0])
        return max(1, left)  # in a full ring nothing can be taken back

    def rewind(self, count: int) -> None:
        self._lengths = [length - count for length in self._lengths]

    def _attend_all(self, *projected: Tensor) -> Tensor:
        """Query, key and value of the next token → what it attends to, [B, 1, h, d] each."""
        self._move_full()
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

    def fold(self) -> None:
        pass

    def _attend(self, cache: _Cache, query: Tensor, *new: Tensor) -> Tensor:
        """Query, key and value of the rows of a cache → what they attend to, [B, h, 1, d] each."""
        lengths = [self._lengths[row] for row in cache.rows]
        places = [length % self._window for length in lengths]
        ends = [length % self._window + 1 if self._chunked else min(length + 1, self._window) for length in lengths]
        filled = max(ends)
        visible = None
        if len(set(places)) == len(set(ends)) == 1:
            for held, token in zip(cache.buffers, new, strict=True):
                held.tensor[:, :, places[0]] = token[:, :, 0]
        else:
            index = torch.tensor(places, device=self._device)
            rows = torch.arange(len(places), device=self._device)
            for held, token in zip(cache.buffers, new, strict=True):
                held.tensor[rows, :, index] = token[:, :, 0].to(held.tensor)
            last = torch.tensor(ends, device=self._device)
            visible = (torch.arange(filled, device=self._device) < last.unsqueeze(1))[:, None, None]
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
                tensor = cache.buffers[number].tensor[:, :, :held].transpose(1, 2)
                whole = state.setdefault(name, tensor.new_zeros(shape))
                whole[cache.rows, : tensor.shape[1]] = tensor
            if self._layer.sliding:
                state[name] = rolled(state[name], -state["length"])  # the newest last
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
                held = [rolled(tensor, state["length"][chosen]) for tensor in held]
            self._put(room, [first + row for row in chosen], *(tensor[:, :room].transpose(1, 2) for tensor in held))

    def keep(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        self._keep({row: place for place, row in enumerate(rows)})

    def _keep(self, places: Mapping[int, int], among: Sequence[int] | None = None) -> None:
        for room in list(self._caches) if among is None else among:
            self._caches[room].keep(places)
            if not self._caches[room].rows:
                del self._caches[room]  # the memory of long rows is let go

    def _room(self, length: int) -> int:
        """For how many tokens a row has room: for one more at least."""
        return self._window if self._chunked else min(self._window, max(_LEAST_ROOM, 1 << length.bit_length()))

    def _put(self, room: int, rows: list[int], *tensors: Tensor) -> None:
        """Add rows to those with room for so many tokens: keys and values [B, h, S, d]."""
        buffers = [_with_room(tensor, room) for tensor in tensors]
        if room in self._caches:
            self._caches[room].add(rows, *buffers)
        else:
            self._caches[room] = _Cache(rows, *buffers)

    def _move_full(self) -> None:
        """Give rows that have filled their room twice as much."""
        for room in [] if self._chunked else [room for room in self._caches if room < self._window]:
            cache = self._caches[room]
            full = [slot for slot, row in enumerate(cache.rows) if self._lengths[row] >= room]
            if full:
                rows = [cache.rows[slot] for slot in full]
                self._put(min(2 * room, self._window), rows, *(held.tensor[full] for held in cache.buffers))
                self._keep({row: row for row in cache.rows if row not in rows}, [room])


def _with_room(cache: Tensor, room: int) -> Tensor:
    larger = cache.new_zeros(*cache.shape[:2], room, cache.shape[3])
    larger[:, :, : cache.shape[2]] = cache
    return larger
