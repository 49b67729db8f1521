"""Requests, checked against the limits before anything is queued; a bad one gets an error that names what is wrong."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from gss.generate import first_state, prompt_ids
from gss.serve.about import Limits
from gss.serve.engine import EngineThread
from gss.serve.http import ApiError
from gss.serve.schemas import CompletionRequest
from gss.serve.service import Service

# Texts longer than this are tokenized beside the event loop.
QUICK_CHARACTERS = 4096


class Prompt(NamedTuple):
    """What is read, and what is given back of it."""

    ids: list[int]
    text: str
    added: int
    """Ids at the start that are not the request's own."""


class Asked(NamedTuple):
    """What a request for a completion asks of the engine."""

    prompts: list[Prompt]
    max_tokens: int
    stop: list[str]
    scores: int
    """Log-probabilities in the answer, at most."""


async def check_completion(body: CompletionRequest, service: Service) -> Asked:
    """What a request asks for, its prompts tokenized."""
    engine, limits = service.engine, service.limits
    check_model(body.model, service)
    n = body.n or 1
    if n > min(limits.n, engine.rows):
        raise _beyond("n", n, min(limits.n, engine.rows))
    if body.best_of not in (None, n):
        raise ApiError(400, "best_of is not supported: leave it out", param="best_of", code="unsupported")
    for param in ("presence_penalty", "frequency_penalty", "suffix", "logit_bias"):
        if getattr(body, param):
            instead = ", or use repetition_penalty" if param.endswith("penalty") else ""
            raise ApiError(400, f"{param} is not supported: leave it out{instead}", param=param, code="unsupported")
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens > limits.max_tokens:
        raise _beyond("max_tokens", max_tokens, limits.max_tokens)
    if not max_tokens and not body.echo:
        raise ApiError(400, "max_tokens of 0 needs echo", param="max_tokens", code="invalid_value")
    if body.logprobs is not None and body.logprobs > limits.logprobs:
        raise _beyond("logprobs", body.logprobs, limits.logprobs)
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options need stream", param="stream_options", code="invalid_value")
    stop = _stops(body.stop, limits)
    prompts = await _prompts(body.prompt, engine, limits)
    sequences = min(limits.sequences, engine.rows + engine.queue)  # what would never find room is not asked to wait
    if n * len(prompts) > sequences:
        raise _beyond("prompt", n * len(prompts), sequences, "continuations in one request")
    return Asked(prompts, max_tokens, stop, _count_scores(body, max_tokens, prompts, limits))


def check_model(asked: str | None, service: Service) -> None:
    """Refuse a model that is not the one that is served."""
    if asked is not None and asked != service.name:
        raise ApiError(404, "that model is not served here: see /v1/models", code="model_not_found", param="model")


def check_length(tokens: int, limits: Limits) -> None:
    """Refuse a prompt that is too long."""
    if tokens > limits.prompt_tokens:
        raise _beyond("prompt", tokens, limits.prompt_tokens, "tokens", "context_length_exceeded")


def _count_scores(body: CompletionRequest, max_tokens: int, prompts: Sequence[Prompt], limits: Limits) -> int:
    """How many log-probabilities the answer will hold; too many are refused."""
    if body.logprobs is None:
        return 0
    n, echoed = body.n or 1, 0
    if body.echo:
        echoed = n * sum(len(prompt.ids) for prompt in prompts)
        if echoed > limits.prompt_tokens:
            what = "tokens of prompts to echo with logprobs, each prompt n times,"
            raise _beyond("prompt", echoed, limits.prompt_tokens, what)
    scores = (echoed + n * len(prompts) * max_tokens) * (1 + body.logprobs)
    if scores > limits.scores:
        what = "log-probabilities (of tokens, each with its alternatives) in one answer"
        raise _beyond("logprobs", scores, limits.scores, what)
    return scores


def _stops(given: str | list[str] | None, limits: Limits) -> list[str]:
    stop = [given] if isinstance(given, str) else given or []
    if len(stop) > limits.stop:
        raise _beyond("stop", len(stop), limits.stop, "strings")
    if "" in stop:
        raise ApiError(400, "a stop string is empty", param="stop", code="invalid_value")
    longest = max(map(len, stop), default=0)
    if longest > limits.stop_characters:
        raise _beyond("stop", longest, limits.stop_characters, "characters")
    return stop


async def _prompts(given: Any, engine: EngineThread, limits: Limits) -> list[Prompt]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or [] in given:
        raise ApiError(400, "a prompt of no tokens: give some, or an empty text", param="prompt", code="invalid_value")
    if len(given) > limits.sequences:
        raise _beyond("prompt", len(given), limits.sequences, "continuations in one request")
    size = sum(map(len, given))
    make = partial(_tokenized, given, engine)
    prompts = make() if size <= QUICK_CHARACTERS else await asyncio.to_thread(make)
    check_length(max(len(prompt.ids) for prompt in prompts), limits)
    vocabulary = engine.model.config.vocab_size
    if any(max(prompt.ids) >= vocabulary for prompt in prompts):
        raise ApiError(
            400, f"a token id is beyond the vocabulary of {vocabulary}", param="prompt", code="invalid_value"
        )
    return prompts


def _tokenized(given: list[Any], engine: EngineThread) -> list[Prompt]:
    tokenizer, state = engine.tokenizer, first_state(engine.model)

    def read(text: str) -> Prompt:
        ids = prompt_ids(tokenizer, text, state)
        return Prompt(ids, text, int(ids[0] == tokenizer.eos_id))

    return [
        read(each)
        if isinstance(each, str)
        else Prompt(each, tokenizer.decode([token for token in each if token < tokenizer.vocab_size]), 0)
        for each in given
    ]


def _beyond(param: str, got: int, most: int, what: str = "", code: str = "limit_exceeded") -> ApiError:
    unit = f" {what}" if what else ""
    return ApiError(400, f"{param}: {got:,}{unit} is more than the {most:,} that are allowed", param=param, code=code)
