"""Batches on plain integers: every target once, the same rows for every world size, resumed by number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gss.data import Batches, Dataset, Lanes, Lengthened, Packed, Segments, as_tensors
from gss.data.batches import _pack, derive_key, permute
from tests.making import dataset_from_arrays

EOS = 0
WAYS = [Segments, Packed, Lanes]
Way = type[Segments] | type[Packed] | type[Lanes]


def numbered(lengths: list[int]) -> Dataset:
    """Documents whose ids are all different, so that each target tells where it comes from."""
    documents, following = [], 1
    for length in lengths:
        documents.append(list(range(following, following + length)))
        following += length
    return dataset_from_arrays(documents, vocab_size=following, eos_id=EOS)


def counted_targets(batches: Batches, epoch: int) -> list[int]:
    first = epoch * batches.steps_per_epoch
    found: list[int] = []
    for step in range(first, first + batches.steps_per_epoch):
        batch = batches.batch(step)
        assert (batch.step, batch.epoch) == (step, epoch)
        found += batch.targets[batch.mask].tolist()
    return found


def expected_inputs(dataset: Dataset) -> dict[int, int]:
    """For each id of a text, the id before it in its own document (the end-of-document id at its start)."""
    before: dict[int, int] = {}
    for document in dataset.documents():
        ids = document.tokens.tolist()
        before.update(zip(ids, [EOS, *ids[:-1]], strict=True))
    return before


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=5, max_size=30),
    length=st.integers(1, 17),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**40),
)
def test_each_token_of_an_epoch_is_a_target_once(
    way: Way, lengths: list[int], length: int, batch_size: int, seed: int
) -> None:
    dataset = numbered(lengths)
    batches = way(dataset, length, batch_size, seed)
    before = expected_inputs(dataset)
    for epoch in (0, 3):
        assert sorted(counted_targets(batches, epoch)) == sorted(dataset.tokens.tolist())
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        assert batch.tokens.shape == batch.targets.shape == batch.mask.shape == batch.starts.shape
        assert batch.tokens.shape == (batch_size, length)
        assert (batch.tokens.dtype, batch.targets.dtype) == (np.int64, np.int64)
        assert batch.mask.dtype == batch.starts.dtype == bool
        assert (batch.tokens[~batch.mask] == EOS).all()
        for token, target in zip(batch.tokens[batch.mask], batch.targets[batch.mask], strict=True):
            # An end of document may follow any id of its document; all else follows its own predecessor.
            assert target == EOS or token == before[int(target)]


@pytest.mark.parametrize("way", WAYS)
def test_world_sizes_and_resuming(way: Way) -> None:
    dataset = numbered([(7 * i) % 50 + 1 for i in range(41)])
    batches = way(dataset, 9, 8, seed=3)
    steps = list(range(3 * batches.steps_per_epoch))
    for step in steps:
        whole = batches.batch(step)
        for world in (2, 4):
            ranks = [way(dataset, 9, 8, seed=3).batch(step, rank, world) for rank in range(world)]
            for field in ("tokens", "targets", "mask", "starts"):
                joined = np.concatenate([getattr(rank, field) for rank in ranks])
                np.testing.assert_array_equal(joined, getattr(whole, field))
    # Asked in any order, by an object that was never asked before, a step is the same.
    for step in reversed(steps):
        np.testing.assert_array_equal(way(dataset, 9, 8, seed=3).batch(step).targets, batches.batch(step).targets)
    with pytest.raises(ValueError, match="cannot be divided among 3 ranks"):
        batches.batch(0, 0, 3)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        batches.batch(0, 2, 2)
    with pytest.raises(ValueError, match="count from 0"):
        batches.batch(-1)


def test_rows_may_become_longer() -> None:
    dataset = numbered([50] * 16)
    short, long = Segments(dataset, 4, 8, seed=3), Segments(dataset, 16, 2, seed=3)
    batches = Lengthened(short, long, 5)
    assert batches.steps_per_epoch == short.steps_per_epoch
    for step in (0, 4, 5, 40):
        expected = (short if step < 5 else long).batch(step, 1, 2)
        np.testing.assert_array_equal(batches.batch(step, 1, 2).targets, expected.targets)


@pytest.mark.parametrize("way", WAYS)
def test_epochs_and_seeds_are_shuffled(way: Way) -> None:
    dataset = numbered([20] * 64)
    batches = way(dataset, 7, 4, seed=0)
    orders = [counted_targets(batches, epoch) for epoch in range(3)] + [counted_targets(way(dataset, 7, 4, seed=1), 0)]
    for i in range(4):
        for j in range(i):
            assert orders[i] != orders[j]
    assert orders[0] != sorted(orders[0])


def test_segments_start_fresh_and_stay_in_their_document() -> None:
    dataset = numbered([10, 3])
    batches = Segments(dataset, 4, 2, seed=0)
    rows = [
        (batch.tokens[row].tolist(), batch.targets[row].tolist(), int(batch.mask[row].sum()))
        for step in range(batches.steps_per_epoch)
        for batch in [batches.batch(step)]
        for row in range(2)
    ]
    assert sorted(rows) == [
        ([0, 1, 2, 3], [1, 2, 3, 4], 4),
        ([0, 11, 12, 13], [11, 12, 13, 0], 4),
        ([4, 5, 6, 7], [5, 6, 7, 8], 4),
        ([8, 9, 10, 0], [9, 10, 0, 0], 3),
    ]
    assert batches.batch(0).starts.tolist() == [[True, False, False, False]] * 2


@pytest.mark.parametrize("way", WAYS)
def test_rows_may_begin_with_the_end_of_document_id(way: Way) -> None:
    """Only the first input of a row that starts fresh changes; a lane goes on as before."""
    plain, changed = way(numbered([10, 3, 9]), 4, 2, seed=0), way(numbered([10, 3, 9]), 4, 2, seed=0)
    changed.eos_first = True
    inside = 0
    for step in range(plain.steps_per_epoch):
        before, after = plain.batch(step), changed.batch(step)
        first = before.starts[:, 0]
        assert (after.tokens[first, 0] == 0).all()
        inside += int((before.tokens[first, 0] != 0).sum())
        assert (after.tokens[~first] == before.tokens[~first]).all()
        assert (after.tokens[:, 1:] == before.tokens[:, 1:]).all()
        assert all((getattr(after, name) == getattr(before, name)).all() for name in ("targets", "mask", "starts"))
    assert inside == 0 if way is Lanes else inside > 0


def test_lanes_follow_documents() -> None:
    """Read row by row, step by step, each lane is whole documents one after another, fresh only at their starts."""
    dataset = numbered([(11 * i) % 37 + 1 for i in range(30)])
    batches = Lanes(dataset, 5, 4, seed=2)
    steps = [batches.batch(step) for step in range(batches.steps_per_epoch)]
    firsts = {int(document.tokens[0]) for document in dataset.documents()}
    followed = []
    for lane in range(4):
        current: list[int] = []
        for batch in steps:
            assert not batch.starts[lane, 1:].any()
            counted = batch.targets[lane][batch.mask[lane]].tolist()
            if batch.starts[lane, 0]:
                assert current == []
                assert counted[0] in firsts
            else:
                assert bool(current) == bool(counted)
            current += counted
            if current and current[-1] == EOS:
                followed.append(current)
                current = []
        assert current == []
    assert sorted(followed) == sorted(document.tokens.tolist() for document in dataset.documents())


def test_lanes_are_balanced_and_refuse_too_few_documents() -> None:
    dataset = numbered([(13 * i) % 200 + 20 for i in range(200)])
    assert Lanes(dataset, 16, 8).fullness > 0.9
    with pytest.raises(ValueError, match="cannot fill 201 lanes"):
        Lanes(dataset, 16, 201)


def test_packed_rows_hold_whole_documents() -> None:
    dataset = numbered([2, 2, 3, 9, 1])  # with their ends: 3, 3, 4, 10, 2 tokens
    batches = Packed(dataset, 6, 1, seed=0)
    rows = {}
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        rows[int(batch.targets[0, 0])] = (batch.targets[0][batch.mask[0]].tolist(), batch.starts[0].tolist())
    assert rows == {
        1: ([1, 2, 0, 3, 4, 0], [True, False, False, True, False, False]),
        5: ([5, 6, 7, 0], [True, False, False, False, False, False]),
        8: ([8, 9, 10, 11, 12, 13], [True, False, False, False, False, False]),
        14: ([14, 15, 16, 0, 17, 0], [True, False, False, False, True, False]),
    }


def slow_pack(lengths: list[int], length: int) -> list[int]:
    begins, position, row = [], 0, 0
    for size in lengths:
        if not begins or row + size > length:
            begins.append(position)
            row = 0
        while size > length:
            position, size = position + length, size - length
            begins.append(position)
        position, row = position + size, row + size
    return begins


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=200), st.integers(1, 20))
def test_packing_equals_a_plain_loop(lengths: list[int], length: int) -> None:
    ends = np.cumsum(lengths)
    assert _pack(ends, length) == slow_pack(lengths, length)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_permutations_are_permutations(count: int, key: int) -> None:
    order = permute(np.arange(count), count, key)
    assert sorted(order.tolist()) == list(range(count))
    place = key % count
    assert permute([place], count, key)[0] == order[place]


def test_permutations_look_random() -> None:
    """Each item comes first equally often, neighbours part, and the order is the one that was ever used."""
    firsts = [int(permute([0], 10, derive_key(5, epoch))[0]) for epoch in range(5000)]
    assert 400 < min(np.bincount(firsts, minlength=10)) <= max(np.bincount(firsts, minlength=10)) < 600
    order = permute(np.arange(100_000), 100_000, derive_key(0, 0))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert permute(np.arange(10), 10, derive_key(0, 0)).tolist() == PINNED
    with pytest.raises(ValueError, match="outside a shuffle of 3"):
        permute([3], 3, 0)


# A change here changes the data order of every run that is resumed.
PINNED = [5, 3, 1, 4, 0, 2, 8, 9, 7, 6]


def test_tensors_embed_directly() -> None:
    import torch

    batch = as_tensors(Segments(numbered([30, 40]), 8, 4).batch(1))
    embedded = torch.nn.functional.embedding(batch.tokens, torch.zeros(80, 2))
    assert embedded.shape == (4, 8, 2)
    assert batch.mask.dtype == batch.starts.dtype == torch.bool
    assert batch.step == 1


def test_impossible_sizes_are_refused() -> None:
    for length, batch_size in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Segments(numbered([3]), length, batch_size)
