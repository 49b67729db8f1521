"""The thread that runs the model: one batch in which sequences join and leave between steps.

A turn of the loop takes in new jobs, drops those that are cancelled or late, reads a piece of a prompt and produces a
token for every running sequence. Where both have work, reading gets about half of the time: a long prompt slows running
sequences down but does not stall them. Jobs are taken in the order in which they came. What a sequence produces does
not depend on what runs beside it (but for rounding, in bfloat16).

Knows jobs, models and states; nothing of HTTP or of event loops.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from gss.data import Tokenizer
from gss.decode import Decoder, decoder
from gss.model import LanguageModel
from gss.nn.state import ModelState
from gss.precision import resolved, running
from gss.serve.choosing import Chooser
from gss.serve.job import Failure, Job, Piece
from gss.serve.metrics import Metrics
from gss.serve.prefix_cache import PrefixCache
from gss.serve.reading import Reading, Readings
from gss.serve.row import Row

if TYPE_CHECKING:
    from gss.graph_decode import GraphDecoder

log = logging.getLogger("gss.serve")

# Making and sending a piece takes almost 0.1 ms, whatever is in it.
_PIECES_A_SECOND = 640

Posts = list[tuple[Job, Piece]]


class QueueFullError(Exception):
    """There is no room for a job: as many wait as may."""


class DrainingError(Exception):
    """The engine takes no more jobs: it is about to stop."""


def hand_over(posts: Posts) -> None:
    """Give each piece to its job, in the engine's own thread."""
    for job, piece in posts:
        job.sink(piece)


