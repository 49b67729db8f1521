"""The next token of every row: rows that are asked for the same choose together, and each draws what it would alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gss.generate import Sampling, choose
from gss.serve.row import Row

Score = tuple[float | None, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the likeliest tokens in its place with theirs."""


class Chooser:
    """Chooses for some rows, step after step.

    Rows that must look at every token get it at once. The others, mostly all of them, get theirs when `settle` is
    called, or when one of them has had its last: a step then costs next to nothing a row.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        alike: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(row.job.sampling, []).append(place)
        self._alike = list(alike.items())
        self._scored = [place for place, row in enumerate(rows) if row.job.logprobs is not None]
        self._careful = [place for place, row in enumerate(rows) if row.careful]
        self._plain = [place for place, row in enumerate(rows) if not row.careful]
        self._ends = {rows[place].eos_id for place in self._plain} - {None}
        self._steps: list[list[int]] = []  # the tokens of all rows, since they were last handed out
        self._left = self._least_left()

    @torch.no_grad()
    def accept(self, logits: Tensor) -> Tensor:
        """The next token of each row, [B], from logits [B, V]; the rows take them."""
        if not torch.isfinite(logits).all():
            raise ValueError("the model gives logits that are not finite: its weights or its checkpoint are broken")
        if len(self._alike) == 1:
            ((sampling, places),) = self._alike
            chosen = self._choose(logits, sampling, places)
        else:
            chosen = torch.empty(len(self._rows), dtype=torch.int64, device=logits.device)
            for sampling, places in self._alike:
                chosen[places] = self._choose(logits[places], sampling, places)
        tokens: list[int] = chosen.tolist()
        if self._careful:
            scores: dict[int, Score] = {}
            if self._scored:
                most = max(self._rows[place].job.logprobs or 0 for place in self._scored)
                own = scored(logits[self._scored], chosen[self._scored], most)
                scores = dict(zip(self._scored, own, strict=True))
            for place in self._careful:
                self._rows[place].accept([tokens[place]], *scores.get(place, ()))
        self._steps.append(tokens)
        if len(self._steps) >= self._left or not self._ends.isdisjoint(tokens):
            self.settle()
        return chosen

    def settle(self) -> None:
        """Hand out the tokens that rows have not had yet."""
        if self._steps and self._plain:
            for place, tokens in zip(self._plain, self._columns(), strict=True):
                self._rows[place].accept(tokens)
            self._left = self._least_left()
        self._steps.clear()

    def _columns(self) -> list[list[int]]:
        if len(self._plain) == len(self._rows):
            return [list(column) for column in zip(*self._steps, strict=True)]
        return [[step[place] for step in self._steps] for place in self._plain]

    def _least_left(self) -> float:
        return min((self._rows[place].left for place in self._plain), default=float("inf"))

    def _choose(self, logits: Tensor, sampling: Sampling, places: list[int]) -> Tensor:
        if sampling.temperature == 0 and sampling.repetition_penalty == 1:
            return logits.argmax(-1)
        rows = [self._rows[place] for place in places]
        marks = [row.seen for row in rows if row.seen is not None]
        seen = torch.stack(marks) if marks else None
        return choose(logits.cpu(), sampling, seen, [row.generator for row in rows]).to(logits.device)


def scored(logits: Tensor, tokens: Tensor, top: int) -> list[Score]:
    """For each row of logits [R, V]: log p of its token, and the `top` likeliest tokens with theirs."""
    logs = logits.float().log_softmax(-1)
    chosen = logs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    if not top:
        return [(value, ()) for value in chosen]
    best = logs.topk(min(top, logs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(own, tuple(zip(*pair, strict=True))) for own, pair in zip(chosen, pairs, strict=True)]
