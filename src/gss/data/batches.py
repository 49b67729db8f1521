"""Batches: which tokens each row of each step reads, as a pure function of (seed, step, batch size, length).

There is no iterator state: you can ask for any step, on any rank, after any restart. Each rank takes contiguous rows of
the global batch, so the global batch is the same for every world size.

A document's targets are its stored ids, including its end-of-document id; the input at each position is the id before.
The input before a document's first id is the end-of-document id. That id also precedes it in the token file, so inputs
are targets shifted by one everywhere. B batch, L length.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gss.data.shards import Dataset, check_ids

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array")
Other = TypeVar("Other")
Numbers = npt.NDArray[np.int64]
Ranges = tuple[Numbers, Numbers, npt.NDArray[np.bool_]]  # begins and ends, and which rows start fresh


@dataclass(frozen=True)
class Batch(Generic[Array]):
    """One rank's rows of one step. Padding is the end-of-document id with the mask False."""

    tokens: Array  # [B, L] int64, the inputs
    targets: Array  # [B, L] int64
    mask: Array  # [B, L] bool, True where a target counts
    starts: Array  # [B, L] bool, True where the state must be fresh: nothing before it may be seen
    step: int
    epoch: int

    def map(self, convert: Callable[[Array], Other]) -> "Batch[Other]":
        """The same batch with each array converted."""
        tokens, targets, mask, starts = map(convert, (self.tokens, self.targets, self.mask, self.starts))
        return Batch(tokens, targets, mask, starts, self.step, self.epoch)


def as_tensors(batch: Batch[npt.NDArray[Any]], pin: bool = False) -> "Batch[torch.Tensor]":
    """The same batch as torch tensors, in pinned memory if asked."""
    import torch

    return batch.map(lambda array: torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array))


