"""The next token of every row: rows that are asked for the same choose together, and each draws what it would alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gss.generate import Sampling, choose
from gss.serve.row import Row

Score = tuple[float | None, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the likeliest tokens in its place with theirs."""


class Chooser:
    """Chooses for some rows, step after step."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        alike: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(row.job.sampling, []).append(place)
        self._alike = list(alike.items())
        self._scored = [place for place, row in enumerate(rows) if row.job.logprobs is not None]

    @torch.no_grad()
    def accept(self, logits: Tensor) -> None:
        """Give each row its next token, from logits [B, V]."""
        if not torch.isfinite(logits).all():
            raise ValueError("the model gives logits that are not finite: its weights or its checkpoint are broken")
        if len(self._alike) == 1:
            ((sampling, places),) = self._alike
            tokens = self._choose(logits, sampling, places)
        else:
            tokens = [0] * len(self._rows)
            for sampling, places in self._alike:
                for place, token in zip(places, self._choose(logits[places], sampling, places), strict=True):
                    tokens[place] = token
        if not self._scored:
            for row, token in zip(self._rows, tokens, strict=True):
                row.accept(token)
            return
        most = max(self._rows[place].job.logprobs or 0 for place in self._scored)
        picked = torch.tensor([tokens[place] for place in self._scored], device=logits.device)
        scores = dict(zip(self._scored, scored(logits[self._scored], picked, most), strict=True))
        for place, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            row.accept(token, *scores.get(place, ()))

    def _choose(self, logits: Tensor, sampling: Sampling, places: list[int]) -> list[int]:
        if sampling.temperature == 0 and sampling.repetition_penalty == 1:
            return logits.argmax(-1).tolist()
        rows = [self._rows[place] for place in places]
        marks = [row.seen for row in rows if row.seen is not None]
        seen = torch.stack(marks) if marks else None
        return choose(logits.cpu(), sampling, seen, [row.generator for row in rows]).tolist()


def scored(logits: Tensor, tokens: Tensor, top: int) -> list[Score]:
    """For each row of logits [R, V]: log p of its token, and the `top` likeliest tokens with theirs."""
    logs = logits.float().log_softmax(-1)
    chosen = logs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    if not top:
        return [(value, ()) for value in chosen]
    best = logs.topk(min(top, logs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(own, tuple(zip(*pair, strict=True))) for own, pair in zip(chosen, pairs, strict=True)]
