"""Reading a run folder: configuration, weights and metrics. Also reads folders that `gss export` wrote (weights only).

    config.json        the resolved configuration        environment.json  versions, machine, command
    data.json          which data, by hash               tokenizer/        the vocabulary
    metrics.jsonl      a row per step, and evaluations   samples/          text by step
    checkpoints/       see `checkpoint`

Does not need the training code, and reads only the weights of a checkpoint.
"""

import json
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gss.config import ModelConfig, from_mapping
from gss.io import checkpoint
from gss.io.files import read_json
from gss.model import LanguageModel, NothingDrawn, build_model
from gss.nn.lora import merged
from gss.nn.quantized import expect
from gss.nn.state import ModelState

# Of one sequence: no real model has a state many times as large as its weights.
_STATE_BYTES = 1 << 28
# Characters; no row of metrics comes near it.
_LONGEST_ROW = 1 << 20
EXPORTED = "gss.json"
"""In an exported folder: the step, the configuration and the data of the run, which `transformers` has no place for."""


def read_config(run: Path) -> dict[str, Any]:
    """The contents of a run folder's config.json, which describes at least the model."""
    path = run / "config.json"
    if not path.is_file():
        missing = "it has no config.json" if run.is_dir() else "there is no such folder"
        raise ValueError(f"{run} is not a run folder: {missing} (`gss train --out` makes one)")
    config = read_json(path, object)
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(f"{path} does not describe a run: it has no model")
    if config.get("model_type") == "gss":  # exported for transformers
        config = {**read_exported(run)["config"], **config}
    return config


def read_exported(folder: Path) -> dict[str, Any]:
    """The step, configuration and data of the run that an exported folder comes from, as far as they are recorded."""
    path = folder / EXPORTED
    known = {"step": 0, "config": {}, "data": {}, **read_json(path)}
    step = known["step"]
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**8:
        raise ValueError(f"{path} does not describe a run: its step is {step!r:.40}, not a whole number below 10^8")
    for name in ("config", "data"):
        if not isinstance(known[name], dict):
            raise ValueError(f"{path} does not describe a run: its {name} is {known[name]!r:.40}, not an object")
    return known


def load_model(
    run: Path, config: dict[str, Any], step: int | None = None, mapped: bool = False
) -> tuple[LanguageModel, int]:
    """A run's model in evaluation mode and the step of its weights: the newest intact checkpoint, or that of a step.

    LoRA updates are merged into the weights, and a tuned first state becomes the model's. With `mapped`, weights stay
    in the file, mapped into memory, for a caller that copies them to a GPU anyway.
    """
    path, tensors, step = _exported(run) if config.get("model_type") == "gss" else _newest(run, step)
    described = from_mapping(ModelConfig, config["model"])
    try:
        tensors = merged(tensors)
        first = {name.removeprefix("first."): tensors.pop(name) for name in list(tensors) if name.startswith("first.")}
        if not _fits(described, {name: list(tensor.shape) for name, tensor in tensors.items()}):
            raise ValueError("the sizes differ")
        with NothingDrawn():  # every number is about to be read
            model = build_model(described)
        expect(model, {name: tensor.shape for name, tensor in tensors.items()})
        if mapped:
            own = model.state_dict()
            tensors = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
        model.load_state_dict(tensors, assign=mapped)
        model.start_from(ModelState.from_named(first) if first else None)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} holds no weights of the model that {run / 'config.json'} describes") from error
    return model.eval(), step


def _newest(run: Path, step: int | None) -> tuple[Path, dict[str, Tensor], int]:
    """The checkpoint to use, its weights, and its step."""
    folder = run / "checkpoints"
    if step is None:
        path, damaged = checkpoint.newest_good(folder, [checkpoint.MODEL])
        if path is None:
            what = "; ".join(damaged) or "it has none"
            raise ValueError(f"{run} has no checkpoint that can be read ({what}): restore one, or train again")
        if damaged:
            warnings.warn(f"{'; '.join(damaged)}; using the one before it", stacklevel=4)
    else:
        path = folder / f"step-{step:08d}"
        if not path.is_dir():
            raise ValueError(f"{run} has no checkpoint of step {step}: see {folder}")
    saved = checkpoint.load(path, [checkpoint.MODEL], verified=step is None)
    return path, saved.tensors.get(checkpoint.MODEL, {}), saved.step


def _exported(folder: Path) -> tuple[Path, dict[str, Tensor], int]:
    """The weights in an exported folder, under the names that they have in a run, and the run's step."""
    tensors: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"{folder} has no safetensors weights. Other formats are not read, because unpickling may run code: load "
            "the model where you trust it, and save it again with save_pretrained"
        )
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
        try:
            tensors |= {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
        except SafetensorError as error:
            raise ValueError(f"the weights in {path} cannot be read: {error}") from None
    return folder, tensors, read_exported(folder)["step"]


def _fits(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether weights of these shapes belong to a model, checked before anything of the model's size is allocated.

    A config may claim any size, whereas the header of the weight file gives the actual ones. Sizes that no weight has,
    such as that of a window, show in the state.
    """
    blocks = config.recurrent.blocks if "feedback" in config.kinds else 1
    if max(config.depth * blocks, config.dss_mixers if "dss" in config.kinds else 0) > len(shapes):
        return False  # a layer without a weight
    try:
        with torch.device("meta"), NothingDrawn():
            model = build_model(config)
            expect(model, shapes)
            state = model.initial_state(1).nbytes
    except (AttributeError, RuntimeError, OverflowError, TypeError):  # sizes that no tensor can have
        return False
    found = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    return found == dict(shapes) and state <= max(_STATE_BYTES, 16 * weights)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, up to the first that is malformed, such as one that a kill cut short."""
    rows: list[dict[str, Any]] = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(_LONGEST_ROW):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return rows
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                return rows
            rows.append(row)
    return rows


def training_summary(rows: Sequence[Mapping[str, Any]], batch_tokens: int) -> dict[str, float]:
    """A summary of a run's training rows: seconds of all steps over all starts, median tokens per second, and the mean
    loss of the last twentieth of the steps."""
    speeds = [row["tokens_per_second"] for row in rows]
    return {
        "seconds": sum(batch_tokens / speed for speed in speeds),
        "tokens_per_second": statistics.median(speeds),
        "train_loss": statistics.fmean(row["loss"] for row in rows[-max(1, len(rows) // 20) :]),
    }
