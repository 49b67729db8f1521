"""Requests to a decode engine, and its outputs: tokens, not text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gss.decode.sampler import Sampling
from gss.nn.state import ModelState

Finish = Literal["stop", "length"]
Score = tuple[float | None, tuple[tuple[int, float], ...]]
"""A token's log-probability (None where nothing came before it), and the likeliest tokens in its place with theirs."""


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt, and how to continue it."""

    prompt: Sequence[int]
    max_tokens: int
    n: int = 1
    """How many continuations."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Of the first continuation; the others' follow."""
    eos_id: int | None = None
    """The token that ends a continuation, which is not part of it; None: nothing but `max_tokens` does."""
    logprobs: int | None = None
    """How many alternatives to score beside each token; None: no scores."""
    score_prompt: bool = False
    state: ModelState | None = None
    """Of one sequence: what was read before the prompt."""


@dataclass(frozen=True, slots=True)
class Output:
    """Something new of one continuation of a request."""

    request: Request
    index: int
    """Which of the request's continuations."""
    tokens: list[int]
    scores: list[Score]
    """One per token, where the request asks for them."""
    finish: Finish | None = None
    """Why the continuation has ended with these tokens: at the end of a text, or at `max_tokens`."""
    prompt_scores: list[Score] | None = None
    """Of a request's prompt, in an output of its own before all others."""
