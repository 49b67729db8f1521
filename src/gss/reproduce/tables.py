"""Results as tables: the paper's columns with ours beside them, in Markdown that also reads well on a terminal."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gss.paper import LENGTHS, PARAMETERS, PERPLEXITY, STEPS_PER_SECOND, TPU_HOURS
from gss.reproduce.plan import Run, by_system
from gss.reproduce.results import WHOLE
from gss.reproduce.settings import System, Target, paper_corpus

Found = Sequence[tuple[Run, Mapping[str, Any]]]
"""Runs that are done, with their results."""
Rows = list[list[str]]

NONE = "–"
_NAMES = {512: "512", 4096: "4k", 16_384: "16k", 65_536: "65k"}
_LENGTH_KEYS = [*map(str, LENGTHS), WHOLE]
_LENGTH_NAMES = [*_NAMES.values(), "whole"]
_WORDS = {
    "recipe",
    "corpus",
    "model",
    "start",
    "what it is",
    "vocabulary",
    "lossless",
    "run",
    "instead of",
    "ours",
    "hardware",
    "commit",
}  # columns that are text


def table(target: Target, found: Found) -> tuple[list[str], Rows]:
    """The header and the rows of a target's table."""
    return _LAYOUTS[target.layout](found)


def markdown(header: Sequence[str], rows: Rows) -> str:
    """A Markdown table with its columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    left = [name in _WORDS for name in header]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if words else cell.rjust(width)
            for cell, width, words in zip(cells, widths, left, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [("-" * width if words else "-" * (width - 1) + ":") for width, words in zip(widths, left, strict=True)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def notes(target: Target, found: Found) -> list[str]:
    """What has to be said under the table."""
    if not found:
        return ["Nothing is done yet."]
    said = [_NOTES[target.layout]]
    for corpus, runs in by_corpus(found).items():
        kept = [result for _, result in runs]
        first = kept[0]
        evaluation = first["evaluation"]
        scored = f"{evaluation['tokens']:,} tokens of {evaluation['documents']} held-out documents"
        tokens = sorted({result["tokens"] for result in kept})
        said.append(
            f"{corpus}: {' or '.join(f'{count:,}' for count in tokens)} training tokens "
            f"({min(r['epochs'] for r in kept):.2f} epochs) at length {first['config']['length']:,}; scored on "
            f"{scored} ({evaluation['precision']})."
        )
    if target.layout != "candidates":
        about = {run.system.label: run.system.about for run, _ in found if run.system.about}
        said += [f"{label}: {text}." for label, text in about.items()]
    machines = ", ".join(sorted({result["hardware"] for _, result in found}))
    commits = ", ".join(sorted({result["commit"] or "unknown" for _, result in found}))
    torches = ", ".join(sorted({result["versions"].get("torch", "unknown") for _, result in found}))
    return [*said, f"Hardware: {machines}; torch {torches}; commit {commits}."]


def by_corpus(found: Found) -> dict[str, list[tuple[Run, Mapping[str, Any]]]]:
    """Results by the name of their corpus."""
    grouped: dict[str, list[tuple[Run, Mapping[str, Any]]]] = {}
    for run, kept in found:
        grouped.setdefault(run.corpus.name, []).append((run, kept))
    return grouped


def groups(found: Found) -> list[tuple[Run, list[Mapping[str, Any]]]]:
    """Results that differ in the seed alone, together."""
    results = {run.name: kept for run, kept in found}
    return [(runs[0], [results[run.name] for run in runs]) for _, _, runs in by_system([run for run, _ in found])]


def _scores(kept: Sequence[Mapping[str, Any]], key: str = "perplexity", digits: int = 2) -> list[str]:
    return [mean([r["lengths"].get(length, {}).get(key) for r in kept], digits) for length in _LENGTH_KEYS]


def mean(values: Sequence[float | None], digits: int = 2) -> str:
    """The mean over seeds, and their standard deviation where there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    text = f"{statistics.fmean(known):,.{digits}f}"
    return text if len(known) == 1 else f"{text} ± {statistics.stdev(known):.{digits}f}"


def _paper(system: System, corpus: str | None) -> tuple[str, list[str]]:
    """The preset of the paper that a system is, and its perplexities on one of the paper's corpora."""
    name = system.model
    if system.settings.get("batching") or not {name, f"{name}-lm1b"} & PERPLEXITY.keys():
        return "", [NONE] * len(LENGTHS)
    if corpus == "LM1B" or name not in PERPLEXITY:
        scores, mark = PERPLEXITY.get(f"{name}-lm1b", {}).get("LM1B", {}), "" if corpus == "LM1B" else "†"
        name = f"{name}-lm1b"
    else:
        scores, mark = PERPLEXITY[name].get(corpus or "", {}), ""
    return name, [f"{scores[length]:.2f}{mark}" if length in scores else NONE for length in LENGTHS]


def millions(count: int) -> str:
    """Parameters as tables write them."""
    return f"{count / 1e6:.1f}M" if count < 1e8 else f"{count / 1e6:.0f}M"


def unmeasured(target: Target, corpus: str, system: System) -> list[str]:
    """The row of a system that has no result yet, in a table of the paper: dashes beside the paper's figures."""
    paper = paper_corpus(corpus)
    name, scores = _paper(system, paper)
    cost = _steps_per_second(paper, name) if target.layout == "table1" else _tpu_hours(paper, name)
    ours = [NONE] * len(_LENGTH_NAMES)
    return [corpus, system.label, NONE, PARAMETERS.get(name, NONE), NONE, cost, *ours, *scores]


