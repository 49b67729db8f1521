"""Prefill: prompts are read in pieces, in parallel within a piece.

`read` reads a batch of equally long sequences. `Prefill` reads prompts of any lengths, one piece per round, so that
running sequences never wait long. Prompts take turns, and those whose next pieces are equally long are read as one
batch. A prompt starts from the longest prefix whose state is cached. If another prompt is about to read the same
tokens, it waits for that one. Either way, a shared prefix is read once.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gss.decode.request import Request, Score
from gss.decode.sampler import score
from gss.model import LanguageModel
from gss.nn.context import Context, shared_pieces
from gss.nn.state import ModelState

# States cached per prompt, besides the one at its end: enough to share prefixes, and leaves room for other prompts.
_CACHED = 16
# Logits computed at a time when a prompt's tokens are scored.
_LOGIT_ELEMENTS = 1 << 22

Tokens = npt.NDArray[np.int64]
_Key = tuple[int, bytes]
"""Length, and a digest of that many tokens."""


@torch.no_grad()
def read(
    model: LanguageModel,
    tokens: Tensor,
    state: ModelState | None = None,
    piece: int | None = None,
    context: Context | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[Tensor, ModelState]:
    """Read tokens [B, L] in pieces of bounded memory: logits [B, V] after the last one, and the state there.

    A piece is 4,096 tokens of each row; on a GPU, where short pieces wait for the host, 65,536 tokens of all rows
    together if that is more. The ranks of a `context` read a piece each at the same time, and all get the logits and
    the state. `progress` is called with the share read so far after each piece.
    """
    if tokens.numel() == 0:
        raise ValueError("there is nothing to read: give at least one token")
    model.check_tokens(tokens)
    if piece is None:
        piece = max(4096, 65_536 // tokens.shape[0]) if tokens.is_cuda else 4096
    for first, length, sharing in shared_pieces(tokens.shape[1], piece, context):
        hidden, state = model.hidden(tokens[:, first : first + length], state, context=sharing)
        last = sharing.gather(hidden[:, -1])[-1] if sharing else hidden[:, -1]
        if progress:
            progress((first + length) / tokens.shape[1])
    assert state is not None
    return model.logits(last), state


class Entry(NamedTuple):
    """The state and the logits after some tokens."""

    state: ModelState
    """Of one sequence."""
    logits: Tensor
    """[1, V] after the last token."""

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.logits.nbytes


class PrefixCache:
    """Entries by the tokens that led to them, up to `max_bytes` in total; 0 caches nothing.

    Entries never change, so any number of sequences can continue from one. The least recently used are evicted first.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[_Key, Entry] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, tokens: Tokens) -> tuple[int, Entry | None]:
        """The length of the longest cached prefix of the tokens, and its entry."""
        digest = hashlib.blake2b(digest_size=16)
        done = 0
        found: _Key | None = None
        for length in sorted({size for size, _ in self._entries if size <= len(tokens)}):
            digest.update(tokens[done:length].tobytes())
            done = length
            key = (length, digest.digest())
            if key in self._entries:
                found = key
        if found is None:
            return 0, None
        self._entries.move_to_end(found)
        return found[0], self._entries[found]

    def put(self, tokens: Tokens, entry: Entry) -> None:
        """Cache the entry of these tokens, evicting the least recently used ones if necessary."""
        if entry.nbytes > self.max_bytes:
            return
        key = (len(tokens), hashlib.blake2b(tokens.tobytes(), digest_size=16).digest())
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        self._entries[key] = entry
        self.nbytes += entry.nbytes
        while self.nbytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.nbytes -= dropped.nbytes


@dataclass(eq=False)
class PartialPrompt:
    """A prompt that has been read as far as `at`."""

    request: Request
    tokens: Tokens
    at: int = 0
    state: ModelState | None = None
    logits: Tensor | None = None
    """[1, V] after the last token that was read."""
    marks: set[int] = field(default_factory=set)
    """Lengths at which other prompts wait for its state."""
    leader: "tuple[PartialPrompt, int] | None" = None
    """Another prompt that is about to read the same tokens, and the length at which to continue from its state."""
    fresh: bool = True
    """Whether it has not looked for a prefix in the cache yet."""
    scores: list[Score] = field(default_factory=list)
    dropped: bool = False

    @property
    def done(self) -> bool:
        return self.at == len(self.tokens)

    @property
    def cacheable(self) -> bool:
        """Whether its states depend only on its tokens, and it does not need the scores of all of them."""
        return not self.request.score_prompt and self.request.state is None

    @property
    def waits(self) -> bool:
        """Whether its leader has not reached the end of the common prefix yet."""
        return self.leader is not None and not self.leader[0].dropped and self.leader[0].at < self.leader[1]


