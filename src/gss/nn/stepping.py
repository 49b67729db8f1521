"""Steppers: layers set up to read one token after another, without gradients, as fast as that goes.

A stepper starts from a state, changes its own copies in place, and can give the state back at any time: between two
calls of the model it is exactly the layer. Most layers need none of their own; `PlainStepper` just calls them.
"""

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gss.ops.kernel import kernel
from gss.ops.recurrence import carried_output, final_state

if TYPE_CHECKING:
    from gss.nn.state import LayerState, SequenceLayer
    from gss.nn.state_space import DiagonalStateSpace


class Stepper(Protocol):
    """One layer, reading a token at a time."""

    def step(self, x: Tensor) -> Tensor:
        """The outputs [B, 1, E] for the next token of each row."""

    def state(self) -> "LayerState":
        """The state after what has been read."""


class PlainStepper:
    """Any layer, by its own contract."""

    def __init__(self, layer: "SequenceLayer", state: "LayerState") -> None:
        self._layer, self._state = layer, state

    def step(self, x: Tensor) -> Tensor:
        y, self._state = self._layer(x, self._state)
        return y

    def state(self) -> "LayerState":
        return self._state


class StateSpaceStepper:
    """A diagonal state space that touches its modes once in `block` tokens instead of at every one.

    Within a block the output is what the state at the block's start still adds, computed for the whole block at
    once, and the block's own inputs convolved with the kernel's first taps. At its end the block is folded into the
    state. Exact, and of the state's memory traffic one part in `block` is left.
    """

    def __init__(self, space: "DiagonalStateSpace", modes: Tensor, block: int) -> None:
        self._readout, self._log_a = space.discretized()
        self._modes = torch.view_as_complex(modes)  # [B, H, N]
        self._block = block
        taps = kernel(self._readout, self._log_a, block)
        taps[:, 0] += space.skip
        self._reversed_taps = taps.flip(-1)  # [H, W]: the newest input meets the last one
        self._inputs = taps.new_zeros(modes.shape[0], *taps.shape)  # [B, H, W]
        self._begin()

    def _begin(self) -> None:
        self._read = 0
        self._echo = carried_output(self._modes, self._readout, self._log_a, self._block).contiguous()  # [B, W, H]

    def step(self, u: Tensor) -> Tensor:
        """u [B, 1, H] → y [B, 1, H] in the state's precision."""
        read = self._read
        self._inputs[:, :, read] = u[:, 0]
        recent = self._inputs[:, :, : read + 1]
        y = torch.einsum("bhw,hw->bh", recent, self._reversed_taps[:, self._block - read - 1 :]) + self._echo[:, read]
        self._read += 1
        if self._read == self._block:
            self._modes = self._folded()
            self._begin()
        return y.unsqueeze(1)

    def modes(self) -> Tensor:
        """The state [B, H, N, 2] after what has been read."""
        return torch.view_as_real(self._folded() if self._read else self._modes)

    def _folded(self) -> Tensor:
        return final_state(self._inputs[:, :, : self._read].transpose(1, 2), self._log_a, self._modes)


class CacheStepper:
    """Keys and values in buffers that are written in place: the attention of a Transformer block, token by token."""

    def __init__(self, keys: Tensor, values: Tensor, length: Tensor, chunk: int | None) -> None:
        self._chunk = chunk
        self._lengths: list[int] = length.tolist()
        self._device = length.device
        room = keys.shape[1] if chunk else 2 * keys.shape[1] + 64
        self._keys, self._values = (self._with_room(t.transpose(1, 2), room) for t in (keys, values))  # [B, h, S, d]

    def attend(self, projected: Tensor) -> Tensor:
        """Queries, keys and values [B, 1, 3, h, d] of the next token → what it attends to, [B, 1, h, d]."""
        query, key, value = (t.transpose(1, 2) for t in projected.unbind(2))  # [B, h, 1, d]
        places = [length % self._chunk if self._chunk else length for length in self._lengths]
        filled = max(places) + 1
        if filled > self._keys.shape[2]:
            self._keys, self._values = (self._with_room(t, 2 * filled) for t in (self._keys, self._values))
        visible = None
        if min(places) + 1 == filled:
            self._keys[:, :, filled - 1], self._values[:, :, filled - 1] = key[:, :, 0], value[:, :, 0]
        else:
            index = torch.tensor(places, device=self._device)
            rows = torch.arange(len(places), device=self._device)
            self._keys[rows, :, index], self._values[rows, :, index] = (
                key[:, :, 0].to(self._keys),
                value[:, :, 0].to(self._values),
            )
            visible = (torch.arange(filled, device=self._device) <= index.unsqueeze(1))[:, None, None]
        self._lengths = [length + 1 for length in self._lengths]
        keys, values = (t[:, :, :filled].to(query.dtype) for t in (self._keys, self._values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible).transpose(1, 2)

    def state(self) -> "LayerState":
        """The state of the block after what has been read."""
        held = self._chunk or max(self._lengths)
        keys, values = (t[:, :, :held].transpose(1, 2).clone() for t in (self._keys, self._values))
        return {"keys": keys, "values": values, "length": torch.tensor(self._lengths, device=self._device)}

    @staticmethod
    def _with_room(cache: Tensor, room: int) -> Tensor:
        larger = cache.new_zeros(*cache.shape[:2], room, cache.shape[3])
        larger[:, :, : cache.shape[2]] = cache
        return larger