class Batches:
    """The common part of the ways to batch: steps, epochs, ranks, and copying ranges of tokens into rows."""

    steps_per_epoch: int
    eos_first = False
    """Whether a row that starts fresh inside a document begins with the end-of-document id, not the token before."""

    def __init__(self, dataset: Dataset, length: int, batch_size: int, seed: int = 0) -> None:
        if length < 1 or batch_size < 1:
            raise ValueError(f"length and batch size must be at least 1, not {length} and {batch_size}")
        self.dataset, self.length, self.batch_size, self.seed = dataset, length, batch_size, seed

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch[npt.NDArray[Any]]:
        """The rows of `rank` among `world` at a step, counted from 0 over all epochs."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        if self.batch_size % world:
            raise ValueError(f"a batch of {self.batch_size} rows cannot be divided among {world} ranks")
        self.dataset.check_file()
        share = self.batch_size // world
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        begins, ends, fresh = self._ranges(epoch, step_in_epoch, np.arange(rank * share, (rank + 1) * share))
        stream, eos, shape = self.dataset.tokens, self.dataset.eos_id, (share, self.length)
        tokens, targets = np.full(shape, eos, np.int64), np.full(shape, eos, np.int64)
        starts = np.zeros(shape, bool)
        starts[:, 0] = fresh
        inner = np.searchsorted(self.dataset.ends, begins, side="right"), np.searchsorted(self.dataset.ends, ends)
        numbers = (array.tolist() for array in (begins, ends, *inner))
        for row, (begin, end, first, last) in enumerate(zip(*numbers, strict=True)):
            count = end - begin
            targets[row, :count] = stream[begin:end]
            if begin:
                tokens[row, :count] = stream[begin - 1 : end - 1]
            elif count:  # the first document of the file follows the end-of-document id, too
                tokens[row, 1:count] = stream[: end - 1]
            if first < last:  # documents that begin inside the row
                starts[row, self.dataset.ends[first:last] - begin] = True
        if self.eos_first:
            tokens[fresh, 0] = eos
        check_ids(targets, self.dataset.vocab_size, self.dataset.folder)
        mask = np.arange(self.length) < (ends - begins)[:, None]
        return Batch(tokens, targets, mask, starts, step, epoch)

    def _ranges(self, epoch: int, step: int, rows: Numbers) -> Ranges:
        """For each row, where its targets begin and end in the token file, and whether it starts fresh."""
        raise NotImplementedError


class _ShuffledRows(Batches):
    """Batches of independent rows, shuffled in each epoch; a row ends where the next one begins in the token file.

    The last step of an epoch is filled up with rows of padding, so an epoch contains every target exactly once.
    """

    def __init__(self, dataset: Dataset, length: int, batch_size: int, seed: int = 0) -> None:
        super().__init__(dataset, length, batch_size, seed)
        self._bounds = np.append(self._cut(), len(dataset.tokens))
        self._rows = len(self._bounds) - 1
        self.steps_per_epoch = -(-self._rows // batch_size)

    def _cut(self) -> Numbers:
        """Where each row begins in the token file."""
        raise NotImplementedError

    def _ranges(self, epoch: int, step: int, rows: Numbers) -> Ranges:
        places = step * self.batch_size + rows
        begins, ends = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        real = places < self._rows
        chosen = permute(places[real], self._rows, derive_key(self.seed, epoch))
        begins[real], ends[real] = self._bounds[chosen], self._bounds[chosen + 1]
        return begins, ends, np.ones(len(rows), bool)


class Segments(_ShuffledRows):
    """Independent segments of documents, as in the paper. The last segment of a document is padded."""

    def _cut(self) -> Numbers:
        counts = -(-self.dataset.lengths // self.length)
        first = np.cumsum(counts) - counts  # the number of each document's first segment
        within = np.arange(counts.sum()) - np.repeat(first, counts)
        return np.repeat(self.dataset.starts, counts) + within * self.length


class Packed(_ShuffledRows):
    """Several short documents per row; a document longer than a row is cut.

    Documents that share a row are neighbours in the file, in every epoch. Which rows share a step is shuffled.
    """

    def _cut(self) -> Numbers:
        return np.asarray(_pack(self.dataset.ends, self.length), np.int64)


def _pack(ends: Numbers, length: int) -> list[int]:
    """Where each row begins if documents are put whole, in order, into rows of `length`."""
    begins, position, number = [], 0, 0  # where the next row begins, and the first document that ends after it
    view = np.ascontiguousarray(ends, np.int64).data  # its items are plain integers, which compare quickly
    while number < len(view):
        begins.append(position)
        # A document has at least one token, so a row holds at most `length` of them.
        beyond = bisect_right(view, position + length, number, min(len(view), number + length + 1))
        # A document longer than the row fills it, and its rest begins the next one.
        position = view[beyond - 1] if beyond > number else position + length
        number = beyond
    return begins


class Lengthened(Batches):
    """The batches of `before` until a step, then those of `after`, with rows of another length."""

    def __init__(self, before: Batches, after: Batches, step: int) -> None:
        super().__init__(before.dataset, before.length, before.batch_size, before.seed)
        self.before, self.after, self.step = before, after, step
        self.steps_per_epoch = before.steps_per_epoch

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch[npt.NDArray[Any]]:
        return (self.before if step < self.step else self.after).batch(step, rank, world)


class Lanes(Batches):
    """Each row of the batch, a lane, reads one document after another, with its state carried from step to step.

    Documents are assigned to B groups once, from the longest on, always to the shortest group, so lanes end together
    and every epoch has the same number of steps. Each epoch shuffles which lane gets which group, and the order in it.
    The last segment of a document is padded to L, so documents start only in the first column of a row: `starts` marks
    where the state must be fresh.
    """

    def __init__(self, dataset: Dataset, length: int, batch_size: int, seed: int = 0) -> None:
        super().__init__(dataset, length, batch_size, seed)
        if len(dataset) < batch_size:
            raise ValueError(f"{len(dataset)} documents cannot fill {batch_size} lanes: use fewer lanes, or segments")
        self._segments = -(-dataset.lengths // length)
        self._assigned = _assign(self._segments, batch_size)
        self.steps_per_epoch = max(int(self._segments[documents].sum()) for documents in self._assigned)
        self._lanes_of = lru_cache(maxsize=1)(self._shuffled_lanes)

    @property
    def fullness(self) -> float:
        """The share of an epoch's positions that are not padding."""
        return len(self.dataset.tokens) / (self.steps_per_epoch * self.batch_size * self.length)

    def _ranges(self, epoch: int, step: int, rows: Numbers) -> Ranges:
        lanes = self._lanes_of(epoch)
        begins, ends = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        fresh = np.zeros(len(rows), bool)
        for i, row in enumerate(rows):
            documents, segment_ends = lanes[row]
            place = int(np.searchsorted(segment_ends, step, side="right"))
            if place == len(documents):
                continue  # this lane has ended: padding for the rest of the epoch
            document = documents[place]
            segment = step - (int(segment_ends[place - 1]) if place else 0)
            begins[i] = self.dataset.starts[document] + segment * self.length
            ends[i] = min(begins[i] + self.length, self.dataset.ends[document])
            fresh[i] = segment == 0
        return begins, ends, fresh

    def _shuffled_lanes(self, epoch: int) -> list[tuple[Numbers, Numbers]]:
        """Each lane's documents in the order of this epoch, and the number of its segments up to each one's end."""
        lanes = []
        for lane, number in enumerate(_shuffled(np.arange(self.batch_size), derive_key(self.seed, epoch, 0))):
            documents = _shuffled(self._assigned[number], derive_key(self.seed, epoch, 1 + lane))
            lanes.append((documents, np.cumsum(self._segments[documents])))
        return lanes


