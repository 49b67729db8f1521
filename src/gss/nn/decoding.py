"""The interfaces of the plans by which a decoder runs layers: one for any device, and one for GPU kernels.

All plans of a model share one `Block`: tokens are counted in blocks, and at the end of each, plans that have only
collected inputs fold them into their state. Rows are the sequences of the batch; they join and leave between steps.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gss.ops.gpu.decode_launch import Stream


class Block:
    """The position of a decoder in its block of tokens, and where in the block each row joined."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a block needs at least 1 token, not {size}")
        self.size = size
        self.read = 0
        self.joined: list[int] = []

    @property
    def rows(self) -> int:
        return len(self.joined)

    def join(self, rows: int) -> None:
        """Append rows; the first ones begin a block."""
        if not self.joined:
            self.read = 0
        self.joined += [self.read] * rows

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        self.joined = [self.joined[row] for row in rows]

    def begin(self) -> None:
        """Begin the next block, after the last one was folded."""
        self.read = 0
        self.joined = [0] * len(self.joined)


def without_gaps(gone: Sequence[bool]) -> list[int]:
    """The remaining rows in a new order: the last ones fill the gaps, so that few rows move."""
    order = list(range(len(gone)))
    for place in reversed(range(len(gone))):
        if gone[place]:
            last = order.pop()
            if place < len(order):
                order[place] = last
    return order


class DecodePlan:
    """A layer that reads token by token, here with its own `forward`; `gss.nn.decode_plans` has faster ones."""

    def __init__(self, layer: Any, state: dict[str, Tensor]) -> None:
        self._layer, self._state = layer, state

    def step(self, x: Tensor) -> Tensor:
        """The outputs [B, L, E] for the next tokens of each row: one, or as many as `ahead` allows."""
        y, self._state = self._layer(x, self._state)
        return y

    def ahead(self) -> int:
        """How many tokens of a single row a step can read such that `rewind` can take back the last of them."""
        return 1

    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens of a step, but not all of them; the decoder moves the block's cursor."""
        assert not count, "the first token of a step is never taken back"

    def fold(self) -> None:
        """Fold a full block of tokens into the state, unless every step updates it."""

    def state(self) -> dict[str, Tensor]:
        """The state after the tokens read so far."""
        return self._state

    def join(self, state: dict[str, Tensor]) -> None:
        """Append the rows of a state."""
        self._state = {name: join_rows([tensor, state[name]]) for name, tensor in self._state.items()}

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        self._state = {name: tensor[list(rows)] for name, tensor in self._state.items()}


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate over the batch, padding dimensions that grow with what was read (the length of a key cache)."""
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        short = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
        missing = [count for each in reversed(short) for count in (0, each)]
        padded.append(torch.nn.functional.pad(tensor, missing) if any(missing) else tensor)
    return torch.cat(padded)


class GPUPlan:
    """A layer's weights in the layout of the GPU kernels and, `on` a stream, its buffers and its launches.

    The buffers of every batch size share the weights. The launches are captured in a CUDA graph, so every call works on
    the same memory. Rows are identified by their places in the buffers.
    """

    stream: "Stream"
    drafts = False
    """Whether the plan supports drafts: put `on` a draft of its single row, with the same state, it reads tokens of
    which the last may be taken back, because it writes only beyond its counters and the place in the block.
    """

    def on(self, stream: "Stream") -> Self:
        """This plan with buffers for the rows of a stream."""
        plan = copy.copy(self)
        plan.stream = stream
        plan.make_room(stream)
        return plan

    def make_room(self, stream: "Stream") -> None:
        """Make the buffers."""

    def launch(self) -> None:
        """Read the next token of every row from the residual stream, and add the outputs to it."""

    def fold(self, late: bool) -> None:
        """Fold a full block of tokens into the state; `late`: some rows joined within the block."""

    def put(self, state: dict[str, Tensor], places: Tensor, block: Block) -> None:
        """Put the rows of a state in these places."""

    def state(self, places: Tensor, block: Block) -> dict[str, Tensor]:
        """The state after the tokens read so far of these rows, the first ones of the block."""
        raise NotImplementedError