def _beside_the_paper(found: Found, cost: str, paper_cost: Callable[[str | None, str], str]) -> tuple[list[str], Rows]:
    header = ["corpus", "model", "params", "paper's", "tokens/s", cost, *_LENGTH_NAMES]
    header += [f"paper {name}" for name in _NAMES.values()]
    rows = []
    for run, kept in groups(found):
        name, scores = _paper(run.system, run.corpus.paper)
        rows.append(
            [
                run.corpus.name,
                run.system.label + (f" ({len(kept)} seeds)" if len(kept) > 1 else ""),
                millions(kept[0]["parameters"]),
                PARAMETERS.get(name, NONE),
                _speed(kept),
                paper_cost(run.corpus.paper, name),
                *_scores(kept),
                *scores,
            ]
        )
    return header, rows


def _speed(kept: Sequence[Mapping[str, Any]]) -> str:
    known = [result["tokens_per_second"] for result in kept if result["tokens_per_second"] is not None]
    return mean([statistics.median(known)] if known else [], 0)


def _table1(found: Found) -> tuple[list[str], Rows]:
    return _beside_the_paper(found, "paper steps/s", _steps_per_second)


def _table2(found: Found) -> tuple[list[str], Rows]:
    return _beside_the_paper(found, "paper TPU h", _tpu_hours)


def _steps_per_second(corpus: str | None, name: str) -> str:
    return str(STEPS_PER_SECOND[name]) if name in STEPS_PER_SECOND else NONE


def _tpu_hours(corpus: str | None, name: str) -> str:
    return TPU_HOURS.get(corpus or "", {}).get(name, NONE)


def _candidates(found: Found) -> tuple[list[str], Rows]:
    header = ["corpus", "start", "seeds", *_LENGTH_NAMES, "slow before", "after", ">1,000 before", "after"]
    header.append("what it is")
    rows = []
    for run, kept in groups(found):
        slow = [_over_layers(kept, when, lambda part: part["quantiles"]["0.95"]) for when in ("start", "end")]
        far = [_over_layers(kept, when, lambda part: part["share_over"]["1000"]) for when in ("start", "end")]
        rows.append(
            [
                run.corpus.name,
                run.system.label,
                str(len(kept)),
                *_scores(kept),
                *(NONE if value is None else f"{value:,.0f}" for value in slow),
                *(NONE if value is None else f"{value:.1%}" for value in far),
                run.system.about or NONE,
            ]
        )
    return header, rows


def _rates(found: Found) -> tuple[list[str], Rows]:
    rows = [[run.corpus.name, run.system.label, str(len(kept)), *_scores(kept)] for run, kept in groups(found)]
    return ["corpus", "recipe", "seeds", *_LENGTH_NAMES], rows


def _over_layers(
    kept: Sequence[Mapping[str, Any]], when: str, pick: Callable[[Mapping[str, Any]], float]
) -> float | None:
    """The median over layers and seeds; None for a model without state spaces."""
    values = [pick(part) for result in kept for part in result["time_constants"][when]]
    return statistics.median(values) if values else None


def _vocabulary(found: Found) -> tuple[list[str], Rows]:
    header = ["corpus", "ids", "lossless", "bytes/token", "text seen", "raw 4k", "raw whole", "back 4k", "back whole"]
    header += ["dropped", "held-out text"]
    rows = []
    for run, kept in groups(found):
        evaluation = kept[0]["evaluation"]
        raw, back = (_scores(kept, f"bits_per_{kind}_byte", 4) for kind in ("raw", "given_back"))
        seen = run.tokens * run.corpus.train_bytes / run.corpus.train_tokens
        at = _LENGTH_KEYS.index("4096")
        rows.append(
            [
                run.corpus.name,
                f"{run.corpus.vocab_size:,}",
                "yes" if evaluation["lossless"] else "no",
                f"{evaluation['raw_bytes'] / evaluation['tokens']:.2f}",
                f"{seen / 1e6:,.0f} MB",
                raw[at],
                raw[-1],
                back[at],
                back[-1],
                f"{1 - evaluation['given_back_bytes'] / evaluation['raw_bytes']:.2%}",
                run.corpus.held_out_text[:8],
            ]
        )
    return header, rows


_LAYOUTS: dict[str, Callable[[Found], tuple[list[str], Rows]]] = {
    "table1": _table1,
    "table2": _table2,
    "lengths": _table1,
    "candidates": _candidates,
    "rates": _rates,
    "vocabulary": _vocabulary,
}
_BESIDE = (
    "Perplexity is a token of the corpus's own vocabulary, by evaluation length; `whole` reads every document from end "
    "to end with its state carried. Only differences within a corpus compare with the paper's: data, sizes and tokens "
    "are other ones."
)
_NOTES = {
    "table1": f"{_BESIDE} † is the paper's LM1B. The paper's steps are of 2^19 tokens on 64 TPUv4 cores.",
    "table2": f"{_BESIDE} The paper's block-recurrent figures have the state carried, as `whole` has here.",
    "lengths": _BESIDE,
    "candidates": "Perplexity by evaluation length; `slow` is the time constant in tokens that 5% of the modes exceed, "
    "`>1,000` the share of modes slower than 1,000 tokens, medians over layers, before and after training.",
    "rates": "Perplexity by evaluation length. The paper tuned the rate over the four here.",
    "vocabulary": "Bits a byte of the same held-out text; rows compare where `held-out text` is the same. `raw` "
    "divides by the UTF-8 bytes of the text before any vocabulary saw it; `back` by those that the scored tokens give "
    "back. A vocabulary that is not lossless never predicts what it drops (`dropped`, of the raw bytes), so its `raw` "
    "is too low and its `back` is of an easier text. Equal training tokens, so equal arithmetic; `text seen` says how "
    "much text that was.",
}
