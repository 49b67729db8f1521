"""Requests to a decode engine, and its outputs: tokens, not text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gss.decode.sampler import Sampling
from gss.nn.state import ModelState

Finish = Literal["stop", "length"]
Score = tuple[float | None, tuple[tuple[int, float], ...]]
"""A token's log-probability (None for the first token of all), and the likeliest tokens in its place with theirs."""


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt, and how to continue it."""

    prompt: Sequence[int]
    max_tokens: int
    n: int = 1
    """How many continuations."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Of the first continuation; the others have the following seeds."""
    eos_id: int | None = None
    """The token that ends a continuation and is not part of it; None: only `max_tokens` ends it."""
    logprobs: int | None = None
    """How many alternatives to score beside each token; None: no scores."""
    score_prompt: bool = False
    state: ModelState | None = None
    """The state of one sequence, which the prompt continues."""


@dataclass(frozen=True, slots=True)
class Output:
    """What is new of one continuation of a request."""

    request: Request
    index: int
    """Which of the request's continuations."""
    tokens: list[int]
    scores: list[Score]
    """One per token, if the request asks for them."""
    finish: Finish | None = None
    """Why the continuation ends with these tokens: the end of a document, or `max_tokens`."""
    prompt_scores: list[Score] | None = None
    """Scores of the prompt, in a separate output before all others."""
