"""Prefetch: batches made ahead by a background thread, in pinned memory where they go to a GPU.

Holds no state of its own that matters: it asks `Batches` for steps by number, so that it can be closed at any moment
and opened again at any step.
"""

import queue
import threading
from collections.abc import Iterator
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
        self._pin = self._device.type == "cuda"
        self._batches, self._rank, self._world = batches, rank, world
        self._ready: queue.Queue[Batch[torch.Tensor] | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(start_step, stop_step), name="gss-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> "Iterator[Batch[torch.Tensor]]":
        return self

    def __next__(self) -> "Batch[torch.Tensor]":
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if item is None:
            self.close()
            raise StopIteration
        if isinstance(item, BaseException):
            self.close()
            raise item
        if self._device.type == "cpu":
            return item
        return item.map(lambda tensor: tensor.to(self._device, non_blocking=self._pin))

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread; batches that were made ahead are dropped."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # the thread may be waiting for room
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _run(self, step: int, stop_step: int | None) -> None:
        try:
            while not self._closed.is_set() and (stop_step is None or step < stop_step):
                batch = self._batches.batch(step, self._rank, self._world)
                self._ready.put(as_tensors(batch, pin=self._pin))
                step += 1
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)  # raised again where the batches are used
