"""What the server's engine is asked for, and what it answers: plain data, nothing of HTTP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gss.decode.request import Finish, Request

Failure = Literal["timeout", "stopping", "internal"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and how likely the model found it."""

    token: int
    offset: int
    """Where its text starts, in characters of the continuation (of the prompt for a prompt's tokens)."""
    logprob: float | None
    """None for a prompt's first token, which nothing came before."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens in its place with their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Something new of one continuation of a job."""

    index: int
    """Which of the job's continuations."""
    text: str = ""
    tokens: int = 0
    """How many tokens have been produced since the last piece."""
    scores: tuple[TokenScore, ...] = ()
    finish: Finish | None = None
    failure: Failure | None = None
    """Set on a job's last piece when it could not be completed."""
    prompt_scores: tuple[TokenScore, ...] = ()


@dataclass(kw_only=True, eq=False)
class Job(Request):
    """A request to the engine, and where its answer goes."""

    sink: Callable[[Piece], None]
    """Gets every piece, in order."""
    home: Any = None
    """Where the sink wants to be called, for the engine's `post`; nothing to the engine itself."""
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    streaming: bool = True
    """Whether pieces are wanted as they come; otherwise each continuation is one piece."""
    deadline: float = float("inf")
    """On the clock of `time.monotonic`."""
    cancelled: bool = False
    """May be set by any thread: the job is then dropped before the next step, without another piece."""
    ended: int = 0
    """Continuations that have had their last piece; the engine's own count."""
