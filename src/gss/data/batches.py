"""Batches: which tokens each row of each step reads, as a pure function of (seed, step, batch size, length).

There is no iterator state: asking for a step gives that step, on any rank, after any restart. A rank takes its
contiguous rows of the global batch, so that the global batch is the same for every world size.

A document's targets are its stored ids, its end-of-document id included; the input at each position is the id before.
Before a document's first id stands the end-of-document id, which is also what lies before it in the token file, so
inputs are targets shifted by one everywhere. B batch, L length.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gss.data.permutation import derive_key, permute
from gss.data.shards import Dataset

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array")
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch(Generic[Array]):
    """One rank's rows of one step. Padding is the end-of-document id with the mask False."""

    tokens: Array  # [B, L] int64, the inputs
    targets: Array  # [B, L] int64
    mask: Array  # [B, L] bool, True where a target counts
    starts: Array  # [B, L] bool, True where the state must be fresh: nothing before it may be seen
    step: int
    epoch: int


def as_tensors(batch: Batch[npt.NDArray[Any]], pin: bool = False) -> "Batch[torch.Tensor]":
    """The same batch as torch tensors, in pinned memory if asked."""
    import torch

    def convert(array: npt.NDArray[Any]) -> "torch.Tensor":
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if pin else tensor

    return Batch(
        convert(batch.tokens),
        convert(batch.targets),
        convert(batch.mask),
        convert(batch.starts),
        batch.step,
        batch.epoch,
    )


class Batches:
    """What the three ways to batch share: steps, epochs, ranks, and copying stretches of tokens into rows."""

    steps_per_epoch: int

    def __init__(self, dataset: Dataset, length: int, batch_size: int, seed: int = 0) -> None:
        if length < 1 or batch_size < 1:
            raise ValueError(f"length and batch size are at least 1, not {length} and {batch_size}")
        self.dataset, self.length, self.batch_size, self.seed = dataset, length, batch_size, seed

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch[npt.NDArray[Any]]:
        """The rows of `rank` among `world` at a step, counted from 0 over all epochs."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        if self.batch_size % world:
            raise ValueError(f"a batch of {self.batch_size} rows does not divide among {world} ranks")
        share = self.batch_size // world
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        rows = np.arange(rank * share, (rank + 1) * share)
        begins, ends, fresh = self._stretches(epoch, step_in_epoch, rows)
        batch = self._copy(begins, ends, fresh, step, epoch)
        self._mark_inner_starts(batch, begins, ends)
        return batch

    def _stretches(self, epoch: int, step: int, rows: Numbers) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        """For each row the tokens [begin, end) that are its targets, and whether it starts fresh."""
        raise NotImplementedError

    def _mark_inner_starts(self, batch: Batch[npt.NDArray[Any]], begins: Numbers, ends: Numbers) -> None:
        """Documents that start after a row's first position; only packed rows have any."""

    def _copy(
        self, begins: Numbers, ends: Numbers, fresh: npt.NDArray[np.bool_], step: int, epoch: int
    ) -> Batch[npt.NDArray[Any]]:
        shape = (len(begins), self.length)
        stream, eos = self.dataset.tokens, self.dataset.eos_id
        tokens, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            count = end - begin
            targets[row, :count] = stream[begin:end]
            if begin:
                tokens[row, :count] = stream[begin - 1 : end - 1]
            elif count:  # before the first document of all stands the id that ends documents, too
                tokens[row, 0] = eos
                tokens[row, 1:count] = stream[: end - 1]
            tokens[row, count:] = eos
            targets[row, count:] = eos
        mask = np.arange(self.length) < (ends - begins)[:, None]
        starts = np.zeros(shape, bool)
        starts[:, 0] = fresh
        return Batch(tokens, targets, mask, starts, step, epoch)


class _ShuffledRows(Batches):
    """Ways to batch whose rows are independent: `rows` stretches, shuffled anew each epoch.

    The last step of an epoch is filled with rows of padding, so that an epoch holds every target exactly once.
    """

    rows: int

    def _stretches(self, epoch: int, step: int, rows: Numbers) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        places = step * self.batch_size + rows
        begins = np.zeros(len(rows), np.int64)
        ends = np.zeros(len(rows), np.int64)
        real = places < self.rows
        chosen = permute(places[real], self.rows, derive_key(self.seed, epoch))
        begins[real], ends[real] = self._row_stretches(chosen)
        return begins, ends, np.ones(len(rows), bool)

    def _row_stretches(self, chosen: Numbers) -> tuple[Numbers, Numbers]:
        raise NotImplementedError


class Segments(_ShuffledRows):
    """Independent segments within documents: the paper's way. A document's tail is padded."""

    def __init__(self, dataset: Dataset, length: int, batch_size: int, seed: int = 0) -> None:
        super().__init__(dataset, length, batch_size, seed)
        self._segment_ends = np.cumsum(-(-dataset.lengths // length))
        self.rows = int(self._segment_ends[-1])
        self.steps_per_epoch = -(-self.rows // batch_size)

    def _row_stretches(self, chosen: Numbers) -> tuple[Numbers, Numbers]:
        document = np.searchsorted(self._segment_ends, chosen, side="right")
        first = np.where(document > 0, self._segment_ends[document - 1], 0)
        begins = self.dataset.starts[document] + (chosen - first) * self.length
        return begins, np.minimum(begins + self.length, self.dataset.ends[document])


class Packed(_ShuffledRows):
    """Short documents packed whole into rows, with their boundaries; a document longer than a row is cut into rows.

    Which documents share a row is fixed (neighbours in the file); which rows share a step is shuffled each epoch.
    """

    def __init__(self, dataset: Dataset, length: int, batch_size: int, seed: int = 0) -> None:
        super().__init__(dataset, length, batch_size, seed)
        self._bounds = np.asarray([*_pack(dataset.ends, length), len(dataset.tokens)], np.int64)
        self.rows = len(self._bounds) - 1
        self.steps_per_epoch = -(-self.rows // batch_size)

    def _row_stretches(self, chosen: Numbers) -> tuple[Numbers, Numbers]:
        return self._bounds[chosen], self._bounds[chosen + 1]

    def _mark_inner_starts(self, batch: Batch[npt.NDArray[Any]], begins: Numbers, ends: Numbers) -> None:
        low = np.searchsorted(self.dataset.ends, begins, side="right")
        high = np.searchsorted(self.dataset.ends, ends, side="left")
        for row, (first, last) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
            batch.starts[row, self.dataset.ends[first:last] - begins[row]] = True


def _pack(ends: Numbers, length: int, window_size: int = 1 << 18) -> list[int]:
    """Where each row begins when documents are put whole into rows of `length`, in order.

    Works in windows of documents, so that millions of them need little memory and few steps in Python.
    """
    window_size = max(window_size, 2 * length)  # more documents than a row can hold, as each has a token or more
    begins: list[int] = []
    position = number = 0  # where the next row begins, and the first document that ends after it
    while number < len(ends):
        window = np.asarray(ends[number : number + window_size])
        is_last = number + window_size >= len(ends)
        # For a row that begins at each document's start: the first document that does not fit any more.
        reach = np.searchsorted(window, np.append(position, window[:-1]) + length, side="right").tolist()
        done = 0
        while done < len(window) and (reach[done] < len(window) or is_last):
            begins.append(position)
            if reach[done] > done:
                position, done = int(window[reach[done] - 1]), reach[done]
            else:  # the document is longer than the row, which it fills; the rest of it begins the next one
                position += length
                reach[done] = int(np.searchsorted(window, position + length, side="right"))
        number += done
    return begins
