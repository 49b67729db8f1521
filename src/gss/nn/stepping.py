"""Steppers: layers set up to read one token after another, without gradients, as fast as that goes.

A stepper starts from a state, changes its own copies in place, and can give the state back at any time: between two
calls of the model it is exactly the layer. Most layers need none of their own; `PlainStepper` just calls them.

Rows may come and go between steps (`join`, `keep`), and one that does costs about as much as it weighs, whatever else
is in the batch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gss.ops.recurrence import carried_output, final_state, transition
from gss.ops.vandermonde import powers

if TYPE_CHECKING:
    from gss.nn.state import LayerState, SequenceLayer
    from gss.nn.state_space import DiagonalStateSpace

# cuDNN's attention is left out: it makes a plan for every new length, which costs milliseconds, and here each is new.
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Stepper(Protocol):
    """One layer, reading a token at a time."""

    def step(self, x: Tensor) -> Tensor:
        """The outputs [B, 1, E] for the next token of each row."""

    def state(self) -> "LayerState":
        """The state after what has been read."""

    def join(self, state: "LayerState") -> None:
        """Add the rows of a state, after those that are there."""

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""


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
        if len(rows) > len(self._room):
            self._room = self.tensor = self.tensor[list(rows)]
            return
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        if moved:
            places, sources = (list(side) for side in zip(*moved, strict=True))
            self._room[places] = self._room[sources]
        self.tensor = self._room[: len(rows)]


class PlainStepper:
    """Any layer, by its own contract."""

    def __init__(self, layer: "SequenceLayer", state: "LayerState") -> None:
        self._layer, self._state = layer, state

    def step(self, x: Tensor) -> Tensor:
        y, self._state = self._layer(x, self._state)
        return y

    def state(self) -> "LayerState":
        return self._state

    def join(self, state: "LayerState") -> None:
        from gss.nn.state import ModelState  # which imports this module

        position = torch.zeros(0, dtype=torch.int64)  # not this layer's to know
        self._state = ModelState.join([ModelState(position, (each,)) for each in (self._state, state)]).layers[0]

    def keep(self, rows: Sequence[int]) -> None:
        self._state = {name: tensor[list(rows)] for name, tensor in self._state.items()}


class StateSpaceStepper:
    """A diagonal state space that touches its modes once in `block` tokens instead of at every one.

    Within a block the output is what the state at the block's start still adds, computed for the whole block at
    once, and the block's own inputs convolved with the kernel's first taps. At its end the block is folded into the
    state. Exact, in the state's precision under autocast too, and of the state's memory traffic one part in `block` is
    left. A row that joins in the middle of a block has zeros for the inputs that it missed, and its state counts from
    where it joined.
    """

    def __init__(self, space: "DiagonalStateSpace", modes: Tensor, block: int) -> None:
        self._readout, self._log_a = space.discretized()
        self._block = block
        taps = space.taps(block)
        self._reversed_taps = taps.flip(-1)  # [H, W]: the newest input meets the last one
        # Where the channels share their modes, the table that turns a state into its echo is small enough to keep.
        self._powers = powers(self._log_a[0], block, taps.dtype).flatten(0, 1) if len(self._log_a) == 1 else None
        self._modes = Rows(torch.view_as_complex(modes).clone())  # [B, H, N]
        self._inputs = Rows(taps.new_zeros(modes.shape[0], *taps.shape))  # [B, H, W]
        self._echo = Rows(taps.new_zeros(modes.shape[0], block, taps.shape[0]))  # [B, W, H]
        self._begin()

    def _begin(self) -> None:
        self._read = 0
        self._joined = [0] * len(self._modes.tensor)  # where in the block each row came
        self._echo.tensor.copy_(self._carried(self._modes.tensor, self._block))

    def step(self, u: Tensor) -> Tensor:
        """u [B, 1, H] → y [B, 1, H] in the state's precision."""
        read = self._read
        inputs = self._inputs.tensor
        inputs[:, :, read] = u[:, 0]
        recent, taps = inputs[:, :, : read + 1], self._reversed_taps[:, self._block - read - 1 :]
        with torch.autocast(u.device.type, enabled=False):
            y = torch.einsum("bhw,hw->bh", recent, taps) + self._echo.tensor[:, read]
        self._read += 1
        if self._read == self._block:
            self._modes.tensor.copy_(self._folded())
            self._begin()
        return y.unsqueeze(1)

    def modes(self) -> Tensor:
        """The state [B, H, N, 2] after what has been read."""
        return torch.view_as_real(self._folded() if self._read else self._modes.tensor.clone())

    def join(self, modes: Tensor) -> None:
        """Add the rows of a state [B, H, N, 2], wherever the others are in their block."""
        modes = torch.view_as_complex(modes)
        if not self._joined:
            self._read = 0
        read, count = self._read, len(modes)
        self._modes.add(modes)
        self._inputs.add(self._inputs.tensor.new_zeros(count, *self._inputs.tensor.shape[1:]))
        self._echo.add(self._echo.tensor.new_zeros(count, *self._echo.tensor.shape[1:]))
        self._echo.tensor[-count:, read:] = self._carried(modes, self._block - read)
        self._joined += [read] * count

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        for held in (self._modes, self._inputs, self._echo):
            held.keep(rows)
        self._joined = [self._joined[row] for row in rows]

    def _carried(self, modes: Tensor, length: int) -> Tensor:
        """What states add to the next outputs: [B, L, H]."""
        with torch.autocast(modes.device.type, enabled=False):
            if self._powers is None:
                return carried_output(modes, self._readout, self._log_a, length)
            weights = self._readout * transition(self._log_a, self._readout.dtype) * modes
            return (torch.cat([weights.real, -weights.imag], dim=-1) @ self._powers[:, :length]).transpose(1, 2)

    def _folded(self) -> Tensor:
        signal, modes = self._inputs.tensor[:, :, : self._read].transpose(1, 2), self._modes.tensor
        with torch.autocast(modes.device.type, enabled=False):
            if not any(self._joined):
                return final_state(signal, self._log_a, modes)
            ages = torch.tensor([self._read - joined for joined in self._joined], device=modes.device)
            decay = transition(self._log_a * ages[:, None, None], modes.dtype)  # [B, G, N]
            return final_state(signal, self._log_a, None) + decay * modes


