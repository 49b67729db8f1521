"""States of what was read, by the tokens that led to them: a prompt that begins like an earlier one starts from there.

For a bounded-state model an entry has one size whatever its length. Entries are values that are never changed, so any
number of sequences can continue from one. The least recently used go first when the bytes run out.
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gss.nn.state import ModelState

Tokens = npt.NDArray[np.int64]
_Key = tuple[int, bytes]
"""Length, and a digest of that many tokens."""


class Entry(NamedTuple):
    """A model after some tokens."""

    state: ModelState
    """Of one sequence."""
    logits: Tensor
    """[1, V] after the last token."""

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return self.state.nbytes + self.logits.nbytes


class PrefixCache:
    """Entries by their tokens, up to `max_bytes` together; 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[_Key, Entry] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, tokens: Tokens) -> tuple[int, Entry | None]:
        """The entry of the most tokens that these begin with, and how many those are."""
        digest = hashlib.blake2b(digest_size=16)
        done = 0
        found: _Key | None = None
        for length in sorted({size for size, _ in self._entries if size <= len(tokens)}):
            digest.update(tokens[done:length].tobytes())
            done = length
            key = (length, digest.digest())
            if key in self._entries:
                found = key
        if found is None:
            return 0, None
        self._entries.move_to_end(found)
        return found[0], self._entries[found]

    def put(self, tokens: Tokens, entry: Entry) -> None:
        """Keep the model after these tokens; what was used least recently makes room."""
        if entry.nbytes > self.max_bytes:
            return
        key = (len(tokens), hashlib.blake2b(tokens.tobytes(), digest_size=16).digest())
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        self._entries[key] = entry
        self.nbytes += entry.nbytes
        while self.nbytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.nbytes -= dropped.nbytes
