"""How much of its context a model uses: arithmetic on integers, a model whose memory is known, solvable tasks."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gss
from gss.data import load_tokenizer
from gss.probe import (
    TASKS,
    Stage,
    make_task,
    probe_context,
    shared_longest,
    task_accuracy,
    task_optimizer,
    train_on_task,
)
from gss.probe.context import _rows as context_losses
from gss.probe.context import block_losses, choose_blocks, contexts_up_to, effective_context
from gss.report import write_report
from gss.training.step import Stepper
from tests.conftest import ALL_FAMILIES, small_config
from tests.making import call, dataset_from_arrays, make_corpus, make_run

EOS = 60


@given(st.lists(st.integers(1, 60), min_size=2, max_size=6), st.integers(2, 16), st.integers(1, 8), st.integers(1, 3))
def test_blocks(lengths: list[int], longest: int, targets: int, per_document: int) -> None:
    if sum(length >= longest + targets for length in lengths) < 2:
        with pytest.raises(ValueError, match="too short"):
            choose_blocks(lengths, longest, targets, per_document, 4)
        return
    blocks = choose_blocks(lengths, longest, targets, per_document, 4)
    scored = [(block.document, block.start + i) for block in blocks for i in range(targets)]
    assert len(set(scored)) == len(scored)  # each target once
    assert all(block.start - longest >= 0 and block.start + targets <= lengths[block.document] for block in blocks)
    assert all(longest <= block.other_start <= lengths[block.other] for block in blocks)
    assert all(block.other != block.document for block in blocks)
    chosen = [block.document for block in blocks]
    assert len(set(chosen)) <= 4
    assert max(chosen.count(document) for document in chosen) <= per_document


def test_contexts() -> None:
    assert contexts_up_to(16) == [1, 2, 4, 8, 16]
    assert contexts_up_to(100, 16) == [16, 32, 64, 100]
    assert shared_longest([100] * 8 + [5000], 30) == 64
    assert shared_longest([5000, 94], 30) == shared_longest([5000, 94, 1, 1], 30) == 64
    assert shared_longest([1 << 22] * 8, 512) == 1 << 20
    for lengths in ([31, 5000], [5000]):
        with pytest.raises(ValueError, match="needs 2 documents of 32 tokens"):
            shared_longest(lengths, 30)
    with pytest.raises(ValueError, match="contexts must satisfy"):
        contexts_up_to(8, 8)


class Spy(NamedTuple):
    """Everything that was read, as a state."""

    seen: Tensor

    @property
    def batch(self) -> int:
        return len(self.seen)

    def select(self, rows: Any) -> "Spy":
        return Spy(self.seen[list(rows)])


class Echo(gss.LanguageModel):
    """Knows its last `memory` tokens and expects the first of them to come again."""

    def __init__(self, vocab_size: int, memory: int) -> None:
        super().__init__(gss.preset("gss-tiny", vocab_size=vocab_size, width=4, depth=1, gate_width=4, channels=2))
        self.memory, self.sequences = memory, []

    def hidden(self, tokens: Tensor, state: Any = None, keep_state: bool = True, *others: Any, **more: Any) -> Any:
        before = tokens[:, :0] if state is None else state.seen
        seen = torch.cat([before, tokens], dim=1)
        self.sequences += seen.tolist()
        padded = F.pad(seen, (self.memory, 0), value=EOS)
        echoed = padded[:, before.shape[1] + 1 :][:, : tokens.shape[1]]  # what came `memory` before the next token
        return echoed.unsqueeze(2), Spy(seen) if keep_state else None

    def logits(self, hidden: Tensor) -> Tensor:
        return 20.0 * F.one_hot(hidden[..., 0], self.config.vocab_size)


@pytest.mark.parametrize("piece", [3, 4096])
def test_which_tokens_are_true(piece: int) -> None:
    own, other = np.arange(1, 13)[None], np.arange(51, 59)[None]  # 8 of context and 4 targets
    model = Echo(EOS + 1, 2)
    block_losses(model, own, other, [2, 4, 8], 4, piece)
    read = {tuple(sequence) for sequence in model.sequences}
    for true in (2, 4, 8):
        assert (*range(51, 59 - true), *range(9 - true, 12)) in read  # the last target is no input
    assert max(map(len, read)) == 11
    model.sequences.clear()
    block_losses(model, own, other[:, :0], [2, 4, 8], 4, piece)
    read = {tuple(sequence) for sequence in model.sequences}
    assert {tuple(range(9 - true, 12)) for true in (2, 4, 8)} <= read
    assert not any(token > 50 for sequence in read for token in sequence)


def test_a_model_of_known_memory() -> None:
    draw = np.random.default_rng(0)
    for memory in (4, 16, 32):  # documents that repeat themselves after so many tokens
        documents = [np.resize(draw.integers(0, EOS, memory), 200).tolist() for _ in range(6)]
        dataset = dataset_from_arrays(documents, vocab_size=EOS + 1, eos_id=EOS)
        result = probe_context(Echo(EOS + 1, memory), dataset, longest=128, targets=16, piece=50)
        assert result.effective_context == memory
        assert result.effective_interval == (memory, memory)
        assert [row.context for row in result.replaced] == [1, 2, 4, 8, 16, 32, 64, 128]
        assert all(row.loss < 1e-4 for row in result.replaced + result.fresh if row.context >= memory)
        wrong = [min(16, max(0, memory - row.context)) / 16 for row in result.replaced]
        assert [row.loss / 20 for row in result.replaced] == pytest.approx(wrong, abs=0.1)
        assert result.replaced[-1].excess == result.replaced[-1].excess_error == 0
        assert result.tokens == result.blocks * 16 == 12 * 16
        assert result.documents == 6


def test_no_gain_has_no_effective_context() -> None:
    losses = np.random.default_rng(0).normal(3, 1, (8, 1)) * 100 + np.zeros((8, 4))
    value, interval, error = effective_context([1, 2, 4, 8], losses, np.full(8, 100))
    assert (value, interval, error) == (None, (1, 1), 0)
    # A dip on the way does not count: from the effective context on, every longer one is within 5% of the gain.
    losses += np.array([10.0, 0.0, 5.0, 0.0])
    assert effective_context([1, 2, 4, 8], losses, np.full(8, 100))[:2] == (8, (8, 8))
    losses[:, 2] -= 4.9
    assert effective_context([1, 2, 4, 8], losses, np.full(8, 100))[:2] == (2, (2, 2))


def test_the_effective_context_is_as_sure_as_its_documents() -> None:
    """A gain of less than two standard errors is none; of 8 documents, those that gain at last are missing from one
    resampling in ten."""
    counts = np.full(8, 100)
    for gains, expected in (((30, -10), None), ((30, 10), 2)):
        losses = np.outer(np.tile(gains, 4), [1.0, 0.0, 0.0, 0.0])
        assert effective_context([1, 2, 4, 8], losses, counts)[0] == expected
    gained = np.array([2, 2, 4, 4, 4, 4, 8, 8])
    losses = 100.0 * (np.array([1, 2, 4, 8]) < gained[:, None])
    assert effective_context([1, 2, 4, 8], losses, counts)[:2] == (8, (4, 8))
    counts[0] = 700  # documents count by their tokens
    losses = np.stack([counts, 60 * (np.arange(8) == 1), 0 * counts], axis=1)
    assert effective_context([1, 2, 4], losses, counts)[0] == 2
    hard = 100.0 * np.arange(8)  # some documents are, with any context
    short, long = context_losses([1, 8], np.stack([hard + counts / 35, hard], axis=1), counts)
    assert (short.excess, short.excess_error, long.excess_error) == pytest.approx((40 / 1400, 0, 0), abs=1e-12)
    assert short.standard_error == pytest.approx(long.standard_error)
    assert long.standard_error > 0.5


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_losses_are_those_of_whole_forwards(family: str) -> None:
    model = gss.build_model(small_config(family)).double().eval()
    own, other = torch.randint(0, EOS, (2, 26)).numpy(), torch.randint(0, EOS, (2, 20)).numpy()
    found = block_losses(model, own, other, [1, 5, 20], 6, 7)
    for column, context in enumerate([1, 5, 20]):
        ids = torch.from_numpy(np.concatenate([other[:, : 20 - context], own[:, 20 - context :]], axis=1))
        logits = model(ids[:, :-1])[0][:, -6:]
        expected = F.cross_entropy(logits.transpose(1, 2), ids[:, -6:], reduction="none").sum(1)
        assert found[:, column] == pytest.approx(expected.tolist(), rel=1e-9)


def test_a_model_that_keeps_everything_is_limited() -> None:
    documents = [*np.random.default_rng(0).integers(0, EOS, (3, 150)).tolist()]
    documents.insert(0, [1] * 39)  # too short to be probed, and the first to be scored by position
    dataset = dataset_from_arrays(documents, vocab_size=EOS + 1, eos_id=EOS)
    results = {}
    for family in ("llama", "slide"):
        model = gss.build_model(small_config(family)).train()
        results[family] = probe_context(model, dataset, targets=20, unbounded_limit=32, position_tokens=40)
        assert model.training
    assert results["llama"].replaced[-1].context == results["llama"].by_position[-1].stop == 32
    assert results["slide"].replaced[-1].context == 128
    assert results["llama"].tokens == results["slide"].tokens
    with pytest.raises(ValueError, match="too short: 0 of them have 512 tokens"):
        probe_context(model, dataset, longest=512)
    for wrong in ({"per_document": 0}, {"position_tokens": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            probe_context(model, dataset, targets=20, **wrong)


def test_positions_count_in_windows_that_start_as_rows_of_training_did(tmp_path: Path) -> None:
    data = make_corpus(tmp_path, {"train/1": "abc", "valid/1": "abd cef " * 20, "valid/2": "fed cab " * 20})
    lm = gss.LM(gss.build_model(small_config("llama", vocab_size=257)), load_tokenizer("bytes"), eos_first=True)
    found = probe_context(lm, data, longest=64, targets=20, unbounded_limit=32).by_position
    right, wrong = (gss.evaluate(model, data, [32]).rows[0].by_position for model in (lm, lm.model))
    assert found == right != wrong


def solve(name: str, tokens: list[int], index: int, items: int) -> int:
    """The token at a place, read from those before it."""
    before = tokens[:index]
    if name == "recall":
        keys = before[: 2 * items : 2]
        return before[2 * keys.index(before[-1]) + 1]
    if name == "selective-copying":
        return [token for token in before if token > 1][index - (len(tokens) - items)]
    mark = 10 if name == "passkey" else 15
    return before[before.index(mark) + index - (len(tokens) - items) + 1]


@pytest.mark.parametrize(
    ("name", "items", "length"),
    [
        ("recall", 4, 16),
        ("recall", 64, 512),
        ("recall", 256, 1025),
        ("induction", 1, 4),
        ("induction", 3, 50),
        ("selective-copying", 16, 33),
        ("selective-copying", 5, 100),
        ("passkey", 5, 12),
        ("passkey", 5, 1 << 18),
    ],
)
def test_tasks_can_be_solved(name: str, items: int, length: int) -> None:
    task = make_task(name, items)
    rows = 1 if length > 10_000 else 5
    tokens, mask = task.draw(3, rows, length)
    assert tokens.shape == mask.shape == (rows, length)
    assert 0 <= tokens.min() <= tokens.max() < task.vocabulary
    assert (mask.sum(1) == items).all()
    for row, counted in zip(tokens.tolist(), mask, strict=True):
        asked = np.flatnonzero(counted).tolist()
        assert [solve(name, row, index, items) for index in asked] == [row[index] for index in asked]
    if name == "recall":  # neither the keys nor the order in which they are asked for give anything away
        keys, asked = tokens[:, : 2 * items : 2], tokens[:, :-1][mask[:, 1:]].reshape(rows, items)
        assert (np.diff(keys) < 0).any()
        assert (asked != keys).any()
    again, other = task.draw(3, rows, length), task.draw((3, 1), rows, length)
    assert (again.tokens == tokens).all()
    assert (other.tokens != tokens).any()
    with pytest.raises(ValueError, match="need a length"):
        task.draw(0, 1, 2 * items)


def test_a_task_is_learned_and_tested_longer() -> None:
    config = small_config("gss2", attention={"sliding": None}, width=32)
    task, seen = make_task("induction", vocabulary=4), []
    options: dict[str, Any] = {"length": 8, "steps": 60, "rows": 32, "lengths": [8, 20]}
    result = train_on_task(config, task, report=lambda done, total: seen.append(done), **options)
    assert [row.length for row in result.accuracy] == [8, 20]
    assert result.accuracy[0].accuracy == result.accuracy[0].solved > 0.5  # one in three by chance
    assert result.loss < 1.0
    assert seen == [*range(1, 61)]
    options |= {"steps": 3}
    assert train_on_task(config, task, **options).loss == train_on_task(config, task, **options).loss
    assert task_optimizer(small_config("gss", width=64), 2).embedding_factor == 8  # an embedding of N(0, 1)
    other = task_optimizer(config, 2, "adamw", 1e-3)
    assert train_on_task(config, task, length=8, steps=2, sequences=1, optimizer=other).optimizer == "adamw"


def test_a_curriculum_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    config, task, shapes, read = small_config("gss2"), make_task("recall", 4, 32), [], []

    def spied(self: Stepper, batch: Any, step: int) -> Any:
        shapes.append((*batch.tokens.shape, int(batch.mask.sum())))
        read.append(batch.tokens.tolist())
        return original(self, batch, step)

    original = Stepper.step
    monkeypatch.setattr(Stepper, "step", spied)
    stages = [Stage(1, 4, 6, 2), Stage(2, 24, 1, 1)]
    options: dict[str, Any] = {"length": 16, "rows": 2, "sequences": 1}
    result = train_on_task(config, task, steps=4, curriculum=stages, **options)
    assert shapes == [(6, 4, 6), (6, 4, 6), (1, 24, 2), (2, 16, 8)]
    assert read[0] != read[1]
    assert result.curriculum == tuple(stages)
    assert [row.length for row in result.accuracy] == [16]
    for wrong, message in (
        ([Stage(1, 4, 6, 4)], "takes 4 of 4 steps"),
        ([Stage(1, 4, 0, 1)], "at least 1"),
        ([Stage(3, 4, 1, 1)], "need a length"),
    ):
        with pytest.raises(ValueError, match=message):
            train_on_task(config, task, steps=4, curriculum=wrong, **options)
    assert len(shapes) == 4


def test_stretched_modes_hold_longer() -> None:
    config = small_config("gss2", attention={"sliding": None}, width=32, **{"matrix_state.skip": 0.5})
    space = gss.build_model(config, 0).layers[0].state_space
    before, rate = space.time_constants(), space.rate()
    space.stretch(4.0)
    assert torch.allclose(space.time_constants(), 4 * before)
    assert torch.allclose(space.rate(), rate / 4)
    assert space.skip.tolist() == [0.25] * 2
    task, options = make_task("induction", vocabulary=4), {"length": 8, "steps": 2, "rows": 2, "sequences": 8}
    plain, stretched = (train_on_task(config, task, stretch=stretch, **options) for stretch in (1.0, 1e3))
    assert stretched.loss == plain.loss  # training is the same
    assert (plain.stretch, stretched.stretch) == (1.0, 1e3)
    with pytest.raises(ValueError, match="stretch needs GSS2 layers"):
        train_on_task(small_config("gss"), task, stretch=2.0, **options)
    with pytest.raises(ValueError, match="a positive number, not 0"):
        train_on_task(config, task, stretch=0.0, **options)
    with pytest.raises(ValueError, match="precision must be auto, fp32 or bf16"):  # what it could not be tested in
        train_on_task(config, task, precision="fp8", **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_on_a_gpu() -> None:
    documents = np.random.default_rng(0).integers(0, EOS, (3, 150)).tolist()
    dataset = dataset_from_arrays(documents, vocab_size=EOS + 1, eos_id=EOS)
    model = gss.build_model(small_config("gss"))
    options: dict[str, Any] = {"targets": 20, "precision": "fp32"}
    expected, found = (probe_context(model.to(where), dataset, **options).replaced for where in ("cpu", "cuda"))
    assert [row.loss for row in found] == pytest.approx([row.loss for row in expected], abs=1e-3)
    options = {"length": 64, "steps": 3, "rows": 4, "lengths": [5000], "device": "cuda"}
    result = train_on_task(model.config, make_task("passkey"), **options)
    assert np.isfinite(result.loss)


def test_accuracy_counts_the_targets() -> None:
    task = make_task("passkey", items=5)
    draws = [task.draw((0, 1, 14, first), 4, 14) for first in (0, 4)]
    shares = np.array([(row[-5:] == row[-13:-8]).mean() for draw in draws for row in draw.tokens])
    found = task_accuracy(Echo(64, 8).eval(), task, 14, sequences=8, piece=7, batch_tokens=28)
    assert found.accuracy == pytest.approx(shares.mean())
    assert found.standard_error == pytest.approx(shares.std(ddof=1) / 8**0.5)
    assert found.solved == (shares == 1).mean()


def test_commands_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    data = make_corpus(tmp_path, (f"document {number} says very little. " * 20 for number in range(8)), valid=0.4)
    make_run("gss-tiny", data, tmp_path / "run", steps=2, length=32)
    options = ("--data", data, "--targets", 32, "--shortest", 4, "--longest", 64, "--device", "cpu")
    table = " ".join(call("probe", tmp_path / "run", *options).split())
    assert "true tokens" in table
    assert "going from 4 to 64 true tokens gains" in table
    printed = json.loads(call("probe", "context", tmp_path / "run", *options, "--json"))
    assert json.loads((tmp_path / "run" / "probe.json").read_text()) == printed[0]
    assert [row["context"] for row in printed[0]["replaced"]] == [4, 8, 16, 32, 64]
    assert printed[0]["step"] == 2
    several = call("probe", *[tmp_path / "run"] * 2, shutil.copytree(tmp_path / "run", tmp_path / "again"), *options)
    assert "…" not in several  # a table each, whatever the number of runs
    for row in printed[0]["replaced"]:
        assert several.count(f"{row['loss']:.4f}") >= 2
    page = write_report([tmp_path / "run"], tmp_path / "page.html", max_tokens=0).read_text(encoding="utf-8")
    assert "How far back it looks" in page

    small = ("--set", "depth=1", "--set", "gate_width=8", "--set", "channels=2", "--set", "state_space.modes=2")
    quick = ("--width", 8, *small, "--steps", 2, "--rows", 4, "--device", "cpu")
    task = ("probe", "tasks", "--preset", "gss-tiny", *quick)
    facts = json.loads(call(*task, "--pairs", 4, "--vocabulary", 32, "--length", 16, "--lengths", "32", "--json"))
    assert facts["items"] == 4
    assert facts["model"]["width"] == 8
    assert [row["length"] for row in facts["accuracy"]] == [16, 32]
    more = ("--curriculum", "2:12:3:1", "--set", "optimizer.weight_decay=0.5", "--stretch", 1, "--json")
    facts = json.loads(call(*task, "--task", "passkey", "--length", 20, *more))
    assert facts["curriculum"] == [[2, 12, 3, 1]]
    with pytest.raises(ValueError, match="no field 'weight_dekay'"):
        call(*task, "--set", "optimizer.weight_dekay=0.5")
    with pytest.raises(ValueError, match="--curriculum must be ITEMS:LENGTH:ROWS:STEPS"):
        call(*task, "--curriculum", "2:12:3")
    assert "accuracy" in call(*task, "--task", "passkey", "--length", 20)
    with pytest.raises(ValueError, match="there is no task 'chess'; choose from: " + ", ".join(TASKS)):
        call(*task, "--task", "chess")
