"""Generated tasks that require memory, as pure functions of a seed.

Each returns tokens [rows, length] and a mask of the same shape that says which tokens are targets, to be predicted from
those before them. There are `vocabulary` ids in all, and `items` to remember.

    induction           … ! a … ! a                 what followed the mark the last time
    selective-copying   … a … b … ! a b             the items among the noise, in order
    recall              k v k v … k v … k v         the value that came with each key (multi-query associative recall)
    passkey             … ! 4 1 5 … ! 4 1 5         digits, found again however long the noise is
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import Generator


class Draw(NamedTuple):
    """Sequences of a task."""

    tokens: npt.NDArray[np.int64]  # [B, L]
    mask: npt.NDArray[np.bool_]  # [B, L], True where the token is a target that counts


def induction(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Noise with a mark (the last id) and tokens after it, which must be repeated after the mark at the end."""
    return _marked(rng, rows, length, items, vocabulary - 1, (0, vocabulary - 1))


def passkey(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Noise with a mark (id 10) and digits (ids 0 to 9) after it, which must be repeated after the mark at the end."""
    return _marked(rng, rows, length, items, 10, (11, vocabulary))


def _marked(rng: Generator, rows: int, length: int, items: int, mark: int, noise: tuple[int, int]) -> Draw:
    """A mark and items (ids below it) at a random place in noise, and again at the end."""
    tokens = rng.integers(*noise, (rows, length))
    hidden = rng.integers(0, mark, (rows, items))
    place = rng.integers(0, length - 2 * items - 1, (rows, 1))
    string = np.concatenate([np.full((rows, 1), mark), hidden], axis=1)
    np.put_along_axis(tokens, place + np.arange(items + 1), string, axis=1)
    tokens[:, -items - 1 :] = string
    return _asked(tokens, items)


def selective_copying(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Items (ids from 2) at random places in noise (id 0); after a mark (id 1), the items in order."""
    content = rng.integers(2, vocabulary, (rows, items))
    tokens = np.zeros((rows, length), np.int64)
    places = np.sort(_distinct(rng, rows, length - items - 1, items), axis=1)
    np.put_along_axis(tokens, places, content, axis=1)
    tokens[:, -items - 1] = 1
    tokens[:, -items:] = content
    return _asked(tokens, items)


def recall(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Pairs of distinct keys (lower half of the ids) and values (upper half); then every key again at a random place,
    followed by its value as the target; random values in between."""
    half = vocabulary // 2
    tokens = rng.integers(half, vocabulary, (rows, length))
    pairs = np.stack([_distinct(rng, rows, half, items), rng.integers(half, vocabulary, (rows, items))], axis=2)
    tokens[:, : 2 * items] = pairs.reshape(rows, -1)
    slots = 2 * items + 2 * _distinct(rng, rows, (length - 2 * items) // 2, items)
    mask = np.zeros((rows, length), bool)
    for offset in (0, 1):
        np.put_along_axis(tokens, slots + offset, pairs[:, :, offset], axis=1)
    np.put_along_axis(mask, slots + 1, True, axis=1)
    return Draw(tokens, mask)


def _asked(tokens: npt.NDArray[np.int64], items: int) -> Draw:
    """The tokens with the last `items` as targets."""
    mask = np.zeros(tokens.shape, bool)
    mask[:, -items:] = True
    return Draw(tokens, mask)


def _distinct(rng: Generator, rows: int, among: int, count: int) -> npt.NDArray[np.int64]:
    """Distinct numbers below `among` in random order, [rows, count]."""
    chosen = rng.random((rows, among)).argpartition(count - 1, axis=1)[:, :count]  # sorting all would take far longer
    return rng.permuted(chosen, axis=1)


@dataclass(frozen=True)
class Task:
    """A task with its sizes."""

    name: str
    function: Callable[[Generator, int, int, int, int], Draw]
    vocabulary: int
    items: int
    shortest: Callable[[int], int]  # sequence, by the number of items
    fewest: Callable[[int], int]  # ids, by the number of items

    def draw(self, seed: int | Sequence[int], rows: int, length: int) -> Draw:
        """Sequences of a length, determined by the seed."""
        least, ids = self.shortest(self.items), self.fewest(self.items)
        if length < least:
            raise ValueError(
                f"{self.items} items need a length of at least {least}, not {length}: ask for fewer, or for longer "
                "sequences"
            )
        if self.vocabulary < ids:
            raise ValueError(f"this task needs a vocabulary of at least {ids}, not {self.vocabulary}")
        return self.function(np.random.default_rng(seed), rows, length, self.vocabulary, self.items)


_TASKS = (
    Task("induction", induction, 16, 1, lambda items: 2 * items + 2, lambda items: 3),
    Task("selective-copying", selective_copying, 16, 16, lambda items: 2 * items + 1, lambda items: 4),
    Task("recall", recall, 8192, 64, lambda items: 4 * items, lambda items: 2 * items),
    Task("passkey", passkey, 64, 5, lambda items: 2 * items + 2, lambda items: 12),
)
TASKS = {task.name: task for task in _TASKS}


def make_task(name: str, items: int | None = None, vocabulary: int | None = None) -> Task:
    """A task by name; None keeps a default size."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; choose from: {', '.join(TASKS)}")
    task = TASKS[name]
    if items is not None and items < 1:
        raise ValueError(f"a task has at least 1 item, not {items}")
    return replace(task, vocabulary=vocabulary or task.vocabulary, items=items or task.items)
