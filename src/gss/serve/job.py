"""Jobs for the server's engine, and the pieces of text that it answers with. Independent of HTTP."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gss.data import Tokenizer
from gss.decode.request import Finish, Request, Score
from gss.generate import Continuation, TextPieces, TokenScore

Failure = Literal["full", "timeout", "stopping", "internal"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one continuation of a job."""

    index: int  # which of the job's continuations
    text: str = ""
    tokens: int = 0  # tokens produced since the last piece
    scores: tuple[TokenScore, ...] = ()
    finish: Finish | None = None
    failure: Failure | None = None  # why the job could not be completed; on its last piece
    prompt_scores: Sequence[Score] = ()  # for the function below

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
    streaming: bool = True  # whether pieces are sent as they are produced; otherwise each continuation is one piece
    deadline: float = float("inf")  # on the clock of `time.monotonic`
    cancelled: bool = False  # may be set by any thread; the job is dropped before the next step, without a piece
    ended: int = 0  # continuations whose last piece has been sent, as counted by the engine


class Row(Continuation):
    """A continuation of a job."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, job.prompt, job.stop)
        self.job, self.index = job, index


def prompt_scores(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[Score]) -> tuple[TokenScore, ...]:
    """The scores of a prompt's tokens, each with where its text starts."""
    text, found, characters = TextPieces(tokenizer), [], 0
    for token, score in zip(prompt, scores, strict=True):
        found.append(TokenScore(int(token), characters, *score))
        characters += len(text.push(int(token)))
    return tuple(found)
