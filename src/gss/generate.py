"""Text from a model: the prompt is read in parallel, then tokens come one at a time, each at the same cost.

Greedy or sampled: temperature, top-k, top-p, min-p, a repetition penalty, stop strings, a seed. Knows models,
tokenizers and states; nothing of terminals or servers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gss.data import Tokenizer
from gss.decode import decoder
from gss.model import LanguageModel
from gss.nn.state import ModelState
from gss.precision import resolved, running


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. The defaults sample from the model as it is."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens."""
    top_p: float | None = None
    """Keep the fewest likeliest tokens whose probabilities reach this sum."""
    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Over 1: tokens that have occurred become less likely (positive logits divided by it, negative multiplied)."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be over 0 and at most 1, not {value}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be over 0, not {self.repetition_penalty}")


def choose(
    logits: Tensor,
    sampling: Sampling,
    seen: Tensor | None,
    generator: torch.Generator | Sequence[torch.Generator],
) -> Tensor:
    """The next token of each row, [B], from logits [B, V] on the CPU; `seen` [B, V] marks tokens that have occurred.

    With a generator a row, each row draws what it would draw alone.
    """
    if not torch.isfinite(logits).all():
        raise ValueError("the model gives logits that are not finite: its weights or its checkpoint are broken")
    logits = logits.double()
    if seen is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # the likeliest at 0, however cold
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        top = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, top.indices, top.values)
    if sampling.min_p is not None:
        probability = logits.softmax(-1)
        floor = sampling.min_p * probability.amax(-1, keepdim=True)
        logits = logits.masked_fill(probability < floor, -torch.inf)
    if sampling.top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    probability = logits.softmax(-1)
    if isinstance(generator, torch.Generator):
        return torch.multinomial(probability, 1, generator=generator).squeeze(-1)
    noise = torch.empty_like(probability)
    for row, own in zip(noise, generator, strict=True):
        row.exponential_(generator=own)
    return (probability / noise).argmax(-1)  # what `multinomial` does, for all rows at once


@torch.no_grad()
def read(
    model: LanguageModel, tokens: Tensor, state: ModelState | None = None, piece: int | None = None
) -> tuple[Tensor, ModelState]:
    """Read tokens [B, L] in pieces of bounded memory: logits [B, V] after the last one, and the state there.

    A piece is 4,096 tokens of each row; on a GPU, where a short piece waits for the host, as many as make 65,536 of
    all rows together, if that is more.
    """
    if tokens.numel() == 0:
        raise ValueError("there is nothing to read: give at least one token")
    model.check_tokens(tokens)
    if piece is None:
        piece = max(4096, 65_536 // tokens.shape[0]) if tokens.is_cuda else 4096
    hidden = None
    for part in tokens.split(piece, dim=1):
        hidden, state = model.hidden(part, state)
    assert hidden is not None
    assert state is not None
    return model.logits(hidden[:, -1]), state


@torch.no_grad()
def read_many(
    model: LanguageModel, prompts: Sequence[Sequence[int]], state: ModelState | None = None
) -> tuple[Tensor, ModelState]:
    """Read prompts of any lengths: logits [B, V] after each one's last token, and their states as one batch.

    With a `state` of as many sequences, each prompt goes on from its own.
    """
    if state is not None and state.batch != len(prompts):
        raise ValueError(
            f"the state is of {state.batch} sequences and there are {len(prompts)} prompts: select its rows"
        )
    device = model.embedding.weight.device
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    parts = [
        read(
            model,
            torch.tensor([list(prompts[row]) for row in rows], dtype=torch.int64, device=device),
            None if state is None else state.select(rows),
        )
        for rows in by_length.values()
    ]
    order = torch.tensor([row for rows in by_length.values() for row in rows]).argsort()
    logits = torch.cat([logits for logits, _ in parts])[order.to(device)]
    return logits, ModelState.join([state for _, state in parts]).select(order)


@torch.no_grad()
def stream_many(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    eos_id: int | None = None,
    state: ModelState | None = None,
    precision: str = "auto",
) -> Iterator[list[int | None]]:
    """The next token of each prompt's continuation, again and again; None for those that have ended.

    Every row is what it would be alone, whatever is beside it: prompts may have any lengths, and each draws from its
    own seed. With `state`, of as many sequences, each goes on from its own. `precision` is auto, fp32 or bf16
    (autocast); auto: bf16 on a GPU, else fp32. In bf16 what is beside a row may change its rounding.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    if not prompts:
        raise ValueError("there are no prompts: give at least one")
    sampling = sampling or Sampling()
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or [0] * len(prompts)]
    device = model.embedding.weight.device
    precision = resolved(precision, model)
    with running(model, precision):
        logits, state = read_many(model, prompts, state)
        steps = decoder(model, state)
    seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, list(prompt)] = True
    going = [True] * len(prompts)
    for produced in range(1, max_tokens + 1):
        tokens = choose(logits.cpu(), sampling, seen, generators)
        going = [on and token != eos_id for on, token in zip(going, tokens.tolist(), strict=True)]
        if not any(going):
            return
        yield [token if on else None for on, token in zip(going, tokens.tolist(), strict=True)]
        seen.scatter_(1, tokens.unsqueeze(1), True)
        if produced < max_tokens:
            with running(model, precision):
                logits = steps.step(tokens.to(device))


def stream(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    eos_id: int | None = None,
    state: ModelState | None = None,
    precision: str = "auto",
) -> Iterator[int]:
    """Token ids that go on from a prompt (after what `state` has read), until `eos_id` or `max_tokens` of them."""
    rows = stream_many(
        model,
        [prompt],
        max_tokens=max_tokens,
        sampling=sampling,
        seeds=[seed],
        eos_id=eos_id,
        state=state,
        precision=precision,
    )
    for (token,) in rows:
        assert token is not None
        yield token


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What a model reads before it goes on from a text: the end-of-document id, as a document starts in training."""
    return [tokenizer.eos_id, *tokenizer.encode(prompt).tolist()]


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    precision: str = "auto",
) -> Iterator[str]:
    """The continuation of a prompt, piece by piece, each whole characters; ends before any of the `stop` strings.

    The model reads the end-of-document id first, as it does at a document's start in training.
    """
    if "" in stop:
        raise ValueError("a stop string is empty: it would end every text at once")
    ids = prompt_ids(tokenizer, prompt)
    tokens = stream(
        model,
        ids,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        eos_id=tokenizer.eos_id,
        precision=precision,
    )
    return _until(stop, _decoded(tokenizer, ids[1:], tokens))


