"""`/v1/completions`: from a request to jobs, and from their pieces to an answer, whole or as a stream of events."""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Request

from gss.serve.checks import Asked
from gss.serve.engine import DrainingError, Posts, QueueFullError, hand_over
from gss.serve.http import ApiError, to_json
from gss.serve.job import Failure, Job, Piece, TokenScore
from gss.serve.schemas import CompletionRequest
from gss.serve.service import Service

_FAILURES: dict[Failure, Callable[[], ApiError]] = {
    "timeout": partial(ApiError, 408, "the request took longer than it may", code="request_timeout"),
    "stopping": partial(ApiError, 503, "the server is stopping", code="stopping", headers={"Retry-After": "5"}),
    "internal": partial(ApiError, 500, "the server failed; its log says why"),
}

# Pieces for which it is worth waiting until they are sent, and the longest time to do so, in seconds.
_MANY, _PATIENCE = 4, 0.02

# Pieces that may wait for a client to read them, before its request is dropped.
_UNREAD = 4096

# Tokens of a prompt up to which their scores are put together on the event loop itself.
_QUICK_SCORES = 4096

# Log-probabilities in an answer that may be asked for whatever others hold.
_FEW_SCORES = 8192


def post_to_loops(posts: Posts) -> None:
    """Hand a turn's pieces to the event loops that wait for them: one wake-up per loop, whatever their number.

    Where there are many, wait until they have been sent. Python runs one thread at a time: two that are both busy take
    turns at every call into the system, and that costs more than it wins.
    """
    by_loop: dict[asyncio.AbstractEventLoop, Posts] = {}
    for job, piece in posts:
        by_loop.setdefault(job.home, []).append((job, piece))
    for loop, own in by_loop.items():
        sent = threading.Event()
        try:
            loop.call_soon_threadsafe(_hand_over, own, loop, sent)
        except RuntimeError:  # the loop is closed: nobody waits any more
            for job, _ in own:
                job.cancelled = True
            continue
        if len(own) >= _MANY:
            sent.wait(_PATIENCE)


def _hand_over(posts: Posts, loop: asyncio.AbstractEventLoop, sent: threading.Event) -> None:
    hand_over(posts)
    loop.call_soon(sent.set)  # after those whom the pieces have woken


class ActiveCompletion:
    """One request, from its arrival to its end."""

    kind, prefix = "text_completion", "cmpl"

    def __init__(self, body: CompletionRequest, asked: Asked, service: Service) -> None:
        self._body, self._prompts, self._service, self._scores = body, asked.prompts, service, asked.scores
        self._engine = service.engine
        self._arrived = time.monotonic()
        self._first_at: float | None = None
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._n = body.n or 1
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": service.name,
        }
        self._produced = 0
        seed = secrets.randbits(62) if body.seed is None else body.seed
        scored_prompt = bool(body.echo) and body.logprobs is not None
        self._jobs = [
            Job(
                prompt=prompt.ids,
                sink=partial(self._sink, number),
                home=asyncio.get_running_loop(),
                n=self._n,
                seed=seed + number * self._n,
                sampling=body.sampling(),
                logprobs=body.logprobs,
                score_prompt=scored_prompt,
                ignore_eos=bool(body.ignore_eos),
                streaming=bool(body.stream),
                max_tokens=asked.max_tokens,
                stop=asked.stop,
                deadline=self._arrived + service.limits.seconds,
            )
            for number, prompt in enumerate(asked.prompts)
        ]

    def start(self) -> None:
        """Queue it, or say that there is no room."""
        held, limits = self._service.scores, self._service.limits
        if self._scores > _FEW_SCORES and self._scores + sum(held.values()) > max(limits.scores, limits.all_scores):
            raise _later("as many log-probabilities are under way as may be: ask for fewer, or try again")
        try:
            self._engine.submit(self._jobs)
        except QueueFullError:
            raise _later("as many requests wait as may: try again") from None
        except DrainingError:
            raise _FAILURES["stopping"]() from None
        held[self] = self._scores

    async def whole(self, request: Request) -> bytes | None:
        """The answer in one, as JSON; None where the client has gone."""
        collecting = asyncio.ensure_future(self._collect())
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return to_json(collecting.result()) if collecting.done() else None
        finally:
            collecting.cancel()
            leaving.cancel()
            self._end()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        extra = {"usage": None} if with_usage else {}
        head = {**self._head, "object": self.kind if self.kind == "text_completion" else f"{self.kind}.chunk"}
        try:
            async for choices in self._choices():
                shown = [self._shown(choice, whole=False) for choice in choices]
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
                    if choice["logprobs"]:  # new lists: all continuations of a prompt share those of the prompt
                        old = whole["logprobs"]
                        whole["logprobs"] = {key: old[key] + values for key, values in choice["logprobs"].items()}
        shown = [self._shown(texts[index], whole=True) for index in sorted(texts)]
        return {**self._head, "choices": shown, "usage": self._usage()}

    def _shown(self, choice: dict[str, Any], whole: bool) -> dict[str, Any]:
        """A choice as the client wants it, whole or as a part of a stream."""
        return choice

    async def _choices(self) -> AsyncIterator[list[dict[str, Any]]]:
        """What is new, as choices: the prompts where they are echoed, then pieces as they come, to the last."""
        echo = bool(self._body.echo)
        if echo and not self._jobs[0].score_prompt:
            for number, prompt in enumerate(self._prompts):
                yield [self._choice(number, index, prompt.text) for index in range(self._n)]
        going = len(self._jobs) * self._n
        while going:
            number, piece = await self._pieces.get()
            if piece.failure:
                raise _FAILURES[piece.failure]()
            prompt = self._prompts[number]
            if piece.prompt_scores:
                scores = piece.prompt_scores[prompt.added :]
                make = partial(self._choice, number, 0, prompt.text, scores)
                first = await asyncio.to_thread(make) if len(scores) > _QUICK_SCORES else make()
                yield [{**first, "index": first["index"] + index} for index in range(self._n)]
                continue
            if self._first_at is None:
                self._first_at = time.monotonic()
                self._engine.metrics.first_token_seconds.observe(self._first_at - self._arrived)
            self._produced += piece.tokens
            base = len(prompt.text) if echo else 0
            yield [self._choice(number, piece.index, piece.text, piece.scores, base, piece.finish)]
            going -= piece.finish is not None
        self._engine.metrics.request_seconds.observe(time.monotonic() - self._arrived)

    def _choice(
        self,
        number: int,
        index: int,
        text: str,
        scores: Sequence[TokenScore] = (),
        base: int = 0,
        finish: str | None = None,
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            names = self._service.surfaces
            logprobs = {
                "tokens": [names[score.token] for score in scores],
                "token_logprobs": [score.logprob for score in scores],
                "top_logprobs": [
                    None if score.logprob is None else {names[token]: value for token, value in score.top}
                    for score in scores
                ],
                "text_offset": [base + score.offset for score in scores],
                "token_ids": [score.token for score in scores],
            }
        return {"index": number * self._n + index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _usage(self) -> dict[str, int]:
        read = sum(len(prompt.ids) for prompt in self._prompts)
        return {
            "prompt_tokens": read,
            "completion_tokens": self._produced,
            "total_tokens": read + self._produced,
        }

    def _sink(self, number: int, piece: Piece) -> None:
        if self._pieces.qsize() >= _UNREAD:  # the client does not read: nothing more is produced for it
            self._engine.cancel(self._jobs)
            piece = Piece(0, failure="timeout")
        self._pieces.put_nowait((number, piece))


def _later(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"
