"""One continuation under way: the tokens that came, the text that may be shown, and when it ends."""

import torch

from gss.data import Tokenizer
from gss.generate import StopStrings, TextPieces
from gss.serve.job import Finish, Job, Piece, TokenScore


class Row:
    """A row of the running batch."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.job, self.index = job, index
        self.generator = torch.Generator()
        if job.sampling.temperature:
            self.generator.manual_seed((job.seed + index) % 2**63)
        self.seen: torch.Tensor | None = None
        if job.sampling.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[list(job.prompt)] = True
        self.last = 0
        self.sent_at = float("-inf")
        self.finish: Finish | None = None
        self._eos_id = None if job.ignore_eos else tokenizer.eos_id
        self._text = TextPieces(tokenizer, job.prompt)
        self._stops = StopStrings(job.stop)
        self._by_token = bool(job.stop) or job.logprobs is not None
        self._left = job.max_tokens
        self._new: list[int] = []  # tokens whose text is not known yet
        self._shown = ""  # text since the last piece
        self._scores: list[TokenScore] = []
        self._decoded = self._released = 0  # characters of text so far: known, and let through by the stop strings
        self._fresh = 0

    def accept(self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> None:
        """Take the next token; `finish` is set when it was the last."""
        if token == self._eos_id:
            self.finish = "stop"
            return
        self.last = token
        self._fresh += 1
        self._left -= 1
        if self.seen is not None:
            self.seen[token] = True
        if self._by_token:
            if logprob is not None:
                self._scores.append(TokenScore(token, self._decoded, logprob, top[: self.job.logprobs]))
            self._show(self._text.push(token))
            if self._stops.ended:
                self.finish = "stop"
                return
        else:
            self._new.append(token)
        if not self._left:
            self.finish = "length"

    def take(self, now: float) -> Piece | None:
        """What has come since the last piece; None when that is nothing that could be shown."""
        if self._new:
            self._show(self._text.push(*self._new))
            self._new.clear()
        if self.finish and not self._stops.ended:
            self._show(self._text.rest())
            self._release(self._stops.rest())
        ready = self._scores
        if not self.finish or self._stops.ended:
            ready = [score for score in ready if score.offset < self._released]
        if not (self._shown or ready or self.finish):
            return None
        piece = Piece(self.index, self._shown, self._fresh, tuple(ready), self.finish)
        self._shown, self._fresh, self._scores = "", 0, self._scores[len(ready) :]
        self.sent_at = now
        return piece

    def _show(self, text: str) -> None:
        self._decoded += len(text)
        self._release(self._stops.push(text))

    def _release(self, text: str) -> None:
        self._shown += text
        self._released += len(text)
