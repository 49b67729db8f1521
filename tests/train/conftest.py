"""A small prepared corpus: documents of made-up words, some longer than a row, some much shorter."""

import random
import shutil
from pathlib import Path

import pytest
from train_runs import run, small_config

from tests.making import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen documents of 20 to 400 words over a small vocabulary."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
    texts = {f"{n:02d}": " ".join(draw.choices(words, k=draw.choice([20, 60, 150, 400]))) for n in range(16)}
    return make_corpus(tmp_path_factory.mktemp("corpus"), texts, valid=0.15)


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `small_config()`, 12 steps, which is not written to."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small_config(), corpus, out)
    return out


@pytest.fixture
def resumed(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")
