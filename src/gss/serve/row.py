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
        self.eos_id = None if job.ignore_eos else tokenizer.eos_id
        self.left = job.max_tokens
        """Tokens that may still come."""
        self.careful = bool(job.stop) or job.logprobs is not None or self.seen is not None
        """Whether it must have each token before the next one is chosen."""
        self.finish: Finish | None = None
        self._text = TextPieces(tokenizer, job.prompt)
        self._stops = StopStrings(job.stop)
        self._new: list[int] = []  # tokens whose text is not known yet
        self._shown = ""  # text since the last piece
        self._scores: list[TokenScore] = []
        self._decoded = self._released = 0  # characters of text so far: known, and let through by the stop strings
        self._fresh = 0

    def accept(self, tokens: list[int], logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> None:
        """Take the next tokens (one at a time, if `careful`); `finish` is set when the last of them was the last."""
        if tokens[-1] == self.eos_id:
            tokens = tokens[:-1]
            self.finish = "stop"
        self._fresh += len(tokens)
        self.left -= len(tokens)
        self._new += tokens
        if self.careful and tokens:
            self._look_at(tokens[0], logprob, top)
        if not self.left and not self.finish:
            self.finish = "length"

    def take(self) -> Piece | None:
        """What has come since the last piece; None when that is nothing that could be shown."""
        self._show()
        if self.finish and not self._stops.ended:
            self._release(self._stops.push(self._text.rest()))
            self._release(self._stops.rest())
        ready = self._scores
        if ready and (not self.finish or self._stops.ended):
            ready = [score for score in ready if score.offset < self._released]
        if not (self._shown or ready or self.finish):
            return None
        piece = Piece(self.index, self._shown, self._fresh, tuple(ready), self.finish)
        self._shown, self._fresh, self._scores = "", 0, self._scores[len(ready) :]
        return piece

    def _look_at(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        if self.seen is not None:
            self.seen[token] = True
        if logprob is not None:
            self._scores.append(TokenScore(token, self._decoded, logprob, top[: self.job.logprobs]))
        self._show()
        if self._stops.ended:
            self.finish = "stop"

    def _show(self) -> None:
        if self._new:
            text = self._text.push(*self._new)
            self._new.clear()
            self._decoded += len(text)
            self._release(self._stops.push(text) if self.job.stop else text)

    def _release(self, text: str) -> None:
        self._shown += text
        self._released += len(text)
