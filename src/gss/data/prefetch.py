"""Prefetch: batches made ahead by a background thread, in pinned memory where they go to a GPU.

Holds no state of its own that matters: it asks `Batches` for steps by number, so that it can be closed at any moment
and opened again at any step.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from gss.data.batches import Batch, Batches, as_tensors

if TYPE_CHECKING:
    import torch


class Prefetch:
    """An iterator over one rank's batches as tensors on `device`, from `start_step` up to `stop_step` if given.

    Use it in a `with` block, or call `close`, so that the thread ends when the training loop does.
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
            raise ValueError(f"prefetching keeps at least 1 batch, not {depth}")
        self._device = torch.device(device)
        self._batches, self._rank, self._world = batches, rank, world
        self._steps = iter(count(start_step) if stop_step is None else range(start_step, stop_step))
        self._thread = ThreadPoolExecutor(1, "gss-prefetch")
        self._ahead: deque[Future[Batch[torch.Tensor]]] = deque()
        for _ in range(depth + 1):
            self._ask()

    def _ask(self) -> None:
        if (step := next(self._steps, None)) is not None:
            self._ahead.append(self._thread.submit(self._make, step))

    def _make(self, step: int) -> "Batch[torch.Tensor]":
        return as_tensors(self._batches.batch(step, self._rank, self._world), pin=self._device.type == "cuda")

    def __iter__(self) -> "Iterator[Batch[torch.Tensor]]":
        return self

    def __next__(self) -> "Batch[torch.Tensor]":
        if not self._ahead:
            self.close()
            raise StopIteration
        try:
            batch = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._ask()
        return batch.map(lambda tensor: tensor.to(self._device, non_blocking=self._device.type == "cuda"))

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread; batches that were made ahead are dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()
