"""The report as one HTML page: sections, tables, and figures as inline SVG.

The page loads nothing from elsewhere, and all text is escaped.
"""

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import gss
from gss.accounting import account
from gss.config import flattened
from gss.io.files import file_to_be, write_file
from gss.io.runs import training_summary
from gss.paper import PERPLEXITY
from gss.report import figures
from gss.report.runs import RunRecord, Scores, Show, read_runs, same_tokens, scores
from gss.report.theme import css_variables, run_variable, style, svg, tokens
from gss.training.progress import duration

# Whatever the file contains, the browser loads and runs nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_SAMPLE_TOKENS = 200
_SHOWN = 12  # rows of settings that are not folded up


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    prompt: str | None = None,
    show: Show = lambda stage, share: None,
    **scoring: Any,
) -> Path:
    """Write a report on one or several runs as one HTML file and return its path.

    prompt     for the samples; None: the run's newest sample if it has one, else a new document
    show       called with the current stage and the share of it that is done
    scoring    options of `gss.report.runs.scores`: data, max_tokens, lengths, again, device
    """
    with style():
        found = read_runs([Path(run) for run in runs])
        target = file_to_be(out)
        scored = [scores(run, show, **scoring) for run in found]
        show("drawing", 0.0)
        write_file(target, _page(found, scored, prompt))
        show("drawing", 1.0)
    return target


def _page(runs: list[RunRecord], scored: list[Scores], prompt: str | None) -> str:
    sections = {"Summary": _beside(map(_summary, runs, scored, range(len(runs))), "grid cards")}
    if len(runs) > 1:
        table = difference_table(runs)
        intro = _paragraph("intro", "Settings that differ between these runs.")
        same = _paragraph("note", "These runs have the same settings.")
        shown = _table(table) if table else ""
        if table and len(table.rows) > _SHOWN:
            shown = f"<details><summary>{len(table.rows)} settings</summary>{shown}</details>"
        sections["What differs"] = intro + shown if table else same
    sections["Training"] = _figures(figures.training_pictures(runs, scored)) + "".join(
        _paragraph("note", f"{run.name} has no training metrics: it was imported, or has not started.")
        for run in runs
        if not run.training
    )
    sections["Perplexity by length"] = _lengths(runs, scored)
    sections["What the state spaces remember"] = _memory(runs)
    sections["Text"] = _samples(runs, prompt)
    names = [run.name for run in runs]
    title = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    title = escape(title if len(names) < 4 else f"{len(names)} runs compared")
    about = f"A report by gss {gss.__version__}, {datetime.now(UTC).strftime('%Y-%m-%d %H:%M UTC')}."
    anchors = {name: re.sub(r"\W", "-", name.lower()) for name in sections}
    links = "".join(f'<a href="#{anchor}">{name}</a>' for name, anchor in anchors.items())
    inside = "".join(f'\n<section id="{anchors[n]}"><h2>{n}</h2>{html}</section>' for n, html in sections.items())
    css = css_variables() + (files("gss.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{title}</title>\n<style>\n{css}</style></head>\n<body><main>"
        f'<h1>{title}</h1>{_paragraph("about", about)}<nav aria-label="Sections">{links}</nav>'
        f"{inside}</main></body></html>\n"
    )


def _summary(run: RunRecord, score: Scores, index: int) -> str:
    """A card with a run's key figures."""
    accounts = account(run.model_config, run.length or 4096)
    facts = {"parameters": tokens(accounts.parameters), "state": size(accounts.state_bytes)}
    trained = training_summary(run.training, run.config["batch_tokens"]) if run.training else None
    if trained:
        facts["loss, last 5%"] = f"{trained['train_loss']:.3f}"
    if score.result:
        row = score.result.rows[-1]
        facts[f"perplexity, {figures.length_name(row.length)}"] = f"{row.perplexity:.2f}"
        if not math.isnan(row.bits_per_byte):
            facts["bits per byte"] = f"{row.bits_per_byte:.3f}"
    if run.step and "batch_tokens" in run.config:
        facts["tokens seen"] = tokens(run.step * run.config["batch_tokens"])
    if trained:
        facts["tokens per second"] = tokens(trained["tokens_per_second"])
        facts["training time"] = duration(trained["seconds"])
    layers = run.model_config.layers
    about = [run.preset or "no preset"]
    about.append(" + ".join(f"{layers.count(kind)} {kind}" for kind in dict.fromkeys(layers)) + " layers")
    if run.config.get("steps"):
        about.append(f"step {run.step:,} of {run.config['steps']:,}")
    if run.environment:
        about.append(f"{run.environment.get('processes', 1)} × {run.environment.get('device', '?')}")
        about.append(f"started {str(run.environment.get('started', '?'))[:10]}")
    listed = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(much)}</dd></div>" for what, much in facts.items())
    inside = f"<h3>{escape(run.name)}</h3>{_paragraph('about', ' · '.join(about))}<dl>{listed}</dl>"
    return f'<article class="card" {_mark(index)}>{inside}</article>'


