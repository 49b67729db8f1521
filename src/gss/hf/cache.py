"""The cache of `generate`: our immutable state in the mutable container that `transformers` expects.

Implements the protocol of `transformers.Cache`: lengths, reordering for beams, repeating for samples.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from gss.nn.state import ModelState


class StateCache(Cache):
    """A `ModelState` that follows a batch through `generate`.

    States are values, so branching costs nothing: read a document once, then generate from `copy.deepcopy(cache)` for
    each question.
    """

    def __init__(self, state: ModelState | None = None, columns: int = 0) -> None:
        super().__init__(layers=[])
        self.state = state
        self.columns = columns  # of input read so far, padding included, as in the length of an attention mask

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch_size} sequences, {self.columns} columns)"

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateCache":
        return StateCache(self.state, self.columns)  # states are immutable, so two caches can share one

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def replace(self, state: ModelState | None, columns: int) -> None:
        """Set the state after `columns` further columns."""
        self.state = state
        self.columns += columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.columns = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row continue from the row that its beam came from."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row several times in a row."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a recurrent state cannot be rewound."""
        raise ValueError("a recurrent state cannot be rewound: keep a copy.deepcopy of the cache from before")

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before anything was read."""
        return -1 if self.state is None else self.state.batch

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """No: see `crop`."""
        return False
