"""Generating text: prompts of text in, text out, in whole characters and up to stop strings.

`stream_texts` runs prompts on an engine. `Continuation` turns tokens into text, here and in `gss.serve`. Independent of
terminals and servers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

from gss.data import Tokenizer
from gss.decode import Engine, Request, Sampling, read
from gss.decode.request import Finish, Score
from gss.model import LanguageModel
from gss.nn.state import ModelState

__all__ = ["Sampling", "generate", "prompt_ids", "read", "stream_texts"]


def prompt_ids(tokenizer: Tokenizer, prompt: str, state: ModelState | None = None) -> list[int]:
    """What a model reads before it continues a text: the end-of-document id, as in training, and the text.

    After a `state` that has read something, a text continues from there without that id; an empty one
    starts a new document.
    """
    text: list[int] = tokenizer.encode(prompt).tolist()
    continues = state is not None and int(state.position.max()) > 0
    return text if text and continues else [tokenizer.eos_id, *text]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What is new of one continuation of a prompt."""

    prompt: int  # which of the prompts
    sample: int  # which of its continuations
    text: str  # whole characters
    tokens: int  # how many tokens were produced for it
    finish: Finish | None  # why the continuation ends with this piece, if it does


def stream_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int = 200,
    n: int = 1,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    state: ModelState | None = None,
    precision: str = "auto",
    speculate: bool | None = None,
    rows: int = 64,
    **options: Any,
) -> Iterator[TextPiece]:
    """`n` continuations of each prompt, from consecutive seeds, up to `rows` side by side; each ends before any of the
    `stop` strings. The other options are those of `Request`, such as the `sampling`.

    The model reads the end-of-document id first, as it does at a document's start in training; not after a `state`
    that has read something, its own first state included.
    """
    stop = [stop] if isinstance(stop, str) else stop
    if "" in stop:
        raise ValueError("a stop string is empty: it would end every text at once")
    if max_tokens < 1 or n < 1:
        raise ValueError(f"max_tokens and n must be at least 1, not {max_tokens} and {n}")
    if state is not None and "" in prompts:
        raise ValueError("the prompt is empty: after a state, give the text that comes next")
    before = state or first_state(model)
    options |= {"max_tokens": max_tokens, "eos_id": tokenizer.eos_id, "state": state}
    engine = Engine(model, rows=rows, precision=precision, speculate=speculate)
    places: dict[Request, tuple[int, int]] = {}  # which of the prompts, and its first continuation of this request
    for place, prompt in enumerate(prompts):
        ids = prompt_ids(tokenizer, prompt, before)
        for first in range(0, n, rows):  # the continuations of one request are always side by side
            request = Request(prompt=ids, n=min(rows, n - first), seed=seed + first, **options)
            places[request] = place, first
            engine.submit(request)
    return _texts(engine, tokenizer, places, stop)


def _texts(
    engine: Engine, tokenizer: Tokenizer, places: Mapping[Request, tuple[int, int]], stop: Sequence[str]
) -> Iterator[TextPiece]:
    going = {
        (request, sample): Continuation(tokenizer, request.prompt, stop)
        for request in places
        for sample in range(request.n)
    }
    for output in engine.run():
        request, sample = output.request, output.index
        if (request, sample) not in going:  # ended by a stop string
            continue
        row = going[request, sample]
        row.accept(output.tokens, finish=output.finish)
        shown, (place, first) = row.take(), places[request]
        if row.finish:
            del going[request, sample]
            if output.finish is None:  # ended by a stop string, which the engine does not know
                engine.cancel(partial(is_, request), sample)
        if shown:
            yield TextPiece(place, first + sample, shown.text, shown.tokens, shown.finish)


def first_state(model: LanguageModel) -> ModelState | None:
    """The state that the model starts from, where that is not the empty one."""
    return None if model.first is None else model.first.value()