class TextPieces:
    """Tokens into text as they come, in whole characters: the same text whether pushed one by one or many at once.

    Ids may mean less alone (a piece's leading space, half a character), so they are decoded after a few before them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prompt[-8:])
        self._given = _whole(tokenizer.decode(self._ids))  # characters of the ids' text that have been given out

    def push(self, *tokens: int) -> str:
        """The text that has become whole with these tokens."""
        self._ids += tokens
        text = self._tokenizer.decode(self._ids)
        whole = _whole(text)
        piece = text[self._given : whole]
        self._given = max(self._given, whole)
        if len(self._ids) > 64:
            self._ids = self._ids[-8:]
            self._given = len(self._tokenizer.decode(self._ids)) - (len(text) - self._given)
        return piece

    def rest(self) -> str:
        """What never became a whole character, at the end."""
        return self._tokenizer.decode(self._ids)[self._given :]


def _whole(text: str) -> int:
    """How much of a text stays as it is: a mark of unknown bytes at its end may yet become a character of up to 4."""
    return len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))


class StopStrings:
    """Ends a text before the first of some strings; what may be the beginning of one is held back."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._held = ""
        self.ended = False

    def push(self, piece: str) -> str:
        """What may be shown once `piece` has come; nothing more after `ended`."""
        if self.ended:
            return ""
        held = self._held + piece
        found = [held.index(mark) for mark in self._marks if mark in held]
        if found:
            self.ended = True
            return held[: min(found)]
        starts = (size for mark in self._marks for size in range(1, len(mark)) if held.endswith(mark[:size]))
        shown = len(held) - max(starts, default=0)
        self._held = held[shown:]
        return held[:shown]

    def rest(self) -> str:
        """What was held back and no stop string followed."""
        return "" if self.ended else self._held


def _decoded(tokenizer: Tokenizer, prompt: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text that each token adds, as soon as it is whole characters."""
    text = TextPieces(tokenizer, prompt)
    yield from (piece for token in tokens if (piece := text.push(token)))
    if rest := text.rest():
        yield rest


def _until(stop: Sequence[str], pieces: Iterator[str]) -> Iterator[str]:
    """The pieces up to the first stop string; a piece that may be the beginning of one is held back."""
    stopping = StopStrings(stop)
    for piece in pieces:
        if shown := stopping.push(piece):
            yield shown
        if stopping.ended:
            return
    if rest := stopping.rest():
        yield rest


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    max_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    precision: str = "auto",
) -> str:
    """The continuation of a prompt as one text; see `stream_text`."""
    pieces = stream_text(
        model,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        stop=stop,
        precision=precision,
    )
    return "".join(pieces)
