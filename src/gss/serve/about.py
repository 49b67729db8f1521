"""About a server: its limits and its model, as plain data."""

from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor

from gss.accounting import account
from gss.config import to_mapping
from gss.model import LanguageModel
from gss.nn.state_space import StateSpace
from gss.serve.engine import EngineThread

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS_PER_DECADE = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what one request, or all requests together, may use.

    A request beyond a limit gets an error that names the limit, at almost no cost.
    """

    body_bytes: int = 4 << 20  # largest body of a request (413)
    prompt_tokens: int = 131_072  # longest prompt; also all prompts times `n`, echoed with logprobs (400)
    max_tokens: int = 4096  # most tokens to produce (400)
    n: int = 16  # most continuations of one prompt (400)
    sequences: int = 64  # most continuations in one request, but no more than can run and wait (400)
    logprobs: int = 20  # most alternatives per token (400)
    stop: int = 8  # most stop strings (400)
    stop_characters: int = 256  # longest stop string (400)
    seconds: float = 300.0  # longest time for a request (408)
    body_seconds: float = 30.0  # longest time for a body to arrive (408)
    queue: int = 256  # sequences that may wait for a place in the batch (429)
    scores: int = 262_144  # most log-probabilities in one response, alternatives included (400)
    all_scores: int = 1 << 20  # most in all responses in progress: beyond, requests for over 8,192 are refused (429)
    connections: int = 2048  # beyond, the connection that has been idle longest is closed
    header_seconds: float = 15.0  # time to complete a request's headers: beyond, the connection is closed
    send_seconds: float = 30.0  # time in which a client must read something: beyond, the connection is closed
    bodies_bytes: int = 256 << 20  # most in all bodies in progress: beyond, bodies over 64 KiB are refused (503)
    unread_bytes: int = 256 << 20  # most unread data of all clients: beyond, those with the most are closed

    def __post_init__(self) -> None:
        for field in fields(self):
            value, zero = getattr(self, field.name), field.name in ("queue", "logprobs", "stop")  # which may be 0
            if not (value > 0 or (zero and value == 0)):
                raise ValueError(f"the limit {field.name} must be {'at least' if zero else 'over'} 0, not {value}")


def describe(engine: EngineThread, limits: Limits, *, name: str, preset: str | None, step: int) -> dict[str, Any]:
    """The response of `GET /v1/model`."""
    model, tokenizer, rows = engine.model, engine.tokenizer, engine.rows
    config = model.config
    parameter = next(model.parameters())
    kind = torch.bfloat16 if engine.precision == "bf16" else parameter.dtype
    slots = [slot for layer in model.sequence_layers() for slot in layer.state_slots().values()]
    growth = sum(prod(each or 1 for each in slot.shape) for slot in slots if None in slot.shape)  # numbers per token
    of_connections = ("body_seconds", "connections", "header_seconds", "send_seconds")
    told = {n: value for n, value in asdict(limits).items() if n not in of_connections and not n.endswith("_bytes")}
    return {
        "id": name,
        "preset": preset,
        "step": step,
        "layers": list(config.layers),
        "width": config.width,
        "depth": len(config.layers),
        "vocab_size": config.vocab_size,
        "parameters": account(config).parameters,
        "precision": str(kind).removeprefix("torch."),
        "device": parameter.device.type,
        "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id},
        "state": {
            "bounded": model.bounded_state,
            "bytes_per_sequence": model.initial_state(1).nbytes,
            "bytes_per_token": growth * (8 if parameter.dtype == torch.float64 else 4),
        },
        "transformer": {
            "kv_cache_bytes_per_token": 2 * len(config.layers) * config.width * kind.itemsize,
            "about": "keys and values of every layer of a Transformer of this width and depth, at this precision",
        },
        "time_constants": time_constants(model),
        "limits": {
            **told,
            "n": min(limits.n, rows),
            "sequences": min(limits.sequences, rows + limits.queue),
            "batch": rows,
        },
        "config": to_mapping(config),
    }


@torch.no_grad()
def time_constants(model: LanguageModel) -> dict[str, Any]:
    """Time constants by layer: the tokens that each mode takes to decay to 1/e, −1/Re log Ā.

    `edges` are the bounds of the bins in tokens; the first and last bins include everything beyond them.
    """
    constants = [
        (number, name, module.time_constants().cpu().clamp(1e-3, 1e15))
        for number, layer in enumerate(model.sequence_layers())
        for name, module in layer.named_modules()
        if isinstance(module, StateSpace)
    ]
    if not constants:
        return {"unit": "tokens", "edges": [], "layers": []}
    everything = torch.cat([values for *_, values in constants])
    low = int(everything.min().log10().floor().clamp(-2, 12))
    high = int(everything.max().log10().ceil().clamp(low + 1, 13))
    edges = torch.logspace(low, high, (high - low) * _BINS_PER_DECADE + 1, dtype=torch.float64)
    levels = torch.tensor(_QUANTILES, dtype=torch.float64)
    return {
        "unit": "tokens",
        "edges": _rounded(edges),
        "layers": [
            {
                "layer": number,
                "name": name,
                "modes": len(values),
                "quantiles": dict(
                    zip(map(str, _QUANTILES), _rounded(values.quantile(levels, interpolation="nearest")), strict=True)
                ),
                "histogram": torch.bincount(torch.bucketize(values, edges[1:-1]), minlength=len(edges) - 1).tolist(),
            }
            for number, name, values in constants
        ],
    }


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