class Engine:
    """Runs jobs on a model until it is stopped.

    rows          sequences in the batch at most: with a bounded state, memory is known from the start
    queue         sequences that may wait beside those
    piece         tokens of prompts that are read between two steps; by default 256, on a GPU 4,096, where launching
                  the work takes longer than a short piece's work
    cache_bytes   memory for the states of prompts (0: none are kept)
    precision     auto, fp32 or bf16 (autocast); auto: bf16 on a GPU, else fp32
    interval      seconds between two pieces of one stream; what comes meanwhile is one piece. With many streams it
                  is longer, so that all of them together are sent no more than `_PIECES_A_SECOND`
    post          takes the pieces of a turn, in the engine's thread; must not raise
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
        precision: str = "auto",
        interval: float = 0.02,
        post: Callable[[Posts], None] = hand_over,
        metrics: Metrics | None = None,
    ) -> None:
        self._device = model.embedding.weight.device
        if piece is None:
            piece = 4096 if self._device.type == "cuda" else 256
        if rows < 1 or piece < 1:
            raise ValueError(f"a batch has at least 1 row and a piece at least 1 token, not {rows} and {piece}")
        self.model, self.tokenizer = model, tokenizer
        self.rows, self.queue = rows, queue
        self.precision = resolved(precision, model)
        self.cache = PrefixCache(cache_bytes)
        self.metrics = metrics or Metrics()
        self._interval, self._post_all = interval, post
        self._readings = Readings(model, tokenizer, self.cache, piece)
        self._decoder = self._empty_decoder()
        self._running: list[Row] = []
        self._chooser = Chooser([])
        self._next = torch.zeros(0, dtype=torch.int64, device=self._device)  # the running rows' last tokens
        self._waiting: deque[Job] = deque()
        self._posts: Posts = []
        self._over: set[Job] = set()  # jobs that end with this turn
        self._sent_at = 0.0  # when the running streams were last sent what they have
        self._reading_ahead = 0.0  # seconds by which reading has had more time than producing
        self._lock = threading.Condition()
        self._inbox: list[Job] = []
        self._outstanding: set[Job] = set()
        self._draining = self._abandoning = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gss-engine", daemon=True)

    # ---- for other threads

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take in jobs, all or none."""
        with self._lock:
            if self._draining or self._stopping:
                raise DrainingError
            if self.outstanding + sum(job.n for job in jobs) > self.rows + self.queue:
                raise QueueFullError
            self._inbox += jobs
            self._outstanding.update(jobs)
            self._lock.notify_all()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drop jobs; nothing more is heard of them."""
        with self._lock:
            for job in jobs:
                job.cancelled = True
            self._lock.notify_all()

    @property
    def outstanding(self) -> int:
        """Sequences that are running, being read for, or waiting."""
        with self._lock:
            return sum(job.n for job in self._outstanding)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether it works."""
        return self._thread.is_alive() and not self._stopping

    def drain(self, seconds: float) -> bool:
        """Take no more jobs and wait for those that are there; whether they all ended in time."""
        with self._lock:
            self._draining = True
            return self._lock.wait_for(lambda: not self._outstanding, seconds)

    def abandon(self) -> None:
        """Take no more jobs and fail those that are there."""
        with self._lock:
            self._draining = self._abandoning = True
            self._lock.notify_all()

    def stop(self) -> None:
        """End the thread after the turn it is in."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the engine's own thread

    def _run(self) -> None:
        with running(self.model, self.precision):  # all along: weights are rounded once, not at every step
            self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._stopping or self._inbox or self._outstanding)
                if self._stopping:
                    return
                self._waiting.extend(self._inbox)
                self._inbox.clear()
            try:
                self._turn()
            except Exception:
                log.exception("the engine failed; what it was working on is given up")
                self._give_up()

    def _turn(self) -> None:
        self._drop_unwanted()
        self._admit()
        if len(self._readings) and (self._reading_ahead <= 0 or not self._running):
            started = time.perf_counter()
            self._begin(self._readings.round())
            self._reading_ahead += time.perf_counter() - started
            self.metrics.prompt_tokens_read.set(self._readings.tokens_read)
            self.metrics.prompt_tokens_reused.set(self._readings.tokens_reused)
        if self._running:
            started = time.perf_counter()
            self._step()
            seconds = time.perf_counter() - started
            self.metrics.step_seconds.observe(seconds)
            self._reading_ahead = max(0.0, self._reading_ahead - seconds * self._reading_share())
        else:
            self._reading_ahead = 0.0
        self._deliver()

    def _reading_share(self) -> float:
        """Seconds of reading that a second of producing is worth.

        One, for a full piece. Less for a small one while many sequences run: it holds them all up, and costs little
        more when others have come to be read beside it. More when more prompts wait than sequences run.
        """
        running = max(1, len(self._running))
        return max(self._readings.fullness, len(self._readings) / running, min(1.0, 4 / running))

    def _drop_unwanted(self) -> None:
        now = time.monotonic()
        with self._lock:
            unwanted = {j for j in self._outstanding if j.cancelled or j.deadline < now or self._abandoning}
            unwanted.difference_update(self._inbox)  # those come with the next turn
        if not unwanted:
            return
        failure: Failure = "stopping" if self._abandoning else "timeout"
        self._posts += [(job, Piece(0, failure=failure)) for job in unwanted if not job.cancelled]
        self._waiting = deque(job for job in self._waiting if job not in unwanted)
        self._readings.drop(lambda job: job in unwanted)
        self._leave([place for place, row in enumerate(self._running) if row.job in unwanted])
        self._over |= unwanted

    def _admit(self) -> None:
        taken = len(self._running) + sum(job.n for job in self._readings.jobs())
        while self._waiting and taken + self._waiting[0].n <= self.rows:
            job = self._waiting.popleft()
            taken += job.n
            self._readings.add(job)

    def _begin(self, read: list[Reading]) -> None:
        """Put the continuations of prompts that have been read into the batch, each with its first token."""
        rows: list[Row] = []
        sources: list[int] = []
        for number, reading in enumerate(read):
            job = reading.job
            if job.score_prompt:
                self._posts.append((job, Piece(0, prompt_scores=tuple(reading.scores))))
            self.metrics.prompt_tokens.add(len(reading.tokens))
            for index in range(job.n):
                row = Row(job, index, self.tokenizer, self.model.config.vocab_size)
                if job.max_tokens:
                    rows.append(row)
                    sources.append(number)
                else:
                    row.finish = "length"
                    self._end(row)
        if not rows:
            return
        entries = [reading.after for reading in read if reading.after is not None]
        assert len(entries) == len(read)
        chooser = Chooser(rows)
        tokens = chooser.accept(torch.cat([entries[number].logits for number in sources]))
        chooser.settle()
        for row in rows:
            if row.finish:
                self._end(row)
        going = [place for place, row in enumerate(rows) if not row.finish]
        if going:
            numbers = sorted({sources[place] for place in going})
            states = ModelState.join([entries[number].state for number in numbers])
            if len(going) != len(numbers):
                states = states.select([numbers.index(sources[place]) for place in going])
            for place in going:
                if rows[place].job.streaming:
                    self._take(rows[place])  # the first token is not kept waiting
            self._decoder.join(states)
            self._set_running(self._running + [rows[place] for place in going])
            self._next = torch.cat([self._next, tokens[going]])

    def _step(self) -> None:
        self._next = self._chooser.accept(self._decoder.step(self._next))
        finished = [place for place, row in enumerate(self._running) if row.finish]
        for place in finished:
            self._end(self._running[place])
        self._leave(finished)

    def _deliver(self) -> None:
        now = time.monotonic()
        interval = max(self._interval, len(self._running) / _PIECES_A_SECOND)
        if now - self._sent_at >= interval:  # all at once: whoever sends them wakes up once
            self._sent_at = now
            self._chooser.settle()
            for row in self._running:
                if row.job.streaming:
                    self._take(row)
        self.metrics.running.set(len(self._running))
        self.metrics.waiting.set(len(self._waiting) + len(self._readings))
        self.metrics.cache_bytes.set(self.cache.nbytes)
        if self._posts:
            posts, self._posts = self._posts, []
            self._post_all(posts)
        if self._over:
            with self._lock:
                self._outstanding -= self._over
                self._lock.notify_all()
            self._over = set()

    def _take(self, row: Row) -> None:
        piece = row.take()
        if piece is not None:
            self.metrics.generated_tokens.add(piece.tokens)
            self._posts.append((row.job, piece))

    def _end(self, row: Row) -> None:
        """Deliver the last piece of a continuation; a job is over with the last of them."""
        self._take(row)
        row.job.ended += 1
        if row.job.ended == row.job.n:
            self._over.add(row.job)

    def _leave(self, places: list[int]) -> None:
        """Take rows out of the batch; the last ones fill their places, which moves the fewest."""
        if not places:
            return
        order = list(range(len(self._running)))
        for place in reversed(places):
            last = order.pop()
            if place < len(order):
                order[place] = last
        self._decoder.keep(order)
        self._next = self._next[order]
        self._set_running([self._running[place] for place in order])

    def _set_running(self, rows: list[Row]) -> None:
        self._chooser.settle()
        self._running = rows
        self._chooser = Chooser(rows)

    def _give_up(self) -> None:
        """After an error that is the engine's own: tell every job, and begin anew."""
        with self._lock:
            self._posts = [(job, Piece(0, failure="internal")) for job in self._outstanding if not job.cancelled]
            self._inbox.clear()
            self._outstanding.clear()
            self._lock.notify_all()
        self._readings.drop(lambda job: True)
        self._waiting.clear()
        self._running, self._next, self._chooser = [], self._next[:0], Chooser([])
        self._decoder = self._empty_decoder()
        self._deliver()

    def _empty_decoder(self) -> "Decoder | GraphDecoder":
        with running(self.model, self.precision):  # also where the engine is made, in another thread
            empty = decoder(self.model, self.model.initial_state(1))
        empty.keep([])
        return empty
