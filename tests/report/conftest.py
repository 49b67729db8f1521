"""Two small runs of one corpus to report on: a hybrid that was evaluated on the way, and a DSS that was not."""

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from gss.data import load_tokenizer, prepare
from gss.training import resolve, train

_SMALL = (
    "model.width=16",
    "model.gate_width=32",
    "model.channels=8",
    "model.feedforward_width=32",
    "model.attention.heads=2",
    "length=32",
    "batch_tokens=128",
    "steps=12",
    "device=cpu",
    "optimizer.warmup_steps=3",
    "report.sample_every=0",
    "report.evaluate_tokens=2000",
    "checkpoint.every=12",
)


class Lab(NamedTuple):
    data: Path
    hybrid: Path
    dss: Path


def write_run(preset: str, data: Path, out: Path, *settings: str) -> Path:
    """Train a few steps quietly."""
    train(resolve(preset, None, [*_SMALL, *settings], 257), data, out, quiet=True)
    return out


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Not to be written to."""
    root = tmp_path_factory.mktemp("lab")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
    (root / "text").mkdir()
    for number in range(12):
        (root / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=draw.choice([60, 400]))))
    prepare([str(root / "text")], root / "data", load_tokenizer("bytes"), valid=0.25, workers=1)
    hybrid = write_run(
        "gss-hybrid-tiny", root / "data", root / "hybrid", "model.attention.chunk=16", "model.state_space.modes=6",
        "model.depth=3", "report.evaluate_every=4", "report.sample_every=12", "report.sample_tokens=20",
    )  # fmt: skip
    dss = write_run(
        "dss-tiny", root / "data", root / "dss", "model.depth=1", "model.state_space.modes=4", "seed=3",
        "report.evaluate_every=0",
    )  # fmt: skip
    return Lab(root / "data", hybrid, dss)


@pytest.fixture
def lab(made: Lab, tmp_path: Path) -> Lab:
    """Copies of the runs, beside the corpus that they name."""
    copies = [shutil.copytree(run, tmp_path / run.name) for run in (made.hybrid, made.dss)]
    return Lab(made.data, *copies)
