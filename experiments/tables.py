"""The tables of our studies, in the form of `gss.reproduce.tables`."""

import statistics
from collections.abc import Callable, Sequence

from gss.reproduce.settings import Target
from gss.reproduce.tables import LENGTH_KEYS, LENGTH_NAMES, NONE, Found, Result, Rows, by_seed, perplexities
from gss.reproduce.tables import markdown as plain_markdown
from gss.reproduce.tables import notes as papers_notes
from gss.reproduce.tables import table as papers_table

_NAMES = [*LENGTH_NAMES.values(), "whole"]
_WORDS = frozenset({
    "recipe", "start", "what it is", "vocabulary", "lossless", "run", "instead of", "ours", "hardware", "settings",
    "study", "layers",
})  # fmt: skip
_NOTES = {
    "init": "Perplexity by evaluation length. `slow` is the time constant, in tokens, that 5% of the modes exceed; "
    "`>1,000` is the share of modes slower than 1,000 tokens. Both are medians over layers, before and after training.",
    "rates": "Perplexity by evaluation length. The paper tuned the rate over these four values.",
    "vocabulary": "Bits per byte of the held-out text; compare rows with the same `held-out text`. `raw` divides by "
    "the UTF-8 bytes of the original text, `back` by those of the decoded tokens. A lossy vocabulary never predicts "
    "what it drops (`dropped`, of the raw bytes), so its `raw` is too low and its `back` describes an easier text. All "
    "rows have the same number of training tokens; `text seen` is how much text that was.",
}


def table(target: Target, found: Found) -> tuple[list[str], Rows]:
    """The header and the rows of a study's or a paper's table."""
    return _LAYOUTS.get(target.name, lambda found: papers_table(target, found))(found)


def notes(target: Target, found: Found) -> list[str]:
    """What has to be said under the table."""
    kind = target.name.removesuffix("-hybrid")
    said = papers_notes(target, found, about=kind != "init")
    return [_NOTES[kind], *said[1:]] if found and kind in _NOTES else said


def markdown(header: Sequence[str], rows: Rows) -> str:
    """A Markdown table with its columns aligned."""
    return plain_markdown(header, rows, _WORDS | {"commit"})


def _candidates(found: Found) -> tuple[list[str], Rows]:
    header = ["corpus", "start", "seeds", *_NAMES, "slow before", "after", ">1,000 before", "after", "what it is"]
    rows = []
    for trial, kept in by_seed(found):
        slow = [_over_layers(kept, when, lambda part: part["quantiles"]["0.95"]) for when in ("start", "end")]
        far = [_over_layers(kept, when, lambda part: part["share_over"]["1000"]) for when in ("start", "end")]
        rows.append(
            [
                trial.corpus.name,
                trial.system.label,
                str(len(kept)),
                *perplexities(kept),
                *(NONE if value is None else f"{value:,.0f}" for value in slow),
                *(NONE if value is None else f"{value:.1%}" for value in far),
                trial.system.about or NONE,
            ]
        )
    return header, rows


def _over_layers(kept: Sequence[Result], when: str, pick: Callable[[Result], float]) -> float | None:
    """The median over layers and seeds; None for a model without state spaces."""
    values = [pick(part) for result in kept for part in result["time_constants"][when]]
    return statistics.median(values) if values else None


def _rates(found: Found) -> tuple[list[str], Rows]:
    rows = [[t.corpus.name, t.system.label, str(len(kept)), *perplexities(kept)] for t, kept in by_seed(found)]
    return ["corpus", "recipe", "seeds", *_NAMES], rows


def _vocabulary(found: Found) -> tuple[list[str], Rows]:
    header = ["corpus", "ids", "lossless", "bytes/token", "text seen", "raw 4k", "raw whole", "back 4k", "back whole"]
    header += ["dropped", "held-out text"]
    rows = []
    for trial, kept in by_seed(found):
        evaluation = kept[0]["evaluation"]
        raw, back = (perplexities(kept, f"bits_per_{kind}_byte", 4) for kind in ("raw", "given_back"))
        seen = trial.tokens * trial.corpus.train_bytes / trial.corpus.train_tokens
        at = LENGTH_KEYS.index("4096")
        rows.append(
            [
                trial.corpus.name,
                f"{trial.corpus.vocab_size:,}",
                "yes" if evaluation["lossless"] else "no",
                f"{evaluation['raw_bytes'] / evaluation['tokens']:.2f}",
                f"{seen / 1e6:,.0f} MB",
                raw[at],
                raw[-1],
                back[at],
                back[-1],
                f"{1 - evaluation['given_back_bytes'] / evaluation['raw_bytes']:.2%}",
                evaluation["text"][:8],
            ]
        )
    return header, rows


_LAYOUTS: dict[str, Callable[[Found], tuple[list[str], Rows]]] = {
    "init": _candidates,
    "init-hybrid": _candidates,
    "rates": _rates,
    "vocabulary": _vocabulary,
}
