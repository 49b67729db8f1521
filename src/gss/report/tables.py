"""How runs compare, in words and tables: the figures of a run, scores by length, settings that differ."""

import math
from collections.abc import Sequence
from typing import Any

from gss.accounting import account
from gss.io.runs import training_summary
from gss.paper import PERPLEXITY
from gss.report.curves import binary
from gss.report.page import Table, card
from gss.report.runs import RunRecord
from gss.report.scores import Scores, same_tokens
from gss.report.theme import run_variable, tokens
from gss.training.config import flattened
from gss.training.progress import duration


def summary(run: RunRecord, score: Scores, index: int) -> str:
    """A run's figures, on a card."""
    accounts = account(run.model_config, run.length or 4096)
    facts = [("parameters", tokens(accounts.parameters)), ("state", size(accounts.state_bytes))]
    trained = training_summary(run.training, run.config["batch_tokens"]) if run.training else None
    if trained:
        facts.append(("loss, last 5%", f"{trained['train_loss']:.3f}"))
    if score.result:
        row = score.result.rows[-1]
        facts.append((f"perplexity, {_length(row.length)}", f"{row.perplexity:.2f}"))
        if not math.isnan(row.bits_per_byte):
            facts.append(("bits per byte", f"{row.bits_per_byte:.3f}"))
    if run.step and "batch_tokens" in run.config:
        facts.append(("tokens seen", tokens(run.step * run.config["batch_tokens"])))
    if trained:
        facts.append(("tokens per second", tokens(trained["tokens_per_second"])))
        facts.append(("time training", duration(trained["seconds"])))
    layers = run.model_config.layers
    about = [run.preset or "no preset"]
    about.append(" + ".join(f"{layers.count(kind)} {kind}" for kind in dict.fromkeys(layers)) + " layers")
    if run.config.get("steps"):
        about.append(f"step {run.step:,} of {run.config['steps']:,}")
    if run.environment:
        about.append(f"{run.environment.get('processes', 1)} × {run.environment.get('device', '?')}")
        about.append(f"started {str(run.environment.get('started', '?'))[:10]}")
    return card(run.name, run_variable(index), " · ".join(about), facts)


def length_table(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> Table | None:
    """Perplexity by length as in the paper's tables: a row per model, a column per length; the paper's rows below."""
    results = [score.result for score in scored if score.result]
    if not results:
        return None
    papers = {run.preset: PERPLEXITY[run.preset] for run in runs if run.preset in PERPLEXITY}
    ours = {row.length for result in results for row in result.rows}
    theirs = {length for corpora in papers.values() for scores in corpora.values() for length in scores}
    lengths = [*sorted({length for length in ours if length} | theirs), *([None] if None in ours else [])]
    rows: list[Sequence[str]] = []
    quiet = set()
    entropies = {score.unigram_entropy for score in scored if score.result and score.unigram_entropy}
    if len(entropies) == 1 and same_tokens(scored):
        entropy = math.exp(min(entropies.pop() or 0.0, 700.0))
        cells = [f"{entropy:.2f}" if length in ours else "" for length in lengths]
        quiet.add(0)
        rows.append(["unigrams of the split", "", *cells, "", "", ""])
    for run, score in zip(runs, scored, strict=True):
        if score.result:
            scores = {row.length: f"{row.perplexity:.2f}" for row in score.result.rows}
            last = score.result.rows[-1]
            tail = (f"{last.standard_error:.3f}", tokens(last.word_perplexity), f"{last.bits_per_byte:.3f}")
            cells = [scores.get(length, "") for length in lengths] + ["–" if cell == "nan" else cell for cell in tail]
            rows.append([run.name, tokens(account(run.model_config).parameters), *cells])
    for preset, corpora in papers.items():
        for corpus, paper in corpora.items():
            quiet.add(len(rows))
            cells = [f"{paper[length]:g}" if length in paper else "" for length in lengths]
            rows.append([f"paper's {preset}, {corpus}", "", *cells, "", "", ""])
    header = ["perplexity at", "params", *map(_length, lengths), "± loss", "per word", "bits/byte"]
    return Table(header, rows, frozenset(quiet))


def difference_table(runs: Sequence[RunRecord]) -> Table | None:
    """Settings that are not the same in all runs; None for one run, or where all are the same."""
    flats = []
    for run in runs:
        data = {f"data.{name}": str(run.data[name])[:12] for name in ("hash", "tokenizer") if run.data.get(name)}
        flats.append({**flattened(run.config), **data})
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    rows: list[Sequence[str]] = [
        [name, *(_value(flat[name]) if name in flat else "–" for flat in flats)]
        for name in names
        if any((name in flat, flat.get(name)) != (name in flats[0], flats[0].get(name)) for flat in flats)
    ]
    return Table(["setting", *(run.name for run in runs)], rows, words=True) if rows else None


def size(count: float) -> str:
    """Bytes as people say them."""
    units = ["bytes", "kB", "MB", "GB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def _length(length: int | None) -> str:
    return "whole" if length is None else binary(length)


def _value(value: Any) -> str:
    match value:
        case None:
            return "none"
        case list():
            return ", ".join(map(_value, value)) or "empty"
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
    return str(value) or "empty"
