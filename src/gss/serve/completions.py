"""Completions and chats: a request is checked against the limits and becomes jobs; their pieces become the response."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fastapi import Request

from gss.data import Tokenizer
from gss.decode.request import Score
from gss.generate import first_state, prompt_ids, prompt_scores
from gss.serve.about import Limits
from gss.serve.engine import EngineThread, Failure, Job, Piece, RefusedError
from gss.serve.http import ApiError, to_json
from gss.serve.schemas import NEXT_TURN, CompletionRequest

_busy = partial(ApiError, 429, code="queue_full", headers={"Retry-After": "1"})
_FAILURES: dict[Failure, Callable[[], ApiError]] = {
    "full": partial(_busy, "the queue is full: try again later"),
    "timeout": partial(ApiError, 408, "the request took too long", code="request_timeout"),
    "stopping": partial(ApiError, 503, "the server is stopping", code="stopping", headers={"Retry-After": "5"}),
    "internal": partial(ApiError, 500, "the server failed; its log says why"),
}
_UNREAD = 4096  # pieces that may wait for a client to read them before its request is dropped
_QUICK = 4096  # characters to tokenize, or scores to write, that do not hold up the event loop
_FEW_SCORES = 8192  # log-probabilities in a response that are allowed however many others are in progress


class Surfaces(dict[int, str]):
    """Single tokens as text, by id, for lists of tokens: each is decoded apart from the text that it is part of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        # At the start of a text a token loses its leading space, so it is decoded after another token.
        self._anchor = tokenizer.encode("a").tolist()[-1:]
        self._before = len(tokenizer.decode(self._anchor))

    def __missing__(self, token: int) -> str:
        tokenizer, name = self._tokenizer, f"token_id:{token}"
        if token == tokenizer.eos_id:
            name = "<|end|>"
        elif tokenizer.kind == "bytes" and 127 < token < 256:
            name = f"bytes:\\x{token:02x}"  # as OpenAI writes tokens that are part of a character
        elif 0 <= token < tokenizer.vocab_size:
            text = tokenizer.decode([*self._anchor, token])[self._before :]
            name = text if text and "\ufffd" not in text else name
        self[token] = name
        return name

    def likeliest(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by text; of tokens that look the same (a letter, and its byte), the likeliest counts."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self[token], value)
        return found


class Service:
    """What every route needs: an engine, its model's id for clients, the limits, and the scores in progress."""

    def __init__(self, engine: EngineThread, name: str, limits: Limits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.surfaces = Surfaces(engine.tokenizer)
        # The most log-probabilities that each response in progress will hold.
        self.scores: WeakKeyDictionary[ActiveCompletion, int] = WeakKeyDictionary()

    def check_model(self, asked: str | None) -> None:
        """Refuse a model that is not the one that is served."""
        if asked is not None and asked != self.name:
            raise ApiError(404, "that model is not served here: see /v1/models", code="model_not_found", param="model")

    def check_length(self, tokens: int) -> None:
        """Refuse a prompt that is too long."""
        _check("prompt", tokens, self.limits.prompt_tokens, "tokens", "context_length_exceeded")


async def offloaded(size: int, work: Callable[[], Any]) -> Any:
    """The result of work on this many characters or scores, done in a thread if it would hold up the event loop."""
    return work() if size <= _QUICK else await asyncio.to_thread(work)


class Prompt(NamedTuple):
    """A prompt as the model reads it, and as `echo` returns it."""

    ids: list[int]
    text: str
    added: int  # ids at the start that the request does not contain


class ActiveCompletion:
    """One request for a completion (or a chat written out as one), from its arrival to its end."""

    def __init__(self, body: CompletionRequest, service: Service, chat: bool = False) -> None:
        self._body, self._service, self._engine, self._chat = body, service, service.engine, chat
        self._arrived = time.monotonic()
        self._first_at: float | None = None
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        usual = min(256 if chat else 16, service.limits.max_tokens)
        self._n, self._max_tokens = body.n or 1, usual if body.max_tokens is None else body.max_tokens
        self._stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self._prompts: list[Prompt] = []
        self._jobs: list[Job] = []
        self._produced = 0
        self._begun: set[int] = set()
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    async def start(self) -> None:
        """Tokenize the prompts and queue the jobs; ApiError if the request is invalid or the queue is full."""
        body, limits, held = self._body, self._service.limits, self._service.scores
        self._check_body()
        self._prompts = await self._read_prompts(body.prompt)
        scores = self._count_scores()
        if scores > _FEW_SCORES and scores + sum(held.values()) > max(limits.scores, limits.all_scores):
            raise _busy("too many log-probabilities are in progress: ask for fewer, or try again later")
        seed = secrets.randbits(62) if body.seed is None else body.seed
        self._jobs = [
            Job(
                prompt=prompt.ids,
                sink=partial(self._sink, number),
                loop=asyncio.get_running_loop(),
                n=self._n,
                seed=seed + number * self._n,
                sampling=body.sampling(),
                logprobs=body.logprobs,
                score_prompt=bool(body.echo) and body.logprobs is not None,
                eos_id=None if body.ignore_eos else self._engine.tokenizer.eos_id,
                streaming=bool(body.stream),
                max_tokens=self._max_tokens,
                stop=self._stop,
                deadline=self._arrived + limits.seconds,
            )
            for number, prompt in enumerate(self._prompts)
        ]
        try:
            self._engine.submit(self._jobs)
        except RefusedError as refused:
            raise _FAILURES[refused.args[0]]() from None
        held[self] = scores

    def _check_body(self) -> None:
        body, limits, stop = self._body, self._service.limits, self._stop
        self._service.check_model(body.model)
        _check("n", self._n, min(limits.n, self._engine.rows))
        _check("max_tokens", self._max_tokens, limits.max_tokens)
        _check("logprobs", body.logprobs or 0, limits.logprobs)
        _check("stop", len(stop) - len(NEXT_TURN) * self._chat, limits.stop, "strings")  # not counting the chat's own
        _check("stop", max(map(len, stop), default=0), limits.stop_characters, "characters")
        for param in ("best_of", "presence_penalty", "frequency_penalty", "suffix", "logit_bias"):
            if getattr(body, param) and not (param == "best_of" and body.best_of == self._n):
                instead = ", or use repetition_penalty" if param.endswith("penalty") else ""
                raise ApiError(400, f"{param} is not supported: leave it out{instead}", param=param, code="unsupported")
        if not self._max_tokens and not body.echo:
            raise _invalid("max_tokens", "max_tokens of 0 needs echo")
        if body.stream_options and not body.stream:
            raise _invalid("stream_options", "stream_options need stream")
        if "" in stop:
            raise _invalid("stop", "a stop string is empty")

    async def _read_prompts(self, given: Any) -> list[Prompt]:
        engine, limits = self._engine, self._service.limits
        tokenizer, state = engine.tokenizer, first_state(engine.model)
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given or [] in given:
            raise _invalid("prompt", "a prompt has no tokens: give some, or an empty text")
        sequences = min(limits.sequences, engine.rows + engine.queue)  # a request for more could never run
        _check("prompt", self._n * len(given), sequences, "continuations in one request")

        def read(each: Any) -> Prompt:
            if isinstance(each, str):
                ids = prompt_ids(tokenizer, each, state)
                return Prompt(ids, each, int(ids[0] == tokenizer.eos_id))
            return Prompt(each, tokenizer.decode([token for token in each if token < tokenizer.vocab_size]), 0)

        prompts: list[Prompt] = await offloaded(sum(map(len, given)), lambda: list(map(read, given)))
        self._service.check_length(max(len(prompt.ids) for prompt in prompts))
        vocabulary = engine.model.config.vocab_size
        if any(max(prompt.ids) >= vocabulary for prompt in prompts):
            raise _invalid("prompt", f"a token id is outside the vocabulary of {vocabulary}")
        return prompts

    def _count_scores(self) -> int:
        """The most log-probabilities that the response will hold."""
        body, limits, echoed = self._body, self._service.limits, 0
        if body.logprobs is None:
            return 0
        if body.echo:
            echoed = self._n * sum(len(prompt.ids) for prompt in self._prompts)
            what = "tokens of prompts to echo with logprobs, each prompt n times,"
            _check("prompt", echoed, limits.prompt_tokens, what)
        scores = (echoed + self._n * len(self._prompts) * self._max_tokens) * (1 + body.logprobs)
        what = "log-probabilities (of tokens, each with its alternatives) in one answer"
        _check("logprobs", scores, limits.scores, what)
        return scores

    async def whole(self, request: Request) -> bytes | None:
        """The whole response as JSON; None if the client has disconnected."""
        collecting = asyncio.ensure_future(self._collect())
        disconnect = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({collecting, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            return to_json(collecting.result()) if collecting.done() else None
        finally:
            collecting.cancel()
            disconnect.cancel()
            self._end()

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        extra = {"usage": None} if with_usage else {}
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        try:
            async for choices in self._choices():
                shown = [self._formatted(choice, whole=False) for choice in choices]
                yield _event({**head, "choices": shown, **extra})
            if with_usage:
                yield _event({**head, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)
        finally:
            self._end()

    def _end(self) -> None:
        self._engine.cancel(self._jobs)
        self._service.scores.pop(self, None)

    async def _collect(self) -> dict[str, Any]:
        texts: dict[int, dict[str, Any]] = {}
        async for choices in self._choices():
            for choice in choices:
                whole = texts.setdefault(choice["index"], choice)
                if whole is not choice:
                    whole["text"] += choice["text"]
                    whole["finish_reason"] = choice["finish_reason"]
                    if choice["logprobs"]:  # new lists, since the continuations of a prompt share the lists of its echo
                        old = whole["logprobs"]
                        whole["logprobs"] = {key: old[key] + values for key, values in choice["logprobs"].items()}
        shown = [self._formatted(texts[index], whole=True) for index in sorted(texts)]
        return {**self._head, "choices": shown, "usage": self._usage()}

    def _formatted(self, choice: dict[str, Any], whole: bool) -> dict[str, Any]:
        """A choice in the form of the route, whole or as a part of a stream."""
        if not self._chat:
            return choice
        index, said = choice["index"], {"content": choice["text"]}
        if index not in self._begun:  # parts name the role up to the first text, which loses its leading space
            said = {"role": "assistant", "content": choice["text"].lstrip()}
            if said["content"]:
                self._begun.add(index)
        part = {"message" if whole else "delta": said}
        return {"index": index, **part, "logprobs": None, "finish_reason": choice["finish_reason"]}

    async def _choices(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Choices as they are produced: echoed prompts first, then pieces of text up to the last."""
        echo = bool(self._body.echo)
        if echo and self._body.logprobs is None:
            for number, prompt in enumerate(self._prompts):
                yield [self._choice(number, Piece(index, prompt.text)) for index in range(self._n)]
        going = len(self._jobs) * self._n
        while going:
            for number, piece in await self._next_pieces():
                if piece.failure:
                    raise _FAILURES[piece.failure]()
                prompt = self._prompts[number]
                if piece.prompt_scores:
                    first = await offloaded(len(prompt.ids), partial(self._echoed, number, piece.prompt_scores))
                    yield [{**first, "index": first["index"] + index} for index in range(self._n)]
                    continue
                if self._first_at is None:
                    self._first_at = time.monotonic()
                    self._engine.metrics.first_token_seconds.observe(self._first_at - self._arrived)
                self._produced += piece.tokens
                yield [self._choice(number, piece, len(prompt.text) if echo else 0)]
                going -= piece.finish is not None
        self._engine.metrics.request_seconds.observe(time.monotonic() - self._arrived)

    async def _next_pieces(self) -> Iterable[tuple[int, Piece]]:
        """Wait for pieces. Those of one continuation are joined, so a slow client gets more text per event."""
        waiting, found = self._pieces, dict[tuple[Any, ...], tuple[int, Piece]]()
        for number, piece in [await waiting.get(), *(waiting.get_nowait() for _ in range(waiting.qsize()))]:
            key = number, piece.index, piece.failure, bool(piece.prompt_scores)
            found[key] = number, found[key][1].followed_by(piece) if key in found else piece
        return found.values()

    def _echoed(self, number: int, scores: Sequence[Score]) -> dict[str, Any]:
        """A prompt with its scores."""
        prompt = self._prompts[number]
        scored = prompt_scores(self._engine.tokenizer, prompt.ids, scores)[prompt.added :]
        return self._choice(number, Piece(0, prompt.text, scores=scored))

    def _choice(self, number: int, piece: Piece, base: int = 0) -> dict[str, Any]:
        """A piece of one of a prompt's continuations; `base` is where its text starts."""
        logprobs, scores = None, piece.scores
        if self._body.logprobs is not None:
            names = self._service.surfaces
            logprobs = {
                "tokens": [names[score.token] for score in scores],
                "token_logprobs": [score.logprob for score in scores],
                "top_logprobs": [None if score.logprob is None else names.likeliest(score.top) for score in scores],
                "text_offset": [base + score.offset for score in scores],
                "token_ids": [score.token for score in scores],
            }
        index = number * self._n + piece.index
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _usage(self) -> dict[str, int]:
        read, produced = sum(len(prompt.ids) for prompt in self._prompts), self._produced
        return {"prompt_tokens": read, "completion_tokens": produced, "total_tokens": read + produced}

    def _sink(self, number: int, piece: Piece) -> None:
        if self._pieces.qsize() >= _UNREAD:  # the client does not read: stop producing for it
            self._engine.cancel(self._jobs)
            piece = Piece(0, failure="timeout")
        self._pieces.put_nowait((number, piece))


def _check(param: str, got: int, most: int, what: str = "", code: str = "limit_exceeded") -> None:
    if got > most:
        message = f"{param}: {got:,}{what and ' '}{what} is more than the {most:,} that are allowed"
        raise ApiError(400, message, param=param, code=code)


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"
