"""Decoding a token at a time: tokens a second after contexts of several lengths, beside what else is there.

Greedy, through the decoder that `gss generate` and the server use. Correctness comes first: where the decoder's logits
are not the model's own, nothing is reported.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gss.bench.check import Errors, autocast, limited, paths, relative_error
from gss.bench.foreign import FOREIGN, build_foreign
from gss.bench.measure import median_seconds, release
from gss.bench.results import Row, missing
from gss.bench.train import reason, resolve_peer
from gss.config import ModelConfig
from gss.decode import BLOCK, Decoder, decoder
from gss.generate import read
from gss.model import LanguageModel, build_model
from gss.nn.state import ModelState
from gss.presets import preset


@torch.no_grad()
def bench_decode(
    *,
    model: str,
    device: torch.device,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (1024, 4096, 16_384, 65_536),
    peers: Sequence[str] = (),
    peer_context: int = 4096,
    use_fast: bool = True,
    repeats: int = 5,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows for the preset after every context at batch 1, at the other batches after the shortest, and for each peer.

    One of our own families as a peer (a Transformer with its cache) reads as much as a foreign one: `peer_context`.
    """
    names = [resolve_peer(peer, model) for peer in peers]
    with paths(use_fast):
        torch.manual_seed(0)
        subject = build_model(preset(model)).to(device).eval()
        report("checking the decoder against the model")
        errors = check_decoding(subject)
        note = f"logits against plain float64; plain {errors.plain:.1e}"
        rows = [Row(f"error of decode {model}", errors.measured, "relative error", errors.limit, note=note)]
        asked = sorted({*contexts, peer_context} if names else set(contexts))
        plan = [(1, context) for context in asked] + [(batch, asked[0]) for batch in batches if batch != 1]
        rounds: dict[tuple[int, int], Round] = {}
        notes = {}
        for batch, context in plan:
            report(f"{model} reads {batch}×{context:,} tokens")
            state = _state(subject, batch, context)
            notes[batch, context] = f"state {state.nbytes / batch / 2**20:,.1f} MiB a sequence"
            rounds[batch, context] = _round(subject, state)
        report("decoding in turns")
        runs = {key: round.run for key, round in rounds.items()}
        seconds = {key: total / rounds[key].tokens for key, total in median_seconds(runs, repeats).items()}
        for (batch, context), taken in seconds.items():
            name = f"decode {model}, batch {batch}, context {context:,}"
            rows.append(Row(name, batch / taken, "tokens/s", note=notes[batch, context]))
        alone = [seconds[1, context] for context in asked]
        if len(asked) > 1:
            name = f"decode {model}, a token after {asked[0]:,} → {asked[-1]:,}"
            rows.append(
                Row(name, max(alone) / min(alone), "× as long", 1.05, note="the slowest context over the fastest")
            )
        del runs, rounds, subject, state
        for name in names:
            report(f"{name} decodes after {peer_context:,} tokens")
            rows += _peer_rows(name, model, peer_context, 1 / seconds[1, peer_context], device, repeats)
    return rows


def check_decoding(model: LanguageModel) -> Errors:
    """How far decoded logits are from the model's own in float64; refused where too far."""
    device = model.embedding.weight.device
    tokens = torch.randint(0, model.config.vocab_size, (2, 3 * BLOCK + 41), device=device)
    first = BLOCK + 17
    _, state = read(model, tokens[:, :first])
    with autocast(device):
        going_on = decoder(model, state)
        stepped = torch.stack([going_on.step(tokens[:, i]) for i in range(first, tokens.shape[1])], dim=1)
    with paths(use_fast=False):
        with autocast(device):
            plain = model(tokens)[0][:, first:]
        twin = build_model(model.config).to(device).double()
        twin.load_state_dict(model.state_dict())
        exact = twin(tokens)[0][:, first:]
    errors = limited(relative_error(stepped, exact), relative_error(plain, exact), device)
    return errors.demand("decoded logits")


def _state(model: LanguageModel, batch: int, context: int) -> ModelState:
    device = model.embedding.weight.device
    tokens = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    with autocast(device):
        return read(model, tokens)[1]


class Round(NamedTuple):
    """A timed piece of decoding: `run` decodes `tokens` tokens of each row greedily and waits for them."""

    run: Callable[[], None]
    tokens: int


def _round(model: LanguageModel, state: ModelState) -> Round:
    """Whole blocks, so that folding them into the state is in the time; several where a graph makes them short."""
    device = model.embedding.weight.device
    token = torch.zeros(state.batch, dtype=torch.int64, device=device)
    with autocast(device):
        going_on = decoder(model, state)
    count = BLOCK if isinstance(going_on, Decoder) else 8 * BLOCK

    def run() -> None:
        nonlocal token
        with autocast(device):
            if isinstance(going_on, Decoder):
                for _ in range(count):
                    token = going_on.step(token).argmax(-1)
            else:
                token = going_on.greedy(token, count)[:, -1]
        token.cpu()

    return Round(run, count)


def _peer_rows(name: str, model: str, context: int, ours: float, device: torch.device, repeats: int) -> list[Row]:
    where = f"batch 1, context {context:,}"
    try:
        theirs = _peer_speed(name, preset(model), context, device, repeats)
    except Exception as error:  # a peer that fails is a row that says so
        return [missing(f"decode {name}, {where}", "tokens/s", reason(error))]
    finally:
        release(device)
    return [
        Row(f"decode {name}, {where}", theirs, "tokens/s", note="recomputes" if name == "pypi-gss" else ""),
        Row(f"decode {model} over {name}, {where}", ours / theirs, "×", None, name, ours / theirs),
    ]


def _peer_speed(name: str, like: ModelConfig, context: int, device: torch.device, repeats: int) -> float:
    release(device)
    torch.manual_seed(0)
    if name not in FOREIGN:
        other = build_model(preset(name, vocab_size=like.vocab_size)).to(device).eval()
        run, count = _round(other, _state(other, 1, context))
        return count / median_seconds({name: run}, repeats)[name]
    foreign = build_foreign(name, like, context + BLOCK * (repeats + 2)).to(device).eval()
    tokens = torch.randint(0, like.vocab_size, (1, context), device=device)
    count = 1 if name == "pypi-gss" else BLOCK
    with autocast(device):
        step = foreign.continuation(tokens)

        def rounds() -> Tensor:
            for _ in range(count):
                token = step()
            return token.cpu()  # waits for the device

        return count / median_seconds({name: rounds}, max(1, repeats // 2))[name]
