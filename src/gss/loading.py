"""From a run folder to a model that is ready to use."""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from gss.config import ModelConfig, from_mapping
from gss.data import Tokenizer, load_tokenizer
from gss.model import LanguageModel, build_model
from gss.train.checkpoint import load as load_checkpoint
from gss.train.checkpoint import newest_good, step_of


class Loaded(NamedTuple):
    """A trained model and the vocabulary that it was trained with."""

    model: LanguageModel
    tokenizer: Tokenizer
    step: int
    """Of the checkpoint that the weights are from."""


def load(run: str | Path, *, step: int | None = None, device: torch.device | str = "cpu") -> Loaded:
    """The model of a run folder, in evaluation mode: its newest good checkpoint, or the one of a step.

    >>> model, tokenizer, step = gss.load("runs/books")
    """
    folder = Path(run)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.json (`gss train --out` makes one)")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    checkpoints = folder / "checkpoints"
    if step is None:
        path, damaged = newest_good(checkpoints)
        if path is None:
            raise ValueError(f"{folder} has no checkpoint that can be read. {' '.join(damaged)}".strip())
    else:
        path = checkpoints / f"step-{step:08d}"
        if not path.is_dir():
            raise ValueError(f"{folder} has no checkpoint of step {step}: see {checkpoints}")
    model = build_model(from_mapping(ModelConfig, config["model"]))
    model.load_state_dict(load_checkpoint(path).tensors["model"])
    return Loaded(model.to(device).eval(), load_tokenizer(folder / "tokenizer"), step_of(path))
