"""The thread that runs the decode engine for a server: a queue in, pieces of text out.

Each iteration of the loop takes in new jobs, drops those that are cancelled or late, reads a piece of a prompt and
produces tokens for every running sequence. If both have work, reading gets about half of the time: a long prompt slows
running sequences down but does not stall them.

Handles jobs, text and the event loops that wait for it, but not HTTP. `gss.decode.Engine` runs the model.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, Literal

from gss import decode
from gss.data import Tokenizer
from gss.decode import Output, Request
from gss.decode.request import Finish, Score
from gss.generate import Continuation, TokenScore
from gss.model import LanguageModel
from gss.precision import running
from gss.serve.metrics import Metrics

log = logging.getLogger("gss.serve")

# Making and sending a piece takes almost 0.1 ms, however long it is.
_PIECES_PER_SECOND = 640

# The number of pieces from which the engine waits until they are sent, and for how many seconds at most.
_MANY, _PATIENCE = 4, 0.02

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
    prompt_scores: Sequence[Score] = ()  # in a piece of their own, before all others

    def followed_by(self, later: "Piece") -> "Piece":
        """Two pieces of one continuation as one."""
        text, tokens, scores = self.text + later.text, self.tokens + later.tokens, self.scores + later.scores
        return Piece(self.index, text, tokens, scores, later.finish, later.failure)


@dataclass(kw_only=True, eq=False)
class Job(Request):
    """A request to the engine, and where its answer goes."""

    sink: Callable[[Piece], None]  # called with every piece, in order
    loop: asyncio.AbstractEventLoop | None = None  # the one that calls the sink; None: the engine's own thread does
    stop: Sequence[str] = ()
    streaming: bool = True  # whether pieces are sent as they are produced; otherwise each continuation is one piece
    deadline: float = float("inf")  # on the clock of `time.monotonic`
    cancelled: bool = False  # may be set by any thread; the job is dropped before the next step, without a piece
    ended: int = 0  # continuations whose last piece has been sent, as counted by the engine


Posts = list[tuple[Job, Piece]]


class RefusedError(Exception):
    """The engine refuses a job because its queue is "full" or it is "stopping"."""


class EngineThread:
    """Runs jobs on a model until it is stopped.

    rows          most sequences in the batch: with a bounded state, memory is known from the start
    queue         sequences that may wait in addition
    piece         tokens of prompts that are read between two steps; by default 256, on a GPU 4,096, because launching
                  a short piece takes longer than computing it
    cache_bytes   memory for the cached states of prompts (0: no cache)
    interval      seconds between two pieces of one stream; longer with many streams, so that all of them together get
                  at most `_PIECES_PER_SECOND`
    options       further options of `gss.decode.Engine`
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        rows: int = 64,
        queue: int = 256,
        piece: int | None = None,
        cache_bytes: int = 256 << 20,
        interval: float = 0.02,
        **options: Any,
    ) -> None:
        if piece is None:
            piece = 4096 if model.device.type == "cuda" else 256
        self.core = decode.Engine(model, rows=rows, piece=piece, cache_bytes=cache_bytes, **options)
        self.model, self.tokenizer, self.precision = model, tokenizer, self.core.precision
        self.rows, self.queue = rows, queue
        self.metrics, self._interval = Metrics(), interval
        self._running: dict[tuple[Job, int], Continuation] = {}
        self._posts: Posts = []
        self._over: set[Job] = set()  # jobs that end in this iteration
        self._sent_at = 0.0  # when the running streams were last sent their text
        self._reading_ahead = 0.0  # seconds by which prefill has had more time than decoding
        self._lock = threading.Condition()
        self._inbox: list[Job] = []
        self._outstanding: set[Job] = set()
        self._draining = self._abandoning = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gss-engine", daemon=True)

    # ---- for other threads

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none."""
        with self._lock:
            if self._draining or self._stopping:
                raise RefusedError("stopping")
            if self.outstanding + sum(job.n for job in jobs) > self.rows + self.queue:
                raise RefusedError("full")
            self._inbox += jobs
            self._outstanding.update(jobs)
            self._lock.notify_all()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drop jobs; their sinks are not called again."""
        with self._lock:
            for job in jobs:
                job.cancelled = True
            self._lock.notify_all()

    @property
    def outstanding(self) -> int:
        """Sequences that are running or waiting, or whose prompts are being read."""
        with self._lock:
            return sum(job.n for job in self._outstanding)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def drain(self, seconds: float) -> bool:
        """Accept no more jobs and wait for the present ones; returns whether all of them ended in time."""
        with self._lock:
            self._draining = True
            return self._lock.wait_for(lambda: not self._outstanding, seconds)

    def abandon(self) -> None:
        """Accept no more jobs and fail the present ones."""
        with self._lock:
            self._draining = self._abandoning = True
            self._lock.notify_all()

    def stop(self) -> None:
        """End the thread after its present iteration."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the engine's own thread

    def _run(self) -> None:
        try:
            with running(self.model, self.precision):  # entered once, so that weights are not rounded at every step
                while not self._stopping:
                    try:
                        self._iterate()
                    except Exception:
                        log.exception("the engine failed, and with it every request in progress")
                        try:
                            self.core.reset()
                        finally:
                            self._fail_all("internal")
        finally:  # even if a broken device makes the reset fail
            with self._lock:
                self._stopping = True
            self._fail_all("stopping")

    def _iterate(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stopping or self._inbox or self._outstanding)
            taken, self._inbox = self._inbox, []
        for job in taken:
            self.core.submit(job)
        self._drop_unwanted()
        core, metrics = self.core, self.metrics
        if core.admit() and (self._reading_ahead <= 0 or not core.running):
            started = time.perf_counter()
            self._handle(core.prefill())
            self._reading_ahead += time.perf_counter() - started
            metrics.prompt_tokens.set(core.prompts.prompt_tokens)
            metrics.prompt_tokens_read.set(core.prompts.tokens_read)
            metrics.prompt_tokens_reused.set(core.prompts.tokens_reused)
        if core.running:
            started = time.perf_counter()
            self._handle(core.step())
            seconds = time.perf_counter() - started
            metrics.step_seconds.observe(seconds)
            # A second of decoding pays for a second of prefill with full pieces. It pays for less while many sequences
            # run and a piece is small, which would hold all of them up and costs little more once other prompts can be
            # read beside it. It pays for more while more prompts wait than sequences run.
            waiting, rows = core.prompts, max(1, core.running)
            worth = max(waiting.fullness, len(waiting) / rows, min(1.0, 4 / rows))
            self._reading_ahead = max(0.0, self._reading_ahead - seconds * worth)
        else:
            self._reading_ahead = 0.0
        self._deliver()

    def _drop_unwanted(self) -> None:
        now = time.monotonic()
        with self._lock:
            unwanted = {j for j in self._outstanding if j.cancelled or j.deadline < now or self._abandoning}
            unwanted.difference_update(self._inbox)  # the next iteration handles these
        if not unwanted:
            return
        failure: Failure = "stopping" if self._abandoning else "timeout"
        self._posts += [(job, Piece(0, failure=failure)) for job in unwanted if not job.cancelled]
        self.core.cancel(lambda job: job in unwanted)
        self._running = {key: row for key, row in self._running.items() if key[0] not in unwanted}
        self._over |= unwanted

    def _handle(self, outputs: list[Output]) -> None:
        """Turn tokens into text; a row that has ended, by itself or at a stop string, gets its last piece."""
        for output in outputs:
            job, index = output.request, output.index
            assert isinstance(job, Job)
            if output.prompt_scores is not None:
                self._posts.append((job, Piece(0, prompt_scores=output.prompt_scores)))
                continue
            begun = (job, index) in self._running
            if not begun:
                self._running[job, index] = Continuation(self.tokenizer, job.prompt, job.stop)
            row = self._running[job, index]
            row.accept(output.tokens, output.scores, output.finish)
            if row.finish or (job.streaming and not begun):  # the first token is sent at once
                self._take(job, index)
            if row.finish:
                del self._running[job, index]
                if output.finish is None:  # ended by a stop string, which the core does not know
                    self.core.cancel(partial(is_, job), index)
                job.ended += 1
                if job.ended == job.n:
                    self._over.add(job)

    def _take(self, job: Job, index: int) -> None:
        shown = self._running[job, index].take()
        if shown is not None:
            self.metrics.generated_tokens.add(shown.tokens)
            self._posts.append((job, Piece(index, *shown)))

    def _deliver(self) -> None:
        now = time.monotonic()
        interval = max(self._interval, len(self._running) / _PIECES_PER_SECOND)
        if now - self._sent_at >= interval:  # all streams together, so that the event loop wakes up once
            self._sent_at = now
            for job, index in self._running:
                if job.streaming:
                    self._take(job, index)
        self.metrics.running.set(self.core.running)
        self.metrics.waiting.set(self.core.waiting + len(self.core.prompts))
        self.metrics.cache_bytes.set(self.core.cache.nbytes)
        posts, self._posts = self._posts, []
        _send(posts)
        if self._over:
            with self._lock:
                self._outstanding -= self._over
                self._lock.notify_all()
            self._over = set()

    def _fail_all(self, failure: Failure) -> None:
        with self._lock:
            self._posts = [(job, Piece(0, failure=failure)) for job in self._outstanding if not job.cancelled]
            self._inbox.clear()
            self._outstanding.clear()
            self._lock.notify_all()
        self._running = {}
        self._deliver()


def _send(posts: Posts) -> None:
    """Hand pieces to the event loops that wait for them, with one wake-up per loop.

    If there are many, wait until they have been sent. Python runs one thread at a time, and two busy threads that take
    turns at every system call lose more than they gain.
    """
    by_loop: dict[asyncio.AbstractEventLoop | None, Posts] = {}
    for job, piece in posts:
        by_loop.setdefault(job.loop, []).append((job, piece))
    for loop, own in by_loop.items():
        sent = threading.Event()
        if loop is None:
            _call_sinks(own, sent.set)
            continue
        try:
            loop.call_soon_threadsafe(_call_sinks, own, partial(loop.call_soon, sent.set))  # after those that wake
        except RuntimeError:  # the loop is closed: nobody is waiting
            for job, _ in own:
                job.cancelled = True
            continue
        if len(own) >= _MANY:
            sent.wait(_PATIENCE)


def _call_sinks(posts: Posts, then: Callable[[], object]) -> None:
    for job, piece in posts:
        job.sink(piece)
    then()
