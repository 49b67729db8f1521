"""Decoding a token at a time: what a token costs after contexts of several lengths, beside what else is there.

Correctness comes first: where the decoder's logits are not the model's own, nothing is reported.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gss.bench.measure import median_seconds
from gss.bench.peers import PYPI_GSS, pypi_gss_model
from gss.decode import BLOCK, Decoder
from gss.generate import read
from gss.model import LanguageModel, build_model
from gss.presets import preset


@dataclass(frozen=True)
class Row:
    """The cost of a token for one contestant after one context."""

    name: str
    context: int
    seconds: float
    """A token, the median of rounds of `BLOCK` tokens each, so that folding a block into the state is in it."""
    state_bytes: int | None = None
    times_as_long: float = 1.0
    """Over the time of the GSS model after the shortest context."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@torch.no_grad()
def bench_decode(
    *,
    size: str = "small",
    peer_context: int = 4096,
    attention_context: int = 16_384,
    short_context: int = 1024,
    long_context: int = 65_536,
    peer: bool = True,
    rounds: int = 5,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Time the GSS preset of a size at every context, the Transformer of that size at one, and the peer at one."""
    torch.manual_seed(0)
    model = build_model(preset(f"gss-{size}")).eval()
    transformer = build_model(preset(f"transformer-{size}")).eval()
    _check(model)
    contestants: dict[tuple[str, int], Callable[[], Any]] = {}
    states: dict[tuple[str, int], int] = {}
    gss_contexts = sorted({short_context, peer_context, attention_context, long_context})
    for name, subject, contexts in (
        (f"gss-{size}", model, gss_contexts),
        (f"transformer-{size}", transformer, [attention_context]),
    ):
        for context in contexts:
            report(f"{name} reads {context:,} tokens")
            tokens = torch.randint(0, subject.config.vocab_size, (1, context))
            _, state = read(subject, tokens)
            states[name, context] = state.nbytes
            contestants[name, context] = _round_of_steps(Decoder(subject, state))
    report("decoding in turns")
    seconds = {key: total / BLOCK for key, total in median_seconds(contestants, rounds).items()}
    if peer:
        name = f"PyPI gss, {size}"
        report(f"{PYPI_GSS} recomputes {peer_context:,} tokens for one")
        theirs = pypi_gss_model(model)
        tokens = torch.randint(0, model.config.vocab_size, (1, peer_context))
        timed = {"peer": lambda: theirs(tokens), "ours": contestants[f"gss-{size}", peer_context]}
        both = median_seconds(timed, max(1, rounds // 2))
        seconds[name, peer_context] = both["peer"]
        seconds[f"gss-{size}", peer_context] = both["ours"] / BLOCK
    base = seconds[f"gss-{size}", gss_contexts[0]]
    return [Row(*key, taken, states.get(key), taken / base) for key, taken in seconds.items()]


def _round_of_steps(decoder: Decoder) -> Callable[[], None]:
    token = torch.zeros(1, dtype=torch.int64)

    def run() -> None:
        for _ in range(BLOCK):
            decoder.step(token)

    return run


def _check(model: LanguageModel) -> None:
    tokens = torch.randint(0, model.config.vocab_size, (1, 300))
    _, state = read(model, tokens[:, :200])
    decoder = Decoder(model, state)
    stepped = torch.stack([decoder.step(tokens[:, i]) for i in range(200, 300)], dim=1)
    whole = model(tokens)[0][:, 200:]
    error = ((stepped - whole).norm() / whole.norm()).item()
    if not error < 1e-4:
        raise ValueError(f"decoded logits differ from the model's own by {error:.1e}: nothing is reported")
