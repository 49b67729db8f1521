"""Reading a run folder: its config, its weights, its metrics; and states, to files and back.

    config.json        the resolved configuration        environment.json  versions, machine, command
    data.json          which data, by hash               tokenizer/        the vocabulary
    metrics.jsonl      a row per step, and evaluations   samples/          text by step
    checkpoints/       see `checkpoint`

Needs nothing of training, and reads no more of a checkpoint than the weights.
"""

import json
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from gss.config import ModelConfig, from_mapping
from gss.io import checkpoint
from gss.io.files import read_json, written_file
from gss.model import LanguageModel, build_model
from gss.nn.state import ModelState

# Of one sequence: a state many times as large as the weights is no model's.
_STATE_BYTES = 1 << 28
# Characters; rows of metrics are never near it.
_LONGEST_ROW = 1 << 20


def read_config(run: Path) -> dict[str, Any]:
    """What a run folder's config.json says, the model at least."""
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.json (`gss train --out` makes one)")
    config = read_json(path, object)
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(f"{path} does not describe a run: it has no model")
    return config


def load_model(run: Path, config: dict[str, Any], step: int | None = None) -> tuple[LanguageModel, int]:
    """A run's model in evaluation mode, and the step of its weights: the newest good ones, or those of a step."""
    folder = run / "checkpoints"
    if step is None:
        path, damaged = checkpoint.newest_good(folder, [checkpoint.MODEL])
        if path is None:
            what = "; ".join(damaged) or "it has none"
            raise ValueError(f"{run} has no checkpoint that can be read ({what}): restore one, or train again")
        if damaged:
            warnings.warn(f"{'; '.join(damaged)}; using the one before it", stacklevel=3)
    else:
        path = folder / f"step-{step:08d}"
        if not path.is_dir():
            raise ValueError(f"{run} has no checkpoint of step {step}: see {folder}")
        checkpoint.verify(path, [checkpoint.MODEL])
    described = from_mapping(ModelConfig, config["model"])
    if not _fits(described, checkpoint.shapes(path, checkpoint.MODEL)):
        raise ValueError(f"{path} holds no weights of the model that {run / 'config.json'} describes")
    saved = checkpoint.load(path, [checkpoint.MODEL], verified=True)
    model = build_model(described)
    model.load_state_dict(saved.tensors[checkpoint.MODEL])
    return model.eval(), saved.step


def _fits(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether weights of these shapes are a model's, found out before anything of the model's size is made.

    A config may name any sizes; the header of the weights' file names those that are there. Sizes that no weight has,
    such as a window's, show in the state.
    """
    blocks = config.recurrent.blocks if "feedback" in config.kinds else 1
    if max(config.depth * blocks, config.dss_mixers if "dss" in config.kinds else 0) > len(shapes):
        return False  # a layer without a weight
    try:
        with torch.device("meta"), _NothingDrawn():
            model = build_model(config)
            state = model.initial_state(1).nbytes
    except (RuntimeError, OverflowError, TypeError):  # sizes that no tensor can have
        return False
    found = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return found == dict(shapes) and state <= max(_STATE_BYTES, 16 * weights)


class _NothingDrawn(TorchFunctionMode):
    """Tensors without storage have no values to draw; torch would import its compiler to draw none."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "").endswith(("normal_", "uniform_")):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; one that is not a row, as when a kill cut it short, ends them."""
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
    """What a run's rows of training say: the seconds of its steps over all starts, the median of their tokens per
    second, and the mean loss of the last twentieth of them."""
    speeds = [row["tokens_per_second"] for row in rows]
    return {
        "seconds": sum(batch_tokens / speed for speed in speeds),
        "tokens_per_second": statistics.median(speeds),
        "train_loss": statistics.fmean(row["loss"] for row in rows[-max(1, len(rows) // 20) :]),
    }


def save_state(state: ModelState, path: str | Path) -> None:
    """Keep a state in a safetensors file: a long document is read once and continued as often as wanted.

    >>> lm = gss.load(run)
    >>> gss.save_state(lm.read("Once upon a time"), folder / "state.safetensors")
    >>> state = gss.load_state(folder / "state.safetensors")
    >>> text = lm.generate(" there was", state=state, max_tokens=10)
    """
    with written_file(path) as aside:
        save_file({name: tensor.contiguous().cpu() for name, tensor in state.named().items()}, aside)


def load_state(path: str | Path, device: torch.device | str = "cpu") -> ModelState:
    """A state that `save_state` kept. The model that continues from it checks that it is its own.

    >>> gss.save_state(gss.load(run).read("Once"), folder / "once.safetensors")
    >>> gss.load_state(folder / "once.safetensors").position
    tensor([5])
    """
    try:
        return ModelState.from_named(load_file(Path(path))).to(device)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} does not hold a model's state: {error}") from None
