"""What a model is, as plain data: its sizes, what a sequence costs, and how long its layers remember."""

from typing import Any

import torch
from torch import Tensor

from gss.config import to_mapping
from gss.data import Tokenizer
from gss.model import LanguageModel
from gss.nn.state_space import DiagonalStateSpace
from gss.serve.limits import Limits

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS_A_DECADE = 4


def describe(
    model: LanguageModel,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    name: str,
    preset: str | None,
    step: int,
    rows: int,
    precision: str,
) -> dict[str, Any]:
    """The facts that `GET /v1/model` answers with."""
    config = model.config
    parameter = next(model.parameters())
    kind = torch.bfloat16 if precision == "bf16" else parameter.dtype
    state = model.initial_state(1)
    return {
        "id": name,
        "preset": preset,
        "step": step,
        "layers": list(config.layers),
        "width": config.width,
        "depth": len(config.layers),
        "vocab_size": config.vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": str(kind).removeprefix("torch."),
        "device": parameter.device.type,
        "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id},
        "state": {
            "bounded": model.bounded_state,
            "bytes_per_sequence": state.nbytes,
            "bytes_per_token": _growth(model),
        },
        "transformer": {
            "kv_cache_bytes_per_token": 2 * len(config.layers) * config.width * kind.itemsize,
            "about": "keys and values of every layer of a Transformer of this width and depth, at this precision",
        },
        "time_constants": time_constants(model),
        "limits": {
            "prompt_tokens": limits.prompt_tokens,
            "max_tokens": limits.max_tokens,
            "n": min(limits.n, rows),
            "sequences": min(limits.sequences, rows + limits.queue),
            "logprobs": limits.logprobs,
            "stop": limits.stop,
            "stop_characters": limits.stop_characters,
            "seconds": limits.seconds,
            "batch": rows,
            "queue": limits.queue,
        },
        "config": to_mapping(config),
    }


@torch.no_grad()
def time_constants(model: LanguageModel) -> dict[str, Any]:
    """How many tokens the modes of each state space take to decay by e: −1/Re log Ā, by layer.

    `edges` are the bounds of the bins in tokens; the first and the last bin hold what lies beyond too.
    """
    spaces = [
        (number, name, module)
        for number, layer in enumerate(model.sequence_layers())
        for name, module in layer.named_modules()
        if isinstance(module, DiagonalStateSpace)
    ]
    constants = [(number, name, _constants(space)) for number, name, space in spaces]
    if not constants:
        return {"unit": "tokens", "edges": [], "layers": []}
    everything = torch.cat([values for *_, values in constants])
    low = int(everything.min().log10().floor().clamp(-2, 12))
    high = int(everything.max().log10().ceil().clamp(low + 1, 13))
    edges = torch.logspace(low, high, (high - low) * _BINS_A_DECADE + 1, dtype=torch.float64)
    levels = torch.tensor(_QUANTILES, dtype=torch.float64)
    return {
        "unit": "tokens",
        "edges": [float(f"{edge:.4g}") for edge in edges.tolist()],
        "layers": [
            {
                "layer": number,
                "name": name,
                "modes": len(values),
                "quantiles": dict(zip(map(str, _QUANTILES), _quantiles(values, levels), strict=True)),
                "histogram": _histogram(values, edges),
            }
            for number, name, values in constants
        ],
    }


def _constants(space: DiagonalStateSpace) -> Tensor:
    return space.time_constants().cpu().clamp(1e-3, 1e15)


def _quantiles(values: Tensor, levels: Tensor) -> list[float]:
    ordered = values.sort().values
    index = (levels * (len(ordered) - 1)).round().long()
    return [float(f"{value:.4g}") for value in ordered[index].tolist()]


def _histogram(values: Tensor, edges: Tensor) -> list[int]:
    bins = torch.bucketize(values, edges[1:-1])
    return torch.bincount(bins, minlength=len(edges) - 1).tolist()


def _growth(model: LanguageModel) -> int:
    """Bytes by which a token makes the state larger: 0 where it is bounded."""
    slots = [slot for layer in model.sequence_layers() for slot in layer.state_slots().values()]
    size = 8 if next(model.parameters()).dtype == torch.float64 else 4
    total = 0
    for slot in slots:
        if None in slot.shape:
            scalars = 1
            for each in slot.shape:
                scalars *= each or 1
            total += scalars * size
    return total
