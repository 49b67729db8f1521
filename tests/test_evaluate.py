"""Perplexity by length: window arithmetic on integers, and scores against a plain loop."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import gss
from gss.data import Dataset
from gss.evaluation import evaluate, reachable_lengths, windows
from gss.scoring import token_scores
from tests.comparing import relative_error
from tests.conftest import ALL_FAMILIES, small_config
from tests.making import dataset_from_arrays, make_corpus, make_run

EOS = 60


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.one_of(st.none(), st.integers(1, 60)))
def test_each_target_once(lengths: list[int], length: int | None) -> None:
    covered = [(w.document, i) for w in windows(lengths, length) for i in range(w.start, w.stop)]
    assert sorted(covered) == [(document, i) for document, total in enumerate(lengths) for i in range(total)]
    assert len(covered) == len(set(covered))
    assert all(w.stop - w.start <= (length or 50) for w in windows(lengths, length))


@pytest.fixture
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, EOS, (n,), generator=generator).tolist() for n in (90, 33, 1, 64)]
    return dataset_from_arrays(documents, vocab_size=61, eos_id=EOS)


def plain_losses(
    model: gss.LanguageModel, dataset: Dataset, length: int | None, eos_first: bool = False
) -> list[list[float]]:
    """The losses of every document's targets, window by window, from whole forwards."""
    result = []
    for document in dataset.documents():
        ids, losses = document.tokens.tolist(), []
        size = length or len(ids)
        for start in range(0, len(ids), size):
            targets = ids[start : start + size]
            inputs = [ids[start - 1] if start and not eos_first else EOS, *targets[:-1]]
            logits = model(torch.tensor([inputs]))[0][0]
            losses += F.cross_entropy(logits, torch.tensor(targets), reduction="none").tolist()
        result.append(losses)
    return result


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("length", [1, 7, 32, 65, None])
def test_agrees_with_a_plain_loop(family: str, length: int | None, dataset: Dataset) -> None:
    model = gss.build_model(small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {})).double()
    expected = plain_losses(model, dataset, length)
    for piece, batch_tokens in ((4096, 1), (9, 40)):  # whole windows one by one; pieces of several side by side
        row = evaluate(model, dataset, [length], piece=piece, batch_tokens=batch_tokens).rows[0]
        total = sum(map(sum, expected))
        assert row.tokens == 192
        assert row.perplexity == pytest.approx(math.exp(total / 192), rel=1e-6)
        by_position = sum(part.loss * part.tokens for part in row.by_position)
        assert by_position == pytest.approx(total, rel=1e-9)
        assert sum(part.tokens for part in row.by_position) == 192


def test_windows_start_as_rows_of_training_did(dataset: Dataset) -> None:
    model = gss.build_model(small_config("gss")).double()
    found = {
        eos_first: evaluate(model, dataset, [32], eos_first=eos_first).rows[0].loss for eos_first in (False, True, None)
    }
    for eos_first in (False, True):
        losses = [loss for document in plain_losses(model, dataset, 32, eos_first) for loss in document]
        assert found[eos_first] == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert found[None] == found[False] != found[True]


def test_a_run_says_how_its_rows_started(tmp_path: Path) -> None:
    data = make_corpus(tmp_path, {"train/1": "abc def " * 40, "valid/1": "abd cef " * 40})
    for eos_first in (False, True):
        lm = gss.load(make_run("gss-tiny", data, tmp_path / str(eos_first), eos_first=eos_first))
        assert lm.eos_first is eos_first
        by_lm, by_model = (
            evaluate(model, data, [64], eos_first=given) for model, given in ((lm, None), (lm.model, eos_first))
        )
        assert by_lm == by_model


def test_positions_words_bytes_and_errors(dataset: Dataset) -> None:
    dataset.document_words = np.array([10, 5, 1, 4])
    dataset.document_bytes = np.array([400, 150, 1, 200])
    model = gss.build_model(small_config("gss")).double()
    row = evaluate(model, dataset, [None]).rows[0]
    losses = plain_losses(model, dataset, None)
    nats = [sum(document) for document in losses]
    assert row.word_perplexity == pytest.approx(math.exp(sum(nats) / 20))
    assert row.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / 751)
    second = next(part for part in row.by_position if part.start == 2)
    wanted = [loss for document in losses for loss in document[2:4]]
    assert (second.stop, second.tokens) == (4, len(wanted))
    assert second.loss == pytest.approx(sum(wanted) / len(wanted))
    counts = [len(document) for document in losses]
    mean = sum(nats) / sum(counts)
    residuals = [n - c * mean for n, c in zip(nats, counts, strict=True)]
    assert row.standard_error == pytest.approx(math.sqrt(4 / 3 * sum(r * r for r in residuals)) / sum(counts))


