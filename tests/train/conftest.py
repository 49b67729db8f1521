"""A small prepared corpus: documents of made-up words, some longer than a row, some much shorter."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gss.data import load_tokenizer, prepare


def write_corpus(folder: Path, seed: int = 0) -> None:
    """Sixteen documents of 20 to 400 words over a small vocabulary."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
    folder.mkdir(parents=True)
    for number in range(16):
        text = " ".join(draw.choices(words, k=draw.choice([20, 60, 150, 400])))
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "text")
    prepare([str(folder / "text")], folder / "data", load_tokenizer("bytes"), valid=0.15, workers=1)
    return folder / "data"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and the order of additions stays the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
