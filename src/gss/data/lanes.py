"""Lanes: each row of the batch follows one document after another, with the state carried from step to step.

Documents are dealt to the B lanes once, the longest first to the shortest lane, so that lanes end together and an
epoch has the same number of steps every time. Each epoch shuffles which lane gets which hand and the order within it.
A document takes whole pieces of L in its lane, its tail padded, so that documents start only at a row's first column.
"""

import heapq

import numpy as np
import numpy.typing as npt

from gss.data.batches import Batches, Numbers
from gss.data.permutation import derive_key, permute
from gss.data.shards import Dataset


class Lanes(Batches):
    """Step s reads piece s of every lane; `starts` marks where a row's state must be fresh."""

    def __init__(self, dataset: Dataset, length: int, batch_size: int, seed: int = 0) -> None:
        super().__init__(dataset, length, batch_size, seed)
        if len(dataset) < batch_size:
            raise ValueError(
                f"{len(dataset)} documents cannot fill {batch_size} lanes: use a smaller batch, or independent segments"
            )
        self._pieces = -(-dataset.lengths // length)
        self._hands = _deal(self._pieces, batch_size)
        self.steps_per_epoch = max(int(self._pieces[hand].sum()) for hand in self._hands)
        self._kept: tuple[int, list[tuple[Numbers, Numbers]]] = (-1, [])

    @property
    def fullness(self) -> float:
        """The share of all positions of an epoch whose targets count; the rest is padding."""
        return len(self.dataset.tokens) / (self.steps_per_epoch * self.batch_size * self.length)

    def _stretches(self, epoch: int, step: int, rows: Numbers) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        order = self._lanes_of(epoch)
        begins = np.zeros(len(rows), np.int64)
        ends = np.zeros(len(rows), np.int64)
        fresh = np.zeros(len(rows), bool)
        for i, row in enumerate(rows):
            documents, piece_ends = order[row]
            place = int(np.searchsorted(piece_ends, step, side="right"))
            if place == len(documents):
                continue  # this lane is over before the others: padding to the epoch's end
            document = documents[place]
            piece = step - (int(piece_ends[place - 1]) if place else 0)
            begins[i] = self.dataset.starts[document] + piece * self.length
            ends[i] = min(begins[i] + self.length, self.dataset.ends[document])
            fresh[i] = piece == 0
        return begins, ends, fresh

    def _lanes_of(self, epoch: int) -> list[tuple[Numbers, Numbers]]:
        """Each lane's documents in this epoch's order, and the pieces up to each one's end; the last epoch is kept."""
        kept_epoch, order = self._kept  # one assignment, so that a prefetching thread and others may share this
        if epoch != kept_epoch:
            hands = permute(np.arange(self.batch_size), self.batch_size, derive_key(self.seed, epoch, 0))
            order = []
            for lane, number in enumerate(hands):
                hand = self._hands[number]
                shuffled = hand[permute(np.arange(len(hand)), len(hand), derive_key(self.seed, epoch, 1 + lane))]
                order.append((shuffled, np.cumsum(self._pieces[shuffled])))
            self._kept = (epoch, order)
        return order


def _deal(pieces: Numbers, lanes: int) -> list[Numbers]:
    """Documents by lane, dealt from the longest on to the lane that is shortest so far."""
    hands: list[list[int]] = [[] for _ in range(lanes)]
    shortest = [(0, lane) for lane in range(lanes)]
    for document in np.argsort(-pieces, kind="stable").tolist():
        filled, lane = heapq.heappop(shortest)
        hands[lane].append(document)
        heapq.heappush(shortest, (filled + int(pieces[document]), lane))
    return [np.asarray(hand, np.int64) for hand in hands]
