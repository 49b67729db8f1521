"""Results as tables with the paper's figures next to ours, in Markdown that is also readable on a terminal."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gss.paper import LENGTHS, PARAMETERS, PERPLEXITY, STEPS_PER_SECOND, TPU_HOURS
from gss.reproduce.settings import System, Target
from gss.reproduce.trials import Trial

Result = Mapping[str, Any]
"""A result of `score_trial`."""
Found = Sequence[tuple[Trial, Result]]
"""Trials that are done, with their results."""
Rows = list[list[str]]

WHOLE = "whole"
"""The name of the length at which documents are read whole, with the state carried."""
NONE = "–"
LENGTH_NAMES = {512: "512", 4096: "4k", 16_384: "16k", 65_536: "65k"}
_WORDS = {"corpus", "model"}  # columns that are text
_BESIDE = (
    "Perplexity is per token of the corpus's own vocabulary, by evaluation length; `whole` reads every document from "
    "end to end with its state carried. Compare only differences within a corpus with the paper's: its data, sizes and "
    "numbers of tokens are different."
)
_NOTES = {
    "table1": f"{_BESIDE} † is the paper's figure on LM1B. A step of the paper's has 2^19 tokens, on 64 TPUv4 cores.",
    "table2": f"{_BESIDE} The paper's block-recurrent figures carry the state, as `whole` does here.",
}


def report_text(target: Target, found: Found) -> str:
    """The table with its title and notes, as Markdown."""
    lines = [f"# {target.title}", ""]
    if found:
        lines += [markdown(*table(target, found)), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(target, found))]) + "\n"


def table(target: Target, found: Found) -> tuple[list[str], Rows]:
    """The header and the rows of a table: our figures, and the paper's."""
    cost = "paper TPU h" if target.name == "table2" else "paper steps/s"
    header = ["corpus", "model", "params", "paper's", "tokens/s", cost, *LENGTH_NAMES.values(), "whole"]
    header += [f"paper {name}" for name in LENGTH_NAMES.values()]
    rows = []
    for trial, kept in by_seed(found):
        seeds = f" ({len(kept)} seeds)" if len(kept) > 1 else ""
        size, paper_cost, scores = paper_figures(target, trial.system, trial.corpus.paper)
        speeds = [result["tokens_per_second"] for result in kept if result["tokens_per_second"] is not None]
        ours = [millions(kept[0]["parameters"]), size, mean([statistics.median(speeds)] if speeds else [], 0)]
        rows.append([trial.corpus.name, trial.system.label + seeds, *ours, paper_cost, *perplexities(kept), *scores])
    return header, rows


def paper_figures(target: Target, system: System, corpus: str | None) -> tuple[str, str, list[str]]:
    """The paper's parameters, training cost and perplexities for a system on one of its corpora; dashes for none."""
    name, scores, mark = system.model, PERPLEXITY.get(system.model, {}).get(corpus or "", {}), ""
    if system.settings.get("batching") or not {name, f"{name}-lm1b"} & PERPLEXITY.keys():
        name = ""
    elif corpus == "LM1B" or name not in PERPLEXITY:
        name, mark = f"{name}-lm1b", "" if corpus == "LM1B" else "†"
        scores = PERPLEXITY.get(name, {}).get("LM1B", {})
    hours = TPU_HOURS.get(corpus or "", {}).get(name, NONE)
    cost = hours if target.name == "table2" else str(STEPS_PER_SECOND.get(name, NONE))
    cells = [f"{scores[length]:.2f}{mark}" if name and length in scores else NONE for length in LENGTHS]
    return PARAMETERS.get(name, NONE), cost, cells


def markdown(header: Sequence[str], rows: Rows, words: frozenset[str] = frozenset()) -> str:
    """A Markdown table with its columns aligned; `words` are the columns, besides the first two, that hold text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    left = [name in words or name in _WORDS for name in header]

    def line(cells: Sequence[str]) -> str:
        sides = zip(cells, widths, left, strict=True)
        return f"| {' | '.join(c.ljust(width) if is_text else c.rjust(width) for c, width, is_text in sides)} |"

    rule = ["-" * width if is_text else "-" * (width - 1) + ":" for width, is_text in zip(widths, left, strict=True)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def notes(target: Target, found: Found) -> list[str]:
    """The notes below the table."""
    if not found:
        return ["Nothing is done yet."]
    said = [_NOTES.get(target.name, _BESIDE)]
    for corpus in dict.fromkeys(trial.corpus.name for trial, _ in found):
        kept = [result for trial, result in found if trial.corpus.name == corpus]
        evaluation = kept[0]["evaluation"]
        tokens = sorted({result["tokens"] for result in kept})
        said.append(
            f"{corpus}: {' or '.join(f'{count:,}' for count in tokens)} training tokens "
            f"({min(result['epochs'] for result in kept):.2f} epochs) at length {kept[0]['config']['length']:,}; "
            f"scored on {evaluation['tokens']:,} tokens of {evaluation['documents']} held-out documents "
            f"({evaluation['precision']})."
        )
    apart = {trial.system.label: trial.system.about for trial, _ in found if trial.system.about}
    said += [f"{label}: {text}." for label, text in apart.items()]
    origins = [(kept["hardware"], kept["versions"].get("torch"), kept["commit"]) for _, kept in found]
    machines, torches, commits = (", ".join(sorted({each[i] or "unknown" for each in origins})) for i in range(3))
    return [*said, f"Hardware: {machines}; torch {torches}; commit {commits}."]


def by_seed(found: Found) -> list[tuple[Trial, list[Result]]]:
    """Results grouped over seeds, in the order of corpora."""
    groups: dict[tuple[str, str], tuple[Trial, list[Result]]] = {}
    for trial, kept in found:
        groups.setdefault((trial.corpus.name, trial.system.name), (trial, []))[1].append(kept)
    order = list(dict.fromkeys(trial.corpus.name for trial, _ in found))
    return sorted(groups.values(), key=lambda group: order.index(group[0].corpus.name))


def perplexities(kept: Sequence[Result]) -> list[str]:
    """A cell per length, whole documents last."""
    keys = [*map(str, LENGTHS), WHOLE]
    return [mean([result["lengths"].get(length, {}).get("perplexity") for result in kept]) for length in keys]


def mean(values: Sequence[float | None], digits: int = 2) -> str:
    """The mean over seeds, with the standard deviation if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    text = f"{statistics.fmean(known):,.{digits}f}"
    return text if len(known) == 1 else f"{text} ± {statistics.stdev(known):.{digits}f}"


def millions(count: int) -> str:
    """A number of parameters in millions."""
    return f"{count / 1e6:.1f}M" if count < 1e8 else f"{count / 1e6:.0f}M"