def test_a_limit_cuts_the_same_targets_for_every_length(dataset: Dataset) -> None:
    dataset.document_words = np.array([10, 17, 1, 4])
    dataset.document_bytes = np.array([400, 170, 1, 200])
    model = gss.build_model(small_config("gss")).double()
    result = evaluate(model, dataset, [8, 32, None], max_tokens=100)
    assert [row.tokens for row in result.rows] == [100, 100, 100]
    assert result.documents == 2
    expected = plain_losses(model, dataset, 8)
    assert result.rows[0].loss * 100 == pytest.approx(sum(expected[0]) + sum(expected[1][:9]))  # 91 with its eos
    nats = result.rows[0].loss * 100
    assert result.rows[0].word_perplexity == pytest.approx(math.exp(nats / (10 + 17 * 9 / 34)))
    assert result.rows[0].bits_per_byte == pytest.approx(nats / math.log(2) / (400 + 170 * 9 / 34))


def test_default_lengths_are_those_that_a_model_reaches() -> None:
    dataset = dataset_from_arrays([[1] * 70_000, [1] * 600], vocab_size=61, eos_id=EOS)
    bounded, growing = (gss.build_model(small_config(family)) for family in ("gss", "llama"))
    assert reachable_lengths(bounded, dataset, None) == [512, 4096, 16_384, 65_536]
    assert reachable_lengths(bounded, dataset, 5000) == [512, 4096]
    assert reachable_lengths(bounded, dataset, 300) == [300]
    assert reachable_lengths(growing, dataset, None) == reachable_lengths(growing, dataset, None, 512) == [512, 4096]
    assert reachable_lengths(growing, dataset, None, 16_384) == [512, 4096, 16_384]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_carried_documents_equal_whole_forwards_in_float32(family: str) -> None:
    tokens = torch.randint(0, EOS, (1500,))
    dataset = dataset_from_arrays([tokens.tolist()], vocab_size=61, eos_id=EOS)
    model = gss.build_model(small_config(family))
    loss = evaluate(model, dataset, [None], piece=97).rows[0].loss
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor([EOS]), tokens])[None])[0][0]
    expected = F.cross_entropy(logits, torch.cat([tokens, torch.tensor([EOS])]))
    assert relative_error(torch.tensor(loss), expected) < 1e-4


@torch.no_grad()
def test_scores_of_narrow_logits_are_added_up_in_float32() -> None:
    model = gss.build_model(small_config("gss")).bfloat16()
    hidden, targets = torch.randn(50, 16).bfloat16(), torch.randint(0, 61, (50,))
    scores, likeliest = token_scores(model, hidden, targets)
    logits = model.logits(hidden).double()
    assert torch.allclose(scores, logits.log_softmax(-1)[range(50), targets], rtol=0, atol=1e-5)
    assert torch.equal(likeliest, logits.argmax(-1) == targets)


def test_leaves_the_model_as_it_was(dataset: Dataset) -> None:
    """In training or not; its dropout is off either way."""
    model = gss.build_model(small_config("gss2", dropout=0.5))
    losses, seen = set(), []
    for training in (True, False):
        model.train(training)
        losses.add(evaluate(model, dataset, [91], report=lambda *counts: seen.append(counts)).rows[0].loss)
        assert model.training == training
    assert len(losses) == 1
    assert seen[-1] == (192, 192)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [92]}, "no document is as long as 92 tokens"),
        ({"lengths": [0]}, "at least 1"),
        ({"lengths": []}, "no lengths"),
        ({"lengths": [8], "max_tokens": 0}, "max_tokens"),
        ({"lengths": [8], "piece": 0}, "piece"),
        ({"lengths": [8], "precision": "fp8"}, "fp32 or bf16"),
    ],
)
def test_bad_input(arguments: dict, message: str, dataset: Dataset) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(gss.build_model(small_config("gss")), dataset, **arguments)


def test_broken_weights(dataset: Dataset) -> None:
    model = gss.build_model(small_config("gss"))
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        evaluate(model, dataset, [8])
