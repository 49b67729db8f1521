"""The paper's figures (its tables 1 and 2) by preset, to print next to our own."""

from typing import NamedTuple

LENGTHS = (512, 4096, 16_384, 65_536)
_Scores = tuple[float | None, ...]


class _Row(NamedTuple):
    parameters: str
    """As the tables state them; + is the paper's own, for a cautious estimate."""
    scores: dict[str, _Scores]
    """Token-level perplexity by corpus, at `LENGTHS` as far as reported; training length 4,096 (LM1B: 512)."""
    steps_per_second: float | None = None
    """Table 1: steps of 2^19 tokens (on Github, 2^20 by the text) on 64 TPUv4 cores, the same on all corpora of long
    documents."""
    hours: tuple[str, str] | None = None
    """Table 2: TPUv4 hours of training, on PG-19 and ArXiv, and on Github."""


def _long(books: _Scores, articles: _Scores, code: _Scores) -> dict[str, _Scores]:
    return {"PG-19": books, "ArXiv": articles, "Github": code}


_GSS = _long((14.01, 12.84, 12.94, 12.47), (3.57, 3.08, 3.08, 2.75), (2.68, 2.35, 2.31, 2.12))
_GSS_L = _long((12.48, 11.33, 11.16, 11.12), (3.29, 2.71, 2.72, 2.51), (2.31, 1.99, 2.20, 2.28))
_HYBRID_L = _long((11.45, 10.52, 10.44, 10.1), (2.94, 2.51, 18.27, 125.2), (2.34, 1.88, 1.74, 2.09))
_DSS = _long((14.51, 13.53, 692.1), (3.65, 3.13, 284.6), (3.65, 3.21, 242.7))
_ROWS = {
    "transformer-lm1b": _Row("182M", {"LM1B": (13.51,)}, 6.6),
    "dss-lm1b": _Row("188M", {"LM1B": (13.59,)}, 1.8),
    "gss-lm1b": _Row("190M", {"LM1B": (13.26,)}, 5.6),
    "dss": _Row("209M", _DSS, 1.8),
    "gss": _Row("192M", _GSS, 5.3, ("0.5k", "0.5k")),
    "gss-l": _Row("352M", _GSS_L, None, ("0.8k", "1.8k")),
    "gss-hybrid-l": _Row("373M", _HYBRID_L, None, ("0.8k", "1.8k")),
    "rec-fixed-skip": _Row("196M", _long((None, 11.55), (None, 2.36), (None, 2.04)), None, ("0.8k", "3k")),
    "feedback-lstm-single": _Row("196M+", _long((None, 11.31), (None, 2.33), (None, 2.07)), None, ("0.8k+", "3k+")),
    "feedback-fixed-skip": _Row("196M+", _long((None, 11.24), (None, 2.36), (None, 2.16)), None, ("0.8k+", "3k+")),
}

PERPLEXITY: dict[str, dict[str, dict[int, float]]] = {
    name: {
        corpus: {length: score for length, score in zip(LENGTHS, scores, strict=False) if score is not None}
        for corpus, scores in row.scores.items()
    }
    for name, row in _ROWS.items()
}
PARAMETERS = {name: row.parameters for name, row in _ROWS.items()}
STEPS_PER_SECOND = {name: row.steps_per_second for name, row in _ROWS.items() if row.steps_per_second}
TPU_HOURS = {
    corpus: {name: row.hours[corpus == "Github"] for name, row in _ROWS.items() if row.hours}
    for corpus in ("PG-19", "ArXiv", "Github")
}
