"""A small corpus with its text beside it, models that train in a moment, and results made up for tables."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gss.reproduce import SCALES, TARGETS, Corpus, Trial, find_corpora, planned
from tests.making import SMALL_MODEL, make_corpus

QUICK: dict[str, Any] = SMALL_MODEL | {"length": 64, "batch_tokens": 128}
BOOKS = Corpus("books", Path("books"), 32_000, False, {"tokenizer": "t5"}, 4_778_601, 104_667_316)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of made-up words in lines, one of them longer than 4,096 bytes in each split."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
    sizes = {"train": (1000, 300, 200), "valid": (1100, 150)}
    named = {
        f"{split}/{number}": "\n\n".join("  ".join(draw.choices(words, k=10)) for _ in range(size // 10))
        for split in sizes
        for number, size in enumerate(sizes[split])
    }
    folder = tmp_path_factory.mktemp("reproduce")
    make_corpus(folder, named).rename(folder / "books")
    return folder / "text"


@pytest.fixture(scope="session")
def corpus(texts: Path) -> Corpus:
    return find_corpora([texts.parent / "books"])[0]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quick_trials(corpus: Corpus, *only: str, target: str = "table1", steps: int = 6, **options: Any) -> list[Trial]:
    """Trials of a table that take a fraction of a second each."""
    changes = {**QUICK, "steps": steps}
    return planned(TARGETS[target], SCALES["tiny"], [corpus], only=only, changes=changes, **options)


def made_up(trial: Trial) -> dict[str, Any]:
    """A result with round figures, for tables."""
    return {
        "tokens": trial.tokens,
        "epochs": trial.tokens / trial.corpus.train_tokens,
        "config": {"length": trial.config.length},
        "parameters": 46_349_312,
        "tokens_per_second": 700_000.0,
        "lengths": {at: {"perplexity": 32.0} for at in ("512", "4096", "16384", "whole")},
        "evaluation": {"tokens": 4_778_601, "documents": 50, "precision": "bf16"},
        "hardware": "a GPU",
        "versions": {"torch": "2.11.0"},
        "commit": "abc1234",
    }
