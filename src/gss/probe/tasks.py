"""Generated tasks that require memory, as pure functions of a seed.

Each returns tokens [rows, length] and a mask of the same shape that says which tokens are targets, to be predicted from
those before them. There are `vocabulary` ids in all, and `items` to remember.

    induction           … ! a … ! a                 what followed the mark the last time
    selective-copying   … a … b … ! a b             the items among the noise, in order
    recall              k v k v … k v … k v         the value that came with each key (multi-query associative recall)
    passkey             … ! 4 1 5 … ! 4 1 5         digits, found again however long the noise is
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seed = int | Sequence[int]


class Draw(NamedTuple):
    """Sequences of a task."""

    tokens: npt.NDArray[np.int64]  # [B, L]
    mask: npt.NDArray[np.bool_]  # [B, L], True where the token is a target that counts


def induction(seed: Seed, rows: int, length: int, vocabulary: int = 16, items: int = 1) -> Draw:
    """Noise with a mark (the last id) and tokens after it, which must be repeated after the mark at the end."""
    _require(length, 2 * items + 2, vocabulary, 3)
    return _marked(
        np.random.default_rng(seed), rows, length, items, vocabulary - 1, (0, vocabulary - 1), vocabulary - 1
    )


def passkey(seed: Seed, rows: int, length: int, vocabulary: int = 64, items: int = 5) -> Draw:
    """Noise with a mark (id 10) and digits (ids 0 to 9) after it, which must be repeated after the mark at the end."""
    _require(length, 2 * items + 2, vocabulary, 12)
    return _marked(np.random.default_rng(seed), rows, length, items, 10, (11, vocabulary), 10)


def _marked(
    rng: np.random.Generator, rows: int, length: int, items: int, mark: int, noise: tuple[int, int], answers: int
) -> Draw:
    """A mark and items below `answers` at a random place in noise, and again at the end."""
    tokens = rng.integers(*noise, (rows, length))
    hidden = rng.integers(0, answers, (rows, items))
    place = rng.integers(0, length - 2 * items - 1, (rows, 1))
    string = np.concatenate([np.full((rows, 1), mark), hidden], axis=1)
    np.put_along_axis(tokens, place + np.arange(items + 1), string, axis=1)
    tokens[:, -items - 1 :] = string
    return _asked(tokens, items)


def selective_copying(seed: Seed, rows: int, length: int, vocabulary: int = 16, items: int = 16) -> Draw:
    """Items (ids from 2) at random places in noise (id 0); after a mark (id 1), the items in order."""
    _require(length, 2 * items + 1, vocabulary, 4)
    rng = np.random.default_rng(seed)
    content = rng.integers(2, vocabulary, (rows, items))
    tokens = np.zeros((rows, length), np.int64)
    places = np.sort(_distinct(rng, rows, length - items - 1, items), axis=1)
    np.put_along_axis(tokens, places, content, axis=1)
    tokens[:, -items - 1] = 1
    tokens[:, -items:] = content
    return _asked(tokens, items)


def recall(seed: Seed, rows: int, length: int, vocabulary: int = 8192, items: int = 64) -> Draw:
    """Pairs of distinct keys (lower half of the ids) and values (upper half); then every key again at a random place,
    followed by its value as the target; random values in between."""
    _require(length, 4 * items, vocabulary, 2 * items)
    rng, half = np.random.default_rng(seed), vocabulary // 2
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


def _distinct(rng: np.random.Generator, rows: int, among: int, count: int) -> npt.NDArray[np.int64]:
    """Distinct numbers below `among` in random order, [rows, count]."""
    chosen = rng.random((rows, among)).argpartition(count - 1, axis=1)[:, :count]  # sorting all would take far longer
    return rng.permuted(chosen, axis=1)


def _require(length: int, least: int, vocabulary: int, ids: int) -> None:
    if length < least:
        raise ValueError(
            f"this many items need a length of at least {least}, not {length}: ask for fewer items or longer sequences"
        )
    if vocabulary < ids:
        raise ValueError(f"this task needs a vocabulary of at least {ids}, not {vocabulary}")


@dataclass(frozen=True)
class Task:
    """A task with its sizes."""

    name: str
    function: Callable[[Seed, int, int, int, int], Draw]
    vocabulary: int
    items: int

    def draw(self, seed: Seed, rows: int, length: int) -> Draw:
        """Sequences of a length, determined by the seed."""
        return self.function(seed, rows, length, self.vocabulary, self.items)


TASKS = {
    "induction": Task("induction", induction, 16, 1),
    "selective-copying": Task("selective-copying", selective_copying, 16, 16),
    "recall": Task("recall", recall, 8192, 64),
    "passkey": Task("passkey", passkey, 64, 5),
}


def make_task(name: str, items: int | None = None, vocabulary: int | None = None) -> Task:
    """A task by name; None keeps a default size."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; choose from: {', '.join(TASKS)}")
    task = TASKS[name]
    if items is not None and items < 1:
        raise ValueError(f"a task has at least 1 item, not {items}")
    return Task(name, task.function, vocabulary or task.vocabulary, items or task.items)
