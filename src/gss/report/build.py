"""From run folders to a report on disk."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import gss
from gss.io.files import write_file
from gss.report.curves import context_picture, length_pictures, training_pictures
from gss.report.page import figures, heading, page, paragraph, sample, side_by_side
from gss.report.runs import RunRecord, read_runs
from gss.report.scores import BUDGET, Scores, same_tokens, scores
from gss.report.spectra import memory_pictures, state_spaces
from gss.report.tables import difference_table, length_table, summary
from gss.report.theme import require_matplotlib, run_variable, style

_SAMPLE_TOKENS = 200


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    data: str | Path | None = None,
    max_tokens: int = BUDGET,
    lengths: Sequence[int] | None = None,
    again: bool = False,
    device: str = "cpu",
    prompt: str | None = None,
    show: Callable[[str, float], None] = lambda stage, share: None,
) -> Path:
    """Write a report on one or several runs, one HTML file; returns its path.

    data            a corpus to score the runs on where no scores are kept; None: each run's own, if still there
    max_tokens      most held-out tokens to score a run on at each length; 0: score nothing
    lengths         lengths to score at; None: the paper's, as far as documents reach
    again           score again, whatever scores are kept
    device          where runs are scored
    prompt          of the samples; None: the run's own newest sample if it has one, else a new document
    show            called with what is being done and the share of it that is done
    """
    require_matplotlib()
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be 0 or more, not {max_tokens}")
    target = Path(out)
    if target.is_dir():
        raise ValueError(f"{target} is a folder: give a file for the report, for example {target / 'report.html'}")
    found = read_runs([Path(run) for run in runs])
    scored = [scores(run, Path(data) if data else None, max_tokens, lengths, show, again, device) for run in found]
    target.parent.mkdir(parents=True, exist_ok=True)
    show("drawing", 0.0)
    with style():
        write_file(target, _report(found, scored, prompt))
    show("drawing", 1.0)
    return target


def _report(runs: list[RunRecord], scored: list[Scores], prompt: str | None) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    sections = {"Summary": [side_by_side(map(summary, runs, scored, range(len(runs))), "grid cards")]}
    if len(runs) > 1:
        table = difference_table(runs)
        same = [paragraph("note", "All settings of these runs are the same.")]
        intro = paragraph("intro", "Settings that are not the same in all of these runs.")
        sections["What differs"] = [intro, table.html()] if table else same
    untrained = [
        f"{run.name} has no numbers by step: it was imported, or has not begun." for run in runs if not run.training
    ]
    sections["Training"] = [figures(training_pictures(runs, scored)), *(paragraph("note", text) for text in untrained)]
    sections["Perplexity by length"] = _lengths(runs, scored)
    sections["What the state spaces remember"] = _memory(runs)
    sections["Text"] = _samples(runs, prompt)
    names = [run.name for run in runs]
    title = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    title = title if len(names) < 4 else f"{len(names)} runs compared"
    return page(title, f"A report by gss {gss.__version__}, {now}.", sections)


def _lengths(runs: list[RunRecord], scored: list[Scores]) -> list[str]:
    parts = []
    table = length_table(runs, scored)
    if table:
        counts = sorted({(score.result.tokens, score.result.documents) for score in scored if score.result})
        what = " and ".join(
            f"{count:,} held-out tokens of {number:,} document{'s' * (number > 1)}" for count, number in counts
        )
        intro = (
            f"{what}, each counted once at every length. The last three columns are of the longest length; ± is the "
            "standard error of the loss over documents."
        )
        if any("paper" in row[0] for row in table.rows):
            intro += " The paper's rows are token perplexities on its own corpora and vocabularies."
        parts += [paragraph("intro", intro), table.html()]
    if not same_tokens(scored):
        other = (
            "These runs were not scored on the same tokens, so their figures do not compare: --again scores them again."
        )
        parts.append(paragraph("note", other))
    missing = [f"{run.name}: {score.missing}" for run, score in zip(runs, scored, strict=True) if score.missing]
    context = context_picture(runs)
    pictures = [*length_pictures(runs, scored), *([context] if context else [])]
    return [*parts, figures(pictures), *(paragraph("note", text) for text in missing)]


def _memory(runs: list[RunRecord]) -> list[str]:
    intro = (
        "A mode λ fades as exp(Re λ · t) and turns as exp(i · Im λ · t); a kernel is a sum of such modes. The start is "
        "drawn again from the run's seed."
    )
    parts = [paragraph("intro", intro)]
    for index, run in enumerate(runs):
        now, start = state_spaces(run)
        if len(runs) > 1:
            parts.append(heading(run.name, run_variable(index)))
        if not now:
            trouble = "the model has no state spaces" if run.loaded else run.trouble
            parts.append(paragraph("note", f"nothing to draw: {trouble}"))
            continue
        name = re.sub(r"[^A-Za-z0-9]+", "-", run.name).strip("-").lower() or "run"
        parts.append(figures(memory_pictures(f"{name}-{index + 1}", now, start)))
        if not start:
            unknown = "Where this model started is not known: its folder has no seed, or was imported."
            parts.append(paragraph("note", unknown))
    return parts


def _samples(runs: list[RunRecord], prompt: str | None) -> list[str]:
    parts, missing = [], []
    for index, run in enumerate(runs):
        text = run.sample if prompt is None else None
        if text is None and run.loaded:
            start = prompt or ""
            text = start + run.loaded.generate(start, max_tokens=_SAMPLE_TOKENS, temperature=0.8)
        if text is None:
            missing.append(paragraph("note", f"{run.name} has no sample: {run.trouble}"))
        else:
            parts.append(sample(run.name, run_variable(index), text))
    intro = paragraph("intro", f"As the model writes it, temperature 0.8, at most {_SAMPLE_TOKENS} tokens.")
    return [intro, side_by_side(parts), *missing]
