"""Reading a long prompt: tokens a second from the first token to the state and the last logits, beside peers.

bf16 autocast on a GPU, float32 on a CPU. The last logits are checked against the plain float32 ones first.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gss.bench.check import Errors, autocast, limited, paths, relative_error
from gss.bench.foreign import FOREIGN, build_foreign
from gss.bench.measure import intervals, release
from gss.bench.results import Row, missing
from gss.bench.train import reason, resolve_peer
from gss.config import ModelConfig
from gss.generate import read
from gss.model import LanguageModel, build_model
from gss.presets import preset


def bench_prefill(
    *,
    model: str,
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    pieces: Sequence[int] = (),
    peers: Sequence[str] = (),
    compiled: bool = False,
    use_fast: bool = True,
    repeats: int = 10,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows for the preset, read in pieces of each size (default: whole), and for each peer, at each (batch, length)."""
    names = [resolve_peer(peer, model) for peer in peers]
    rows: list[Row] = []
    for batch, length in shapes:
        where = f"{batch}×{length}"
        best = 0.0
        for piece in dict.fromkeys(min(piece, length) for piece in pieces or (length,)):
            report(f"{model} reads {where} in pieces of {piece:,}")
            speed, errors = measure_prefill(model, batch, length, device, piece, compiled, use_fast, repeats)
            best = max(best, speed)
            how = f"pieces of {piece:,}, {'compiled' if compiled else 'eager'}"
            rows.append(Row(f"prefill {model}, {where}", speed, "tokens/s", note=how))
            note = f"{how}, against plain float32; plain {errors.plain:.1e}"
            name = f"error of prefill {model}, {where}"
            rows.append(Row(name, errors.measured, "relative error", errors.limit, note=note))
        for name in names:
            report(f"{name} reads {where}")
            try:
                with paths(use_fast):
                    theirs = measure_peer_prefill(name, preset(model), batch, length, device, repeats)
            except Exception as error:  # a peer that fails is a row that says so
                release(device)
                rows.append(missing(f"prefill {name}, {where}", "tokens/s", reason(error)))
                continue
            rows.append(Row(f"prefill {name}, {where}", theirs, "tokens/s"))
            rows.append(Row(f"prefill {model} over {name}, {where}", best / theirs, "×", None, name, best / theirs))
    return rows


@torch.no_grad()
def measure_prefill(
    name: str, batch: int, length: int, device: torch.device, piece: int, compiled: bool, use_fast: bool, repeats: int
) -> tuple[float, Errors]:
    """Tokens a second of a preset, and how far its last logits are from plain float32 (refused where too far)."""
    release(device)
    torch.manual_seed(0)
    model = build_model(preset(name)).to(device).eval()
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    with paths(use_fast=False):
        exact = read(model, tokens)[0]
        plain = _prefill(model, tokens, piece)
    if compiled:
        for layer in model.layers:
            layer.compile()
    try:
        with paths(use_fast):
            measured = _prefill(model, tokens, piece)
            errors = limited(relative_error(measured, exact), relative_error(plain, exact), device)
            errors.demand("the last logits of the prompt")
            seconds = intervals(lambda: _prefill(model, tokens, piece), repeats, device, warmup=1)
        return tokens.numel() / statistics.median(seconds), errors
    finally:
        release(device)


def _prefill(model: LanguageModel, tokens: Tensor, piece: int) -> Tensor:
    with autocast(tokens.device):
        return read(model, tokens, piece=piece)[0]


@torch.no_grad()
def measure_peer_prefill(
    name: str, like: ModelConfig, batch: int, length: int, device: torch.device, repeats: int
) -> float:
    """Tokens a second of another preset, or of a foreign model, with whatever it keeps to go on from there."""
    release(device)
    torch.manual_seed(0)
    tokens = torch.randint(0, like.vocab_size, (batch, length), device=device)
    try:
        if name in FOREIGN:
            foreign = build_foreign(name, like, length).to(device).eval()

            def run() -> Tensor:
                with autocast(device):
                    return foreign.last_logits(tokens)
        else:
            model = build_model(preset(name, vocab_size=like.vocab_size)).to(device).eval()

            def run() -> Tensor:
                return _prefill(model, tokens, length)

        if not torch.isfinite(run()).all():
            raise ValueError("its logits are not finite")
        return tokens.numel() / statistics.median(intervals(run, repeats, device, warmup=1))
    finally:
        release(device)
