"""Prompts being read, a piece at a time, so that what is being produced beside them does not have to wait for long.

Prompts take turns, and those whose next pieces are equally long are read side by side. A prompt starts from the longest
beginning whose state is kept; where another one that is being read will soon have gone through the same tokens, it
waits for that. Either way a shared beginning is read once.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gss.data import Tokenizer
from gss.generate import TextPieces
from gss.model import LanguageModel
from gss.nn.state import ModelState
from gss.serve.choosing import Score, scored
from gss.serve.job import Job, TokenScore
from gss.serve.prefix_cache import Entry, PrefixCache, Tokens

# States kept of one prompt, its end not counted: enough to share beginnings, few enough to leave room for others'.
_KEPT = 16
# Logits computed at a time when a prompt's tokens are scored.
_LOGIT_ELEMENTS = 1 << 22


@dataclass(eq=False)
class Reading:
    """A prompt on its way."""

    job: Job
    tokens: Tokens
    at: int = 0
    """Tokens read."""
    after: Entry | None = None
    """The model after those."""
    marks: set[int] = field(default_factory=set)
    """Lengths at which others wait for its state."""
    leader: "tuple[Reading, int] | None" = None
    """Another prompt that will have read the same tokens, and the length at which its state serves."""
    looked: bool = False
    """Whether it has looked for a beginning whose state is kept."""
    scores: list[TokenScore] = field(default_factory=list)
    text: TextPieces | None = None
    """The text of its tokens, where they are scored."""
    characters: int = 0
    gone: bool = False
    """Whether it was cancelled."""

    @property
    def done(self) -> bool:
        """Whether all of it has been read."""
        return self.at == len(self.tokens)


class Readings:
    """The prompts that are being read."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, cache: PrefixCache, piece: int) -> None:
        self._model, self._tokenizer, self._cache, self._piece = model, tokenizer, cache, piece
        self._device = model.embedding.weight.device
        self._state_bytes = model.initial_state(1).nbytes
        self._waiting: deque[Reading] = deque()
        self.tokens_read = 0
        self.tokens_reused = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def fullness(self) -> float:
        """How much of a piece there is to read, up to 1."""
        return min(1.0, sum(len(reading.tokens) - reading.at for reading in self._waiting) / self._piece)

    def add(self, job: Job) -> None:
        """Begin a prompt."""
        reading = Reading(job, np.asarray(job.prompt, dtype=np.int64))
        self._follow(reading)
        self._waiting.append(reading)

    def jobs(self) -> list[Job]:
        """The jobs whose prompts are being read."""
        return [reading.job for reading in self._waiting]

    def drop(self, dropped: Callable[[Job], bool]) -> None:
        """Forget the prompts of some jobs."""
        for reading in self._waiting:
            reading.gone = dropped(reading.job)
        self._waiting = deque(reading for reading in self._waiting if not reading.gone)

    @torch.no_grad()
    def round(self) -> list[Reading]:
        """Read a piece of the next prompt, and of those beside which it costs little; the ones that are done with."""
        free = [reading for reading in self._waiting if not self._waits(reading)]
        for reading in free:
            if not reading.looked:
                self._resume(reading)
        unread = [reading for reading in free if not reading.done]
        if unread:
            self._read(list(self._side_by_side(unread)))
        done = [reading for reading in self._waiting if reading.done]
        self._waiting = deque(reading for reading in self._waiting if not reading.done)
        return done

    def _follow(self, reading: Reading) -> None:
        """Find the prompt under way that shares the longest beginning, if its state there can be kept for this one."""
        if reading.job.score_prompt or self._state_bytes > self._cache.max_bytes:
            return
        best = 0
        for other in self._waiting:
            size = min(len(other.tokens), len(reading.tokens))
            differ = np.flatnonzero(other.tokens[:size] != reading.tokens[:size])
            shared = int(differ[0]) if len(differ) else size
            mark = shared if shared == len(other.tokens) else shared // self._piece * self._piece
            if mark > max(best, other.at):
                best, reading.leader = mark, (other, mark)
        if reading.leader:
            reading.leader[0].marks.add(best)

    @staticmethod
    def _waits(reading: Reading) -> bool:
        if reading.leader is None:
            return False
        leader, mark = reading.leader
        return not leader.gone and leader.at < mark

    def _resume(self, reading: Reading) -> None:
        """Start from the longest beginning whose state is kept."""
        reading.looked = True
        if not reading.job.score_prompt:
            reading.at, reading.after = self._cache.longest(reading.tokens)
            self.tokens_reused += reading.at

    def _side_by_side(self, unread: list[Reading]) -> Iterator[Reading]:
        """The first prompt, and others whose next pieces are as long as its, up to a piece's tokens in all."""
        first = unread[0]
        size = self._next(first) - first.at
        room = max(1, self._piece // size)
        for reading in unread:
            alone = reading.job.score_prompt or first.job.score_prompt
            if room and self._next(reading) - reading.at == size and (reading is first or not alone):
                room -= 1
                yield reading

    def _next(self, reading: Reading) -> int:
        """Where the next piece ends: pieces end at multiples of their size, so that equal beginnings meet."""
        return min(reading.at // self._piece * self._piece + self._piece, len(reading.tokens))

    def _read(self, group: list[Reading]) -> None:
        end = self._next(group[0])
        size = end - group[0].at
        parts = np.stack([reading.tokens[reading.at : reading.at + size] for reading in group])
        tokens = torch.from_numpy(parts).to(self._device)
        state = None
        if any(reading.after for reading in group):
            fresh = self._model.initial_state(1)
            state = ModelState.join([reading.after.state if reading.after else fresh for reading in group])
        hidden, state = self._model.hidden(tokens, state)
        assert state is not None
        logits = self._model.logits(hidden[:, -1])
        self.tokens_read += tokens.numel()
        for row, reading in enumerate(group):
            if reading.job.score_prompt:
                self._score(reading, hidden[row], size)
            reading.at += size
            own = state if len(group) == 1 else state.select([row])
            reading.after = Entry(own, logits[row : row + 1].clone())
            if self._worth_keeping(reading):
                self._cache.put(reading.tokens[: reading.at], reading.after)
            self._waiting.remove(reading)
            self._waiting.append(reading)

    def _worth_keeping(self, reading: Reading) -> bool:
        pieces = len(reading.tokens) // self._piece
        spacing = self._piece * max(1, -(-pieces // _KEPT))
        return reading.done or reading.at in reading.marks or reading.at % spacing == 0

    def _score(self, reading: Reading, hidden: Tensor, size: int) -> None:
        """Score the piece's tokens, the first by the logits before the piece: a token is scored by what came before."""
        wanted = reading.job.logprobs or 0
        rows = torch.from_numpy(reading.tokens[reading.at : reading.at + size]).to(self._device)
        scores: list[Score] = []
        if reading.after is None:
            scores.append((None, ()))
        else:
            scores += scored(reading.after.logits, rows[:1], wanted)
        step = max(1, _LOGIT_ELEMENTS // self._model.config.vocab_size)
        for part, targets in zip(hidden[:-1].split(step), rows[1:].split(step), strict=True):
            if len(targets):
                scores += scored(self._model.logits(part), targets, wanted)
        reading.text = reading.text or TextPieces(self._tokenizer)
        for token, (logprob, top) in zip(rows.tolist(), scores, strict=True):
            reading.scores.append(TokenScore(token, reading.characters, logprob, top))
            reading.characters += len(reading.text.push(token))