class Prefill:
    """The prompts that are being read."""

    def __init__(self, model: LanguageModel, cache: PrefixCache, piece: int) -> None:
        self._model, self._cache, self.piece = model, cache, piece
        self._device = model.device
        self._state_bytes = model.initial_state(1).nbytes
        self.bounded = model.bounded_state
        """Whether the size of a state does not depend on how much was read."""
        self._waiting: deque[PartialPrompt] = deque()
        self.prompt_tokens = 0
        """Tokens of completed prompts."""
        self.tokens_read = 0
        """Tokens of prompts, completed or not, that the model has read."""
        self.tokens_reused = 0
        """Tokens that need not be read thanks to cached states."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def fullness(self) -> float:
        """The tokens left to read, as a share of a piece, at most 1."""
        return min(1.0, sum(len(prompt.tokens) - prompt.at for prompt in self._waiting) / self.piece)

    def add(self, request: Request) -> None:
        prompt = PartialPrompt(request, np.asarray(request.prompt, dtype=np.int64), state=request.state)
        if prompt.cacheable and self._state_bytes <= self._cache.max_bytes:
            self._follow(prompt)
        self._waiting.append(prompt)

    def requests(self) -> list[Request]:
        return [prompt.request for prompt in self._waiting]

    def drop(self, dropped: Callable[[Request], bool]) -> None:
        for prompt in self._waiting:
            prompt.dropped = dropped(prompt.request)
        self._waiting = deque(prompt for prompt in self._waiting if not prompt.dropped)

    @torch.no_grad()
    def round(self) -> list[PartialPrompt]:
        """Read a piece of the next prompt, and of those that can be batched with it; returns the prompts that are
        done.
        """
        free = [prompt for prompt in self._waiting if not prompt.waits]
        for prompt in free:
            if prompt.fresh and prompt.cacheable:
                prompt.at, entry = self._cache.longest(prompt.tokens)
                prompt.state, prompt.logits = entry or (None, None)
                self.tokens_reused += prompt.at
            prompt.fresh = False
        unread = [prompt for prompt in free if not prompt.done]
        if unread:
            self._read(list(self._side_by_side(unread)))
        done = [prompt for prompt in self._waiting if prompt.done]
        self.prompt_tokens += sum(len(prompt.tokens) for prompt in done)
        self._waiting = deque(prompt for prompt in self._waiting if not prompt.done)
        return done

    def _follow(self, prompt: PartialPrompt) -> None:
        """Find the prompt in progress that shares the longest prefix, and have its state there cached for this one."""
        best = 0
        for other in self._waiting:
            size = min(len(other.tokens), len(prompt.tokens))
            differ = np.flatnonzero(other.tokens[:size] != prompt.tokens[:size])
            shared = int(differ[0]) if len(differ) else size
            mark = shared if shared == len(other.tokens) else shared // self.piece * self.piece
            if mark > max(best, other.at) and other.request.state is None:
                best, prompt.leader = mark, (other, mark)
        if prompt.leader:
            prompt.leader[0].marks.add(best)

    def _side_by_side(self, unread: list[PartialPrompt]) -> Iterator[PartialPrompt]:
        """The first prompt, and others whose next pieces have the same length, up to a piece's tokens in total.

        If states grow, all must have the same length, because joined states are padded to the longest.
        """
        first = unread[0]
        size = self._end(first) - first.at
        room = max(1, self.piece // size)
        for prompt in unread:
            alone = prompt.request.score_prompt or first.request.score_prompt
            fits = self._end(prompt) - prompt.at == size and (self.bounded or _read(prompt) == _read(first))
            if room and fits and (prompt is first or not alone):
                room -= 1
                yield prompt

    def _end(self, prompt: PartialPrompt) -> int:
        """Where the next piece ends: pieces end at multiples of their size, so that equal prefixes meet."""
        return min(prompt.at // self.piece * self.piece + self.piece, len(prompt.tokens))

    def _read(self, group: list[PartialPrompt]) -> None:
        size = self._end(group[0]) - group[0].at
        parts = np.stack([prompt.tokens[prompt.at : prompt.at + size] for prompt in group])
        tokens = torch.from_numpy(parts).to(self._device)
        state = None
        if any(prompt.state for prompt in group):
            fresh = self._model.initial_state(1)
            state = ModelState.join([prompt.state or fresh for prompt in group])
        hidden, state = self._model.hidden(tokens, state)
        assert state is not None
        logits = self._model.logits(hidden[:, -1])
        self.tokens_read += tokens.numel()
        for row, prompt in enumerate(group):
            if prompt.request.score_prompt:
                self._score(prompt, hidden[row], tokens[row])
            prompt.at += size
            prompt.state = state if len(group) == 1 else state.select([row])
            prompt.logits = logits[row : row + 1].clone()
            spacing = self.piece * max(1, -(-(len(prompt.tokens) // self.piece) // _CACHED))
            useful = prompt.done or prompt.at in prompt.marks or prompt.at % spacing == 0
            if prompt.request.state is None and useful:
                self._cache.put(prompt.tokens[: prompt.at], Entry(prompt.state, prompt.logits))
            self._waiting.remove(prompt)
            self._waiting.append(prompt)

    def _score(self, prompt: PartialPrompt, hidden: Tensor, tokens: Tensor) -> None:
        """Score a piece's tokens, each by the logits before it; the first by those that ended the piece before."""
        top = prompt.request.logprobs or 0
        prompt.scores += [(None, ())] if prompt.logits is None else scored(prompt.logits, tokens[:1], top)
        step = max(1, _LOGIT_ELEMENTS // self._model.config.vocab_size)
        for part, targets in zip(hidden[:-1].split(step), tokens[1:].split(step), strict=True):
            if len(targets):
                prompt.scores += scored(self._model.logits(part), targets, top)


def _read(prompt: PartialPrompt) -> int:
    """Tokens that a prompt's state has read, including those before the request."""
    return 0 if prompt.state is None else int(prompt.state.position[0])


def scored(logits: Tensor, tokens: Tensor, top: int) -> list[Score]:
    """For each row of logits [R, V], the log-probability of its token, and the `top` likeliest tokens with theirs."""
    return score_lists(*(part.tolist() for part in score(logits, tokens, top)))


def score_lists(logprobs: list[float], top: list[list[float]], tokens: list[list[int]]) -> list[Score]:
    """Scores, one per token, from the results of `gss.decode.sampler.score`."""
    rows = zip(logprobs, tokens, top, strict=True)
    return [(own, tuple(zip(best, values, strict=True))) for own, best, values in rows]
