"""Jobs for the server's engine, its answers, and one continuation on its way from tokens to text.

Plain data and text; independent of HTTP.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gss.data import Tokenizer
from gss.decode.request import Finish, Request, Score
from gss.generate import StopStrings, TextPieces

Failure = Literal["full", "timeout", "stopping", "internal"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and how likely the model found it."""

    token: int
    offset: int  # where its text starts, in characters of the continuation (of the prompt for a prompt's tokens)
    logprob: float | None  # None for a prompt's first token, which nothing came before
    top: tuple[tuple[int, float], ...]  # the likeliest tokens in its place with their log-probabilities


@dataclass(frozen=True, slots=True)
class Piece:
    """Something new of one continuation of a job."""

    index: int  # which of the job's continuations
    text: str = ""
    tokens: int = 0  # how many tokens have been produced since the last piece
    scores: tuple[TokenScore, ...] = ()
    finish: Finish | None = None
    failure: Failure | None = None  # set on a job's last piece when it could not be completed
    prompt_scores: Sequence[Score] = ()  # what the function below makes readable

    def followed_by(self, later: "Piece") -> "Piece":
        """Two pieces of one continuation as one."""
        text, tokens, scores = self.text + later.text, self.tokens + later.tokens, self.scores + later.scores
        return Piece(self.index, text, tokens, scores, later.finish, later.failure)


@dataclass(kw_only=True, eq=False)
class Job(Request):
    """A request to the engine, and where its answer goes."""

    sink: Callable[[Piece], None]  # called with every piece, in order
    loop: AbstractEventLoop | None = None  # the event loop that calls the sink; None: the engine's own thread does
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    streaming: bool = True  # whether pieces are wanted as they come; otherwise each continuation is one piece
    deadline: float = float("inf")  # on the clock of `time.monotonic`
    cancelled: bool = False  # may be set by any thread; the job is dropped before the next step, without a piece
    ended: int = 0  # continuations that have had their last piece, as counted by the engine


class Row:
    """A continuation of a job: the tokens that came, the text that may be shown, and when it ends."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        self.job, self.index = job, index
        self.finish: Finish | None = None
        self._text = TextPieces(tokenizer, job.prompt)
        self._stops = StopStrings(job.stop)
        self._new: list[int] = []  # tokens that have not been decoded yet
        self._shown = ""  # text since the last piece
        self._scores: list[TokenScore] = []
        self._decoded = self._released = 0  # characters of text so far: decoded, and let through by the stop strings
        self._fresh = 0  # tokens since the last piece

    def accept(self, tokens: list[int], scores: Sequence[Score] = (), finish: Finish | None = None) -> None:
        """Take the next tokens, up to a stop string; `finish` says that they are the last."""
        one_by_one = bool(self.job.stop or scores)  # where a text must be known up to each token
        for number, token in enumerate(tokens):
            self._new.append(token)
            self._fresh += 1
            if scores:
                self._scores.append(TokenScore(token, self._decoded, *scores[number]))
            if one_by_one:
                self._show()
                if self._stops.ended:
                    self.finish = "stop"
                    return
        self.finish = finish

    def take(self) -> Piece | None:
        """What has come since the last piece; None when that is nothing that could be shown."""
        self._show()
        if self.finish and not self._stops.ended:
            self._release(self._stops.push(self._text.rest()) + self._stops.rest())
            self.finish = "stop" if self._stops.ended else self.finish
        ready = self._scores
        if ready and (not self.finish or self._stops.ended):
            ready = [score for score in ready if score.offset < self._released]
        if not (self._shown or ready or self.finish):
            return None
        piece = Piece(self.index, self._shown, self._fresh, tuple(ready), self.finish)
        self._shown, self._fresh, self._scores = "", 0, self._scores[len(ready) :]
        return piece

    def _show(self) -> None:
        if self._new:
            text = self._text.push(*self._new)
            self._new.clear()
            self._decoded += len(text)
            self._release(self._stops.push(text))

    def _release(self, text: str) -> None:
        self._shown += text
        self._released += len(text)


def prompt_scores(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[Score]) -> tuple[TokenScore, ...]:
    """The scores of a prompt's tokens, each with where its text starts."""
    text, found, characters = TextPieces(tokenizer), [], 0
    for token, score in zip(prompt, scores, strict=True):
        found.append(TokenScore(int(token), characters, *score))
        characters += len(text.push(int(token)))
    return tuple(found)
