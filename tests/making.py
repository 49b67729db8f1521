"""Small corpora and runs, run folders without training, and commands called in this process."""

import itertools
import json
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import gss
from gss.cli import app
from gss.config import to_mapping
from gss.data import Dataset, Manifest, Tokenizer, load_tokenizer, prepare
from gss.io.checkpoint import save
from gss.training import resolve, train
from gss.training.step import Stepper

SMALL_MODEL: dict[str, Any] = {
    "model.width": 16,
    "model.depth": 2,
    "model.gate_width": 32,
    "model.channels": 8,
    "model.feedforward_width": 32,
    "model.state_space.modes": 4,
    "model.attention.heads": 2,
}
SMALL = SMALL_MODEL | {"steps": 3, "length": 64, "batch_tokens": 128, "device": "cpu"}
SMALL |= {"report.evaluate_every": 0, "report.sample_every": 0}


def make_corpus(
    folder: Path, texts: Mapping[str, str] | Iterable[str], tokenizer: Tokenizer | None = None, **options: Any
) -> Path:
    """`folder/data`, prepared from texts that are written to `folder/text`: by name, or numbered."""
    named = texts if isinstance(texts, Mapping) else {str(number): text for number, text in enumerate(texts)}
    for name, text in named.items():
        path = folder / "text" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    prepare([str(folder / "text")], folder / "data", tokenizer or load_tokenizer("bytes"), workers=1, **options)
    return folder / "data"


class DatasetInMemory(Dataset):
    """A split without files."""

    def names(self) -> Iterator[str]:
        return map(str, range(len(self)))


def dataset_from_arrays(documents: Sequence[Sequence[int]], *, vocab_size: int, eos_id: int) -> Dataset:
    """A split in memory from each document's ids, without the end-of-document id, which is added here."""
    whole = [np.asarray([*document, eos_id], np.int64) for document in documents]
    ends, unknown = np.cumsum([len(document) for document in whole]), np.zeros(len(whole), np.int64)
    facts = {"split": "train", "folder": Path("in memory"), "manifest": Manifest({}, "")}
    return DatasetInMemory(np.concatenate(whole), ends, unknown, unknown, vocab_size=vocab_size, eos_id=eos_id, **facts)


def make_run(preset: str, data: Path, out: Path, ids: int = 257, **settings: Any) -> Path:
    """A run folder, trained quietly; dots in the names of settings are written as two underscores."""
    train(resolve(preset, None, SMALL | dotted(settings), ids), data, out, quiet=True)
    return out


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in settings.items()}


def save_run(
    model: gss.LanguageModel, folder: Path, tokenizer: Tokenizer | None = None, step: int = 1, **config: Any
) -> Path:
    """A run folder as `gss train` leaves it, as far as loading needs it and a model card tells of it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"preset": "gss-tiny", "model": to_mapping(model.config), **config}))
    (tokenizer or load_tokenizer("bytes")).save(folder / "tokenizer")
    save(folder / "checkpoints", step, {"model": model.state_dict()}, {})
    return folder


def stop_in_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A SIGTERM to this process in one of the next steps of training."""
    original, steps = Stepper.step, itertools.count(1)

    def step(stepper: Stepper, *given: Any) -> Any:
        if next(steps) == number:
            signal.raise_signal(signal.SIGTERM)
        return original(stepper, *given)

    monkeypatch.setattr(Stepper, "step", step)


def call(*arguments: object, **options: Any) -> str:
    """What `gss …` prints, called in this process; its errors are raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout
