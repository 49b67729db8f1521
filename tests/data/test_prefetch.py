"""Prefetch: the same batches ahead of time; errors surface, the thread ends."""

import threading
import time

import numpy as np
import pytest

from gss.data import Batch, Prefetch, Segments
from tests.making import dataset_from_arrays


def make_batches() -> Segments:
    return Segments(dataset_from_arrays([list(range(1, 90))] * 3, vocab_size=90, eos_id=0), 4, 6, seed=1)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gss-prefetch"]


def test_gives_the_steps_in_order() -> None:
    batches = make_batches()
    with Prefetch(batches, 5, 40, rank=1, world=2, depth=3) as ahead:
        seen = list(ahead)
    assert [batch.step for batch in seen] == list(range(5, 40))
    for batch in seen:
        np.testing.assert_array_equal(batch.targets.numpy(), batches.batch(batch.step, 1, 2).targets)
    assert prefetch_threads() == []


def test_works_ahead_but_not_without_bound() -> None:
    class Watched(Segments):
        made = 0

        def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:  # type: ignore[type-arg]
            self.made += 1
            return super().batch(step, rank, world)

    batches = Watched(make_batches().dataset, 4, 6)
    with Prefetch(batches, depth=3) as ahead:
        deadline = time.monotonic() + 5
        while batches.made < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert batches.made == 4  # three that wait and one in hand
        next(ahead)
    assert prefetch_threads() == []


def test_errors_reach_the_loop() -> None:
    class Failing(Segments):
        def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:  # type: ignore[type-arg]
            if step == 2:
                raise OSError("the disk went away")
            return super().batch(step, rank, world)

    ahead = Prefetch(Failing(make_batches().dataset, 4, 6))
    assert [next(ahead).step, next(ahead).step] == [0, 1]
    with pytest.raises(OSError, match="went away"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    assert prefetch_threads() == []


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1"):
        Prefetch(make_batches(), depth=0)


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    batches = make_batches()
    with Prefetch(batches, 0, 10, device="cuda") as ahead:
        for batch in ahead:
            assert batch.tokens.is_cuda
            np.testing.assert_array_equal(batch.targets.cpu().numpy(), batches.batch(batch.step).targets)