def _lengths(runs: list[RunRecord], scored: list[Scores]) -> str:
    content = ""
    table = length_table(runs, scored)
    if table:
        counts = sorted({(score.result.tokens, score.result.documents) for score in scored if score.result})
        what = " and ".join(f"{count:,} held-out tokens of {n:,} document{'s' * (n > 1)}" for count, n in counts)
        intro = (
            f"{what}, each counted once at every length. The last three columns are for the longest length; ± is the "
            "standard error of the loss over documents."
        )
        if any("paper" in row[0] for row in table.rows):
            intro += " The paper's rows are perplexities per token on its own corpora and vocabularies."
        content += _paragraph("intro", intro) + _table(table)
    if not same_tokens(scored):
        one = len({score.data for score in scored if score.result}) == 1
        remedy = "--again scores them again" if one else "--data scores runs of one vocabulary on one corpus"
        other = "These runs were scored on different tokens, so their figures are not comparable"
        content += _paragraph("note", f"{other}: {remedy}.")
    content += _figures([*figures.length_pictures(runs, scored), *figures.context_pictures(runs)])
    missing = [f"{run.name}: {score.missing}" for run, score in zip(runs, scored, strict=True) if score.missing]
    return content + "".join(_paragraph("note", text) for text in missing)


def _memory(runs: list[RunRecord]) -> str:
    intro = (
        "A mode λ decays as exp(Re λ · t) and rotates as exp(i · Im λ · t); a kernel is a sum of such modes. Initial "
        "values are reconstructed from the run's seed."
    )
    content = _paragraph("intro", intro)
    for index, run in enumerate(runs):
        now, start = figures.state_spaces(run)
        if len(runs) > 1:
            content += f'<h3 class="named" {_mark(index)}>{escape(run.name)}</h3>'
        if not now:
            trouble = "the model has no state spaces" if run.loaded else run.trouble
            content += _paragraph("note", f"Nothing to show: {trouble}.")
            continue
        name = re.sub(r"[^A-Za-z0-9]+", "-", run.name).strip("-").lower() or "run"
        content += _figures(figures.memory_pictures(f"{name}-{index + 1}", now, start))
        if not start:
            unknown = "The initial values are unknown: the run was imported, or started from trained weights."
            content += _paragraph("note", unknown)
    return content


def _samples(runs: list[RunRecord], prompt: str | None) -> str:
    parts, missing = [], ""
    for index, run in enumerate(runs):
        text = run.sample if prompt is None else None
        if text is None and run.loaded:
            start = prompt or ""
            text = start + run.loaded.generate(start, max_tokens=_SAMPLE_TOKENS, temperature=0.8)
        if text is None:
            missing += _paragraph("note", f"{run.name} has no sample: {run.trouble}")
        else:
            inside = f"<h3>{escape(run.name)}</h3><pre>{escape(text)}</pre>"
            parts.append(f'<div class="sample" {_mark(index)}>{inside}</div>')
    intro = f"Written by the model at temperature 0.8, in at most {_SAMPLE_TOKENS} tokens."
    return _paragraph("intro", intro) + _beside(parts) + missing


