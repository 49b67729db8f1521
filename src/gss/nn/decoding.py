"""The plans that a layer supplies to a decoder: one for any device, and one for GPUs if it has kernels.

A decoder uses only these plans, not the layers themselves. All plans of a model share one `Block`: tokens are counted
in blocks, and at the end of each, plans that have only collected inputs fold them into their state. Rows are the
sequences of the batch; they join and leave between steps.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gss.ops.gpu.decode_launch import Stream


class Block:
    """How far a decoder is in a block of tokens, and where in the block each of its rows joined."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a block needs at least 1 token, not {size}")
        self.size = size
        self.read = 0
        self.joined: list[int] = []

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.joined)

    def join(self, rows: int) -> None:
        """Add rows; the first ones begin a block."""
        if not self.joined:
            self.read = 0
        self.joined += [self.read] * rows

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        self.joined = [self.joined[row] for row in rows]

    def begin(self) -> None:
        """The next block, once the last one is folded."""
        self.read = 0
        self.joined = [0] * len(self.joined)


def without_gaps(gone: Sequence[bool]) -> list[int]:
    """An order of the rows that stay: the last ones take the places of those that go, so that few rows move."""
    order = list(range(len(gone)))
    for place in reversed(range(len(gone))):
        if gone[place]:
            last = order.pop()
            if place < len(order):
                order[place] = last
    return order


class DecodePlan:
    """One layer that reads token by token: with its own `forward` here, faster in `gss.nn.decode_plans`."""

    def __init__(self, layer: Any, state: dict[str, Tensor]) -> None:
        self._layer, self._state = layer, state

    def step(self, x: Tensor) -> Tensor:
        """The outputs [B, L, E] for the next tokens of each row: one, or as many as `ahead` allows."""
        y, self._state = self._layer(x, self._state)
        return y

    def ahead(self) -> int:
        """How many tokens of a row alone can be read in a step so that the last of them can be taken back."""
        return 1

    def rewind(self, count: int) -> None:
        """Take back the last tokens of a step, not all; the block's own cursor is the decoder's to move."""
        assert not count, "a single token is never taken back"

    def fold(self) -> None:
        """Take a full block of tokens into the state, if the plan has not done so at every token."""

    def state(self) -> dict[str, Tensor]:
        """The state after what has been read."""
        return self._state

    def join(self, state: dict[str, Tensor]) -> None:
        """Add the rows of a state, after those that are there."""
        self._state = {name: join_rows([tensor, state[name]]) for name, tensor in self._state.items()}

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        self._state = {name: tensor[list(rows)] for name, tensor in self._state.items()}


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate over the batch; what grows with reading (dimension 1 of a key cache) is padded to the longest."""
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        short = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
        missing = [count for each in reversed(short) for count in (0, each)]
        padded.append(torch.nn.functional.pad(tensor, missing) if any(missing) else tensor)
    return torch.cat(padded)


class GPUPlan:
    """One layer's weights as the kernels of a GPU read them and, `on` a stream, its buffers and its launches.

    The weights are shared by the buffers of every batch size. A CUDA graph holds the launches, so every call works on
    the same memory. Rows are named by their places.
    """

    stream: "Stream"
    drafts = False
    """Whether a placed plan can be put `on` a draft of its one row, with the same state, to read tokens of which the
    last may be taken back: what it writes lies beyond its counters and the place in the block."""

    def on(self, stream: "Stream") -> Self:
        """This plan with buffers for the rows of a stream."""
        plan = copy.copy(self)
        plan.stream = stream
        plan.make_room(stream)
        return plan

    def make_room(self, stream: "Stream") -> None:
        """Make the buffers."""

    def launch(self) -> None:
        """Read the next token of every row: from the stream, and added to it."""

    def fold(self, late: bool) -> None:
        """Take a full block of tokens into the state; `late`: some rows joined within the block."""

    def put(self, state: dict[str, Tensor], places: Tensor, block: Block) -> None:
        """Let the rows of a state begin here, in these places."""

    def state(self, places: Tensor, block: Block) -> dict[str, Tensor]:
        """The state of these rows, the first that joined the block, after what has been read."""
        raise NotImplementedError