class CacheStepper:
    """Keys and values in buffers that are written in place: the attention of a Transformer block, token by token."""

    def __init__(self, keys: Tensor, values: Tensor, length: Tensor, chunk: int | None) -> None:
        self._chunk = chunk
        self._lengths: list[int] = length.tolist()
        self._device = length.device
        room = keys.shape[1] if chunk else 2 * keys.shape[1] + 64
        self._caches = [Rows(self._with_room(t.transpose(1, 2), room)) for t in (keys, values)]  # [B, h, S, d] each

    def lengths(self) -> Tensor:
        """Tokens read so far, [B]."""
        return torch.tensor(self._lengths, device=self._device)

    def attend(self, projected: Tensor) -> Tensor:
        """Queries, keys and values [B, 1, 3, h, d] of the next token → what it attends to, [B, 1, h, d]."""
        query, key, value = (t.transpose(1, 2) for t in projected.unbind(2))  # [B, h, 1, d]
        places = [length % self._chunk if self._chunk else length for length in self._lengths]
        filled = max(places) + 1
        self._widen(filled, 2 * filled)
        visible = None
        if min(places) + 1 == filled:
            for cache, new in zip(self._caches, (key, value), strict=True):
                cache.tensor[:, :, filled - 1] = new[:, :, 0]
        else:
            index = torch.tensor(places, device=self._device)
            rows = torch.arange(len(places), device=self._device)
            for cache, new in zip(self._caches, (key, value), strict=True):
                cache.tensor[rows, :, index] = new[:, :, 0].to(cache.tensor)
            visible = (torch.arange(filled, device=self._device) <= index.unsqueeze(1))[:, None, None]
        self._lengths = [length + 1 for length in self._lengths]
        keys, values = (cache.tensor[:, :, :filled].to(query.dtype) for cache in self._caches)
        with sdpa_kernel(_ANY_LENGTH):
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible).transpose(1, 2)

    def state(self) -> "LayerState":
        """The state of the block after what has been read."""
        held = self._chunk or max(self._lengths, default=0)
        keys, values = (cache.tensor[:, :, :held].transpose(1, 2).clone() for cache in self._caches)
        return {"keys": keys, "values": values, "length": torch.tensor(self._lengths, device=self._device)}

    def join(self, state: "LayerState") -> None:
        """Add the rows of a state, each at its own length."""
        lengths: list[int] = state["length"].tolist()
        held = self._chunk or max(lengths)
        self._widen(held, 2 * held)
        for cache, new in zip(self._caches, (state["keys"], state["values"]), strict=True):
            cache.add(self._with_room(new[:, :held].transpose(1, 2), cache.tensor.shape[2]))
        self._lengths += lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order; without any, the memory of long ones is let go."""
        for cache in self._caches:
            cache.keep(rows)
        self._lengths = [self._lengths[row] for row in rows]
        if not rows and not self._chunk:
            self._caches = [Rows(cache.tensor[:, :, :1].clone()) for cache in self._caches]

    def _widen(self, needed: int, room: int) -> None:
        """Make room for `room` tokens a row where there is not room for the `needed` ones."""
        if needed > self._caches[0].tensor.shape[2]:
            self._caches = [Rows(self._with_room(cache.tensor, room)) for cache in self._caches]

    @staticmethod
    def _with_room(cache: Tensor, room: int) -> Tensor:
        larger = cache.new_zeros(*cache.shape[:2], room, cache.shape[3])
        larger[:, :, : cache.shape[2]] = cache
        return larger