class Table(NamedTuple):
    """A header and rows of text; the first column names the row."""

    header: Sequence[str]
    rows: list[Sequence[str]]
    quiet: frozenset[int] = frozenset()  # rows that are only for comparison
    words: bool = False  # columns hold words, not numbers


def length_table(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> Table | None:
    """Perplexity in the layout of the paper's tables: a row per model, a column per length; the paper's rows below."""
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
        quiet.add(0)
        rows.append(["unigrams of the split", "", *(f"{entropy:.2f}" if n in ours else "" for n in lengths), *[""] * 3])
    for run, score in zip(runs, scored, strict=True):
        if score.result:
            found = {row.length: f"{row.perplexity:.2f}" for row in score.result.rows}
            last = score.result.rows[-1]
            tail = (f"{last.standard_error:.3f}", tokens(last.word_perplexity), f"{last.bits_per_byte:.3f}")
            shown = [*(found.get(length, "") for length in lengths), *("–" if cell == "nan" else cell for cell in tail)]
            rows.append([run.name, tokens(account(run.model_config).parameters), *shown])
    for preset, corpora in papers.items():
        for corpus, paper in corpora.items():
            quiet.add(len(rows))
            cells = [f"{paper[length]:g}" if length in paper else "" for length in lengths]
            rows.append([f"paper's {preset}, {corpus}", "", *cells, *[""] * 3])
    header = ["perplexity at", "params", *map(figures.length_name, lengths), "± loss", "per word", "bits/byte"]
    return Table(header, rows, frozenset(quiet))


def difference_table(runs: Sequence[RunRecord]) -> Table | None:
    """Settings that are not the same in all runs; None for one run, or where all are the same."""
    flats = []
    for run in runs:
        data = {f"data.{name}": str(run.data[name])[:12] for name in ("hash", "tokenizer") if run.data.get(name)}
        flats.append({name: _value(value) for name, value in (flattened(run.config) | data).items()})
    rows: list[Sequence[str]] = [
        [name, *cells]
        for name in dict.fromkeys(name for flat in flats for name in flat)
        if len(set(cells := [flat.get(name, "–") for flat in flats])) > 1
    ]
    return Table(["setting", *(run.name for run in runs)], rows, words=True) if rows else None


def size(count: float) -> str:
    """A number of bytes in a readable unit."""
    units = ["bytes", "kB", "MB", "GB"]
    while float(f"{count:.3g}") >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "empty"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else value or "empty"


def _table(table: Table) -> str:
    """A table in a box that scrolls if it is too wide."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    body = ""
    for number, (name, *cells) in enumerate(table.rows):
        quiet = ' class="quiet"' if number in table.quiet else ""
        inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr{quiet}><th scope="row">{escape(name)}</th>{inside}</tr>'
    words = ' class="words"' if table.words else ""
    inside = f"<table{words}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inside}</div>'


def _figures(pictures: Iterable[figures.Picture]) -> str:
    """Pictures side by side, each with its title and caption."""
    return _beside(
        f"<figure><h3>{escape(picture.title)}</h3>{svg(picture.figure, picture.name, picture.title)}"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        for picture in pictures
    )


def _beside(parts: Iterable[str], kind: str = "grid") -> str:
    """Parts side by side where there is room; empty without any."""
    inside = "\n".join(parts)
    return inside and f'<div class="{kind}">{inside}</div>'


def _paragraph(kind: str, text: str) -> str:
    """A paragraph: the `intro` of a section, a `note` on something missing, or a line `about` something."""
    return f'<p class="{kind}">{escape(text)}</p>'


def _mark(index: int) -> str:
    """The attribute that gives an element the colour of a run."""
    return f'style="--mark:var(--{run_variable(index)})"'
