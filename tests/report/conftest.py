"""Two small runs of one corpus to report on: a hybrid that was evaluated on the way, and a DSS that was not."""

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.making import make_corpus, make_run


class Lab(NamedTuple):
    data: Path
    hybrid: Path
    dss: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Not to be written to."""
    root = tmp_path_factory.mktemp("lab")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
    texts = (" ".join(draw.choices(words, k=draw.choice([60, 400]))) for _ in range(12))
    data = make_corpus(root, texts, valid=0.25)
    shared = {"length": 32, "steps": 12, "optimizer__warmup_steps": 3, "report__evaluate_tokens": 2000}
    reports = {"report__evaluate_every": 4, "report__sample_every": 12, "report__sample_tokens": 20}
    sizes = {"model__attention__chunk": 16, "model__state_space__modes": 6, "model__depth": 3}
    hybrid = make_run("gss-hybrid-tiny", data, root / "hybrid", **shared, **sizes, **reports)
    dss = make_run("dss-tiny", data, root / "dss", **shared, model__depth=1, seed=3)
    return Lab(data, hybrid, dss)


@pytest.fixture
def lab(made: Lab, tmp_path: Path) -> Lab:
    """Copies of the runs, beside the corpus that they name."""
    copies = [shutil.copytree(run, tmp_path / run.name) for run in (made.hybrid, made.dss)]
    return Lab(made.data, *copies)