def _assign(segments: Numbers, lanes: int) -> list[Numbers]:
    """Groups of documents: from the longest on, each document goes to the shortest group so far."""
    assigned: list[list[int]] = [[] for _ in range(lanes)]
    shortest = [(0, lane) for lane in range(lanes)]
    for document in np.argsort(-segments, kind="stable").tolist():
        filled, lane = heapq.heappop(shortest)
        assigned[lane].append(document)
        heapq.heappush(shortest, (filled + int(segments[document]), lane))
    return [np.asarray(documents, np.int64) for documents in assigned]


class Prefetch(Iterator["Batch[torch.Tensor]"], AbstractContextManager["Prefetch"]):
    """One rank's batches as tensors on `device`, from `start_step` to `stop_step` if given, made ahead by a thread.

    Batches for a GPU go through pinned memory. Use it in a `with` block, or call `close`, so that the thread ends with
    the training loop.
    """

    def __init__(
        self,
        batches: Batches,
        start_step: int = 0,
        stop_step: int | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        device: "torch.device | str" = "cpu",
        depth: int = 4,
    ) -> None:
        import torch

        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._device = torch.device(device)
        self._thread = ThreadPoolExecutor(1, "gss-prefetch")
        steps = count(start_step) if stop_step is None else range(start_step, stop_step)

        def make(step: int) -> "Batch[torch.Tensor]":
            return as_tensors(batches.batch(step, rank, world), pin=self._device.type == "cuda")

        self._futures = (self._thread.submit(make, step) for step in steps)
        self._ahead = deque(islice(self._futures, depth + 1))

    def __next__(self) -> "Batch[torch.Tensor]":
        if not self._ahead:
            self.close()
            raise StopIteration
        try:
            batch = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._ahead.extend(islice(self._futures, 1))
        return batch.map(lambda tensor: tensor.to(self._device, non_blocking=self._device.type == "cuda"))

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop the batches made ahead."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()


# A shuffle that can be evaluated anywhere without being stored: a Feistel network over the next power of four, iterated
# until it lands inside the range. It uses our own arithmetic on 64-bit integers, so the order does not depend on the
# version of a library.
_ROUNDS = 6
_GOLDEN, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def derive_key(*parts: int) -> int:
    """A 64-bit key from a few integers, such as a seed and an epoch."""
    state = 0
    for part in parts:
        state = _mix((state + part * _GOLDEN + _GOLDEN) & _WORD)
    return state


def permute(places: Sequence[int] | npt.NDArray[np.integer], count: int, key: int) -> Numbers:
    """The elements at these places in a shuffle of range(count)."""
    values = np.asarray(places, dtype=np.uint64)
    if values.size and int(values.max()) >= count:
        raise ValueError(f"place {int(values.max())} is outside a shuffle of {count}")
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_key(key, number)) for number in range(_ROUNDS)]
    result = _feistel(values, half, keys)
    outside = np.flatnonzero(result >= count)
    while outside.size:  # iterate until inside: a few times at most, since at least a quarter of the values are
        result[outside] = _feistel(result[outside], half, keys)
        outside = outside[result[outside] >= count]
    return result.astype(np.int64)


def _shuffled(items: Numbers, key: int) -> Numbers:
    return items[permute(np.arange(len(items)), len(items), key)]


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: Any) -> Any:
    """Scramble a 64-bit number, or an array of them (the finalizer of splitmix64, arithmetic modulo 2^64)."""
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB & _WORD
    return values ^ (values >> 31)
