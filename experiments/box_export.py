"""From a run to a folder that ships: the newest weights with matrices in bf16, the vocabulary, no optimizer.

The result is a run folder, so that everything that reads runs reads it: `gss.load`, the commands, `gss export`.
State-space parameters, norms and biases stay in float32: they are 1.5% of a model of the box's size, and the rates
and frequencies among them stand in exponents, where bf16's 8 bits would move a mode's phase by a radian in a few
hundred tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.box_card import card
from gss.io.checkpoint import save
from gss.io.files import read_json, require_new, write_file, write_json, written_folder
from gss.lm import load
from gss.model import LanguageModel
from gss.training.optim import DECAYED, EMBEDDING, TABLE, group_of_parameters

MOST_BYTES = 16_000_000
"""All files of the folder together may not be larger."""
CARD, FACTS = "card.md", "box.json"
"""The card for people, and the figures that it is made from."""


def rounded(model: LanguageModel) -> dict[str, Tensor]:
    """The model's weights as they ship: matrices in bf16, all else as it is."""
    matrices = {name for name, group in group_of_parameters(model).items() if group in (DECAYED, TABLE, EMBEDDING)}
    return {
        name: tensor.to(torch.bfloat16) if name in matrices else tensor for name, tensor in model.state_dict().items()
    }


def write_box(run: str | Path, out: str | Path, *, step: int | None = None) -> Path:
    """Write the model of a run to a new or empty folder, whole or not at all; the card comes with `write_card`."""
    source, target = Path(run), Path(out)
    require_new(target)
    model, tokenizer, step, _ = load(source, step=step)
    if not tokenizer.lossless:
        raise ValueError(f"the vocabulary of {source} loses {', '.join(tokenizer.losses)}: the box has a lossless one")
    with written_folder(target) as aside:
        save(aside / "checkpoints", step, {"model": rounded(model)}, {"step": step, "box": True})
        tokenizer.save(aside / "tokenizer")
        _copy_json(source / "config.json", aside / "config.json", without=())
        _copy_json(source / "data.json", aside / "data.json", without=("folder",))  # a path of the training machine
        check_size(aside)
    return target


def write_card(box: str | Path, facts: dict[str, Any]) -> Path:
    """Write the card and the figures that it is made from into the folder."""
    target = Path(box)
    text = card(facts)  # refuses facts that are not complete, before anything is written
    write_file(target / FACTS, json.dumps(facts, indent=1) + "\n")
    write_file(target / CARD, text)
    check_size(target)
    return target / CARD


def folder_size(folder: str | Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def check_size(folder: str | Path) -> None:
    """Refuse a folder that is too large to ship."""
    size = folder_size(folder)
    if size > MOST_BYTES:
        raise ValueError(
            f"the box would have {size:,} bytes, more than the {MOST_BYTES:,} that it may have: "
            "take a smaller model or vocabulary"
        )


def _copy_json(source: Path, target: Path, without: tuple[str, ...]) -> None:
    if source.is_file():
        write_json(target, {name: value for name, value in read_json(source).items() if name not in without})
