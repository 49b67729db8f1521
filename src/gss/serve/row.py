"""One continuation as text: the tokens that came, the text that may be shown, and when it ends."""

from collections.abc import Sequence

from gss.data import Tokenizer
from gss.decode.request import Finish, Score
from gss.generate import StopStrings, TextPieces
from gss.serve.job import Job, Piece, TokenScore


class Row:
    """A continuation of a job, from its tokens to its pieces."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        self.job, self.index = job, index
        self.finish: Finish | None = None
        self._text = TextPieces(tokenizer, job.prompt)
        self._stops = StopStrings(job.stop)
        self._new: list[int] = []  # tokens whose text is not known yet
        self._shown = ""  # text since the last piece
        self._scores: list[TokenScore] = []
        self._decoded = self._released = 0  # characters of text so far: known, and let through by the stop strings
        self._fresh = 0  # tokens since the last piece

    def accept(self, tokens: list[int], scores: Sequence[Score] = (), finish: Finish | None = None) -> None:
        """Take the next tokens, up to a stop string; `finish` says that they are the last."""
        if self.job.stop or scores:
            for number, token in enumerate(tokens):
                self._new.append(token)
                self._fresh += 1
                if scores:
                    self._scores.append(TokenScore(token, self._decoded, *scores[number]))
                self._show()
                if self._stops.ended:
                    self.finish = "stop"
                    return
        else:
            self._new += tokens
            self._fresh += len(tokens)
        self.finish = finish

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

    def _show(self) -> None:
        if self._new:
            text = self._text.push(*self._new)
            self._new.clear()
            self._decoded += len(text)
            self._release(self._stops.push(text) if self.job.stop else text)

    def _release(self, text: str) -> None:
        self._shown += text
        self._released += len(text)


def prompt_scores(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[Score]) -> tuple[TokenScore, ...]:
    """The scores of a prompt's tokens, each with where its text starts."""
    text, found, characters = TextPieces(tokenizer), [], 0
    for token, score in zip(prompt, scores, strict=True):
        found.append(TokenScore(int(token), characters, *score))
        characters += len(text.push(int(token)))
    return tuple(found)