def generate(model: LanguageModel, tokenizer: Tokenizer, prompt: str = "", **options: Any) -> str:
    """The continuation of a prompt as one text; options are those of `stream_texts`."""
    return "".join(piece.text for piece in stream_texts(model, tokenizer, [prompt], **options))


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and how likely the model found it."""

    token: int
    offset: int  # where its text starts, in characters of the continuation (of the prompt for a prompt's tokens)
    logprob: float | None  # None for a prompt's first token, which nothing came before
    top: tuple[tuple[int, float], ...]  # the most likely tokens in its place with their log-probabilities


class Shown(NamedTuple):
    """What is new of a continuation."""

    text: str
    tokens: int
    """How many tokens have come since the last call."""
    scores: tuple[TokenScore, ...]
    finish: Finish | None
    """Why the continuation has ended, if it has."""


class Continuation:
    """One continuation on its way from tokens to text: what may be shown of it, and when it ends."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.finish: Finish | None = None
        self._text = TextPieces(tokenizer, prompt)
        self._stop, self._stops = stop, StopStrings(stop)
        self._new: list[int] = []  # tokens that have not been decoded yet
        self._shown = ""  # text since the last call of `take`
        self._scores: list[TokenScore] = []
        self._decoded = self._released = 0  # characters so far: decoded, and let through by the stop strings
        self._fresh = 0  # tokens since the last call of `take`

    def accept(self, tokens: Sequence[int], scores: Sequence[Score] = (), finish: Finish | None = None) -> None:
        """Add the next tokens, up to a stop string; `finish` says that they are the last."""
        one_by_one = bool(self._stop or scores)  # the text must be known up to each token
        for number, token in enumerate(tokens):
            self._new.append(token)
            self._fresh += 1
            if scores:
                self._scores.append(TokenScore(token, self._decoded, *scores[number]))
            if one_by_one:
                self._decode()
                if self._stops.ended:
                    self.finish = "stop"
                    return
        self.finish = finish

    def take(self) -> Shown | None:
        """What is new since the last call; None if nothing can be shown yet."""
        self._decode()
        if self.finish and not self._stops.ended:
            self._release(self._stops.push(self._text.rest()) + self._stops.rest())
            self.finish = "stop" if self._stops.ended else self.finish
        ready = self._scores
        if ready and (not self.finish or self._stops.ended):
            ready = [score for score in ready if score.offset < self._released]
        if not (self._shown or ready or self.finish):
            return None
        shown = Shown(self._shown, self._fresh, tuple(ready), self.finish)
        self._shown, self._fresh, self._scores = "", 0, self._scores[len(ready) :]
        return shown

    def _decode(self) -> None:
        if self._new:
            text = self._text.push(*self._new)
            self._new.clear()
            self._decoded += len(text)
            self._release(self._stops.push(text))

    def _release(self, text: str) -> None:
        self._shown += text
        self._released += len(text)


class TextPieces:
    """Tokens into text as they come, in whole characters: the same text whether pushed one by one or many at once.

    A token alone may lose its leading space or be half a character, so ids are decoded together with a few before them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prompt[-8:])
        text = tokenizer.decode(self._ids)
        self._given = _whole(text)  # characters of the ids' text that have been returned
        self._known = text[self._given :]  # replacement marks at the prompt's end, which are not repeated

    def push(self, *tokens: int) -> str:
        """The text that has become whole with these tokens."""
        self._ids += tokens
        text = self._tokenizer.decode(self._ids)
        whole = _whole(text)
        piece = self._new(text[self._given : whole])
        self._given = max(self._given, whole)
        if len(self._ids) > 64:
            self._ids = self._ids[-8:]
            self._given = len(self._tokenizer.decode(self._ids)) - (len(text) - self._given)
        return piece

    def rest(self) -> str:
        """At the end: what never became a whole character."""
        return self._new(self._tokenizer.decode(self._ids)[self._given :])

    def _new(self, piece: str) -> str:
        """A piece without the marks that the prompt ends in."""
        shared = min(len(self._known), len(piece) - len(piece.lstrip("\ufffd")))
        if piece:
            self._known = self._known[shared:] if shared == len(piece) else ""
        return piece[shared:]


def prompt_scores(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[Score]) -> tuple[TokenScore, ...]:
    """The scores of a prompt's tokens, each with where its text starts."""
    text, found, characters = TextPieces(tokenizer), [], 0
    for token, score in zip(prompt, scores, strict=True):
        found.append(TokenScore(int(token), characters, *score))
        characters += len(text.push(int(token)))
    return tuple(found)


def _whole(text: str) -> int:
    """How many characters are final: up to 3 replacement marks at the end may yet become one character."""
    return len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))


class StopStrings:
    """Ends a text before the first of some strings; what may be the beginning of one is held back."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._held = ""
        self.ended = False

    def push(self, piece: str) -> str:
        """What may be shown after `piece`; nothing once the text has `ended`."""
        if self.ended:
            return ""
        held = self._held + piece
        starts = [(held.index(mark), mark) for mark in self._marks if mark in held]
        if starts:
            self.ended = True  # by the string that is complete first, however the text is cut into pieces
            return held[: min((start + len(mark), start) for start, mark in starts)[1]]
        sizes = ((mark, size) for mark in self._marks for size in range(1, min(len(mark), len(held) + 1)))
        shown = len(held) - max((size for mark, size in sizes if held.endswith(mark[:size])), default=0)
        self._held = held[shown:]
        return held[:shown]

    def rest(self) -> str:
        """At the end: what was held back, if it did not become a stop string."""
        return "" if self.ended else self._held
