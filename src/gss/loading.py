"""From a run folder, or the model in the box, to a model that is ready to use; states to files and back."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gss import box
from gss.config import ModelConfig, from_mapping
from gss.data import Tokenizer, load_tokenizer
from gss.model import LanguageModel, build_model
from gss.nn.state import ModelState
from gss.train.checkpoint import load as load_checkpoint
from gss.train.checkpoint import newest_good, step_of


def save_state(state: ModelState, path: str | Path) -> None:
    """Keep a state in a safetensors file: a long document is read once, and gone on from as often as wanted."""
    target = Path(path)
    aside = target.with_name(target.name + ".tmp")
    save_file({name: tensor.contiguous().cpu() for name, tensor in state.named().items()}, aside)
    aside.replace(target)


def load_state(path: str | Path, device: torch.device | str = "cpu") -> ModelState:
    """A state that `save_state` kept. The model that goes on from it checks that it is its own."""
    try:
        return ModelState.from_named(load_file(Path(path))).to(device)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} does not hold a model's state: {error}") from None


class Loaded(NamedTuple):
    """A trained model and the vocabulary that it was trained with."""

    model: LanguageModel
    tokenizer: Tokenizer
    step: int
    """Of the checkpoint that the weights are from."""
    preset: str | None
    """Name of the preset that the model started from; None where that is not known."""


def load(run: str | Path | None = None, *, step: int | None = None, device: torch.device | str = "cpu") -> Loaded:
    """The model of a run folder, in evaluation mode: its newest good checkpoint, or the one of a step.

    Without a run it is the model that comes with the package. Weights kept in bf16, as its are, become float32.

    >>> model, tokenizer, *_ = gss.load("runs/books")
    """
    folder = box.folder() if run is None else Path(run)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.json (`gss train --out` makes one)")
    config = _read_config(folder / "config.json")
    checkpoints = folder / "checkpoints"
    if step is None:
        path, damaged = newest_good(checkpoints)
        if path is None:
            what = "; ".join(damaged) or "it has none"
            raise ValueError(f"{folder} has no checkpoint that can be read ({what}): restore one, or train again")
        if damaged:
            warnings.warn(f"{'; '.join(damaged)}; using the one before it", stacklevel=2)
    else:
        path = checkpoints / f"step-{step:08d}"
        if not path.is_dir():
            raise ValueError(f"{folder} has no checkpoint of step {step}: see {checkpoints}")
    model = build_model(from_mapping(ModelConfig, config["model"]))
    tensors = load_checkpoint(path).tensors
    try:
        model.load_state_dict(tensors["model"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{path} holds no weights of the model that {folder / 'config.json'} describes") from error
    return Loaded(model.to(device).eval(), load_tokenizer(folder / "tokenizer"), step_of(path), config.get("preset"))


def _read_config(path: Path) -> dict[str, Any]:
    """What a run folder's config.json says, the model at least."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(f"{path} does not describe a run: it has no model")
    return config
