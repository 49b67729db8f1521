"""From run folders to a report on disk."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import gss
from gss.generate import Sampling, generate
from gss.report.compare import card, difference_table, findings, length_table, settings_table
from gss.report.curves import length_picture, position_picture, training_pictures
from gss.report.document import Document, Heading, Note, Sample, Section
from gss.report.files import replace
from gss.report.markdown import markdown
from gss.report.memory import memory
from gss.report.page import html
from gss.report.run import Run, read_runs
from gss.report.scores import BUDGET, Scores, same_tokens, scores
from gss.report.spectra import memory_pictures
from gss.report.theme import require_matplotlib, run_variable, style

_SAMPLE_TOKENS = 200
FORMATS = ("html", "md")


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    form: str = "html",
    data: str | Path | None = None,
    max_tokens: int = BUDGET,
    lengths: Sequence[int] | None = None,
    again: bool = False,
    device: str = "cpu",
    prompt: str | None = None,
    show: Callable[[str, float], None] = lambda stage, share: None,
) -> Path:
    """Write a report on one or several runs; returns its path.

    form            "html", one file; "md", Markdown with PNGs in a folder beside it
    data            a corpus to score the runs on where no scores are kept; None: each run's own, if still there
    max_tokens      most held-out tokens to score a run on at each length; 0: score nothing
    lengths         lengths to score at; None: the paper's, as far as documents reach
    again           score anew, whatever scores are kept
    device          where runs are scored
    prompt          what samples go on from; None: the run's own newest sample if it has one, else a new document
    show            called with what is being done and the share of it that is done
    """
    require_matplotlib()
    if form not in FORMATS:
        raise ValueError(f"a report's format is {' or '.join(FORMATS)}, not {form!r}")
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be 0 or more, not {max_tokens}")
    target = Path(out)
    if target.is_dir():
        raise ValueError(f"{target} is a folder: give a file for the report, for example {target / f'report.{form}'}")
    found = read_runs([Path(run) for run in runs])
    scored = [scores(run, Path(data) if data else None, max_tokens, lengths, show, again, device) for run in found]
    target.parent.mkdir(parents=True, exist_ok=True)
    show("drawing", 0.0)
    with style():
        document = _document(found, scored, prompt)
        if form == "html":
            replace(target, html(document).encode())
        else:
            pictures = f"{target.stem}-figures"
            text, images = markdown(document, pictures)
            (target.parent / pictures).mkdir(exist_ok=True)
            for path, content in images.items():
                replace(target.parent / path, content)
            replace(target, text.encode())
    show("drawing", 1.0)
    return target


def _document(runs: list[Run], scored: list[Scores], prompt: str | None) -> Document:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    cards = [card(run, score, index) for index, (run, score) in enumerate(zip(runs, scored, strict=True))]
    sections = [Section("Summary", blocks=[*cards])]
    if len(runs) > 1:
        sections.append(_differences(runs))
    sections += [_training(runs, scored), _lengths(runs, scored), *_memory(runs), _samples(runs, prompt)]
    if len(runs) == 1:
        sections.append(Section("Settings", "All of them are in config.json.", [settings_table(runs[0])]))
    names = [run.name for run in runs]
    title = f"{', '.join(names[:-1])} and {names[-1]}" if 1 < len(names) < 4 else names[0]
    return Document(
        title if len(names) < 4 else f"{len(names)} runs compared",
        f"A report by gss {gss.__version__}, {now}.",
        findings(runs, scored),
        sections,
    )


def _training(runs: list[Run], scored: list[Scores]) -> Section:
    section = Section("Training", blocks=[*training_pictures(runs, scored)])
    for run in runs:
        if not run.training:
            section.blocks.append(Note(f"{run.name} has no numbers by step: it was imported, or has not begun."))
    return section


def _lengths(runs: list[Run], scored: list[Scores]) -> Section:
    section = Section("Perplexity by length")
    results = [score.result for score in scored if score.result]
    table = length_table(runs, scored)
    if table:
        counts = sorted({(result.tokens, result.documents) for result in results})
        what = " and ".join(
            f"{count:,} held-out tokens of {number:,} document{'s' * (number > 1)}" for count, number in counts
        )
        section.intro = (
            f"{what[0].upper()}{what[1:]}, each counted once at every length. The last three columns are of the "
            "longest length; ± is the standard error of the loss over documents."
        )
        if any("paper" in row[0] for row in table.rows):
            section.intro += " The paper's rows are token perplexities on its own corpora and vocabularies."
        section.blocks.append(table)
    if not same_tokens(scored):
        section.blocks.append(
            Note("These runs were not scored on the same tokens, so their figures do not compare: --again scores anew.")
        )
    pictures = [length_picture(runs, scored), position_picture(runs, scored)]
    section.blocks += [picture for picture in pictures if picture]
    section.blocks += [
        Note(f"{run.name}: {score.missing}") for run, score in zip(runs, scored, strict=True) if score.missing
    ]
    return section


def _memory(runs: list[Run]) -> list[Section]:
    section = Section("What the state spaces remember")
    for index, run in enumerate(runs):
        spaces = memory(run)
        if len(runs) > 1:
            section.blocks.append(Heading(run.name, run_variable(index)))
        if spaces is None:
            section.blocks.append(Note(f"nothing to draw: {run.trouble or 'the model has no state spaces'}"))
            continue
        section.blocks += memory_pictures(f"{_file_name(run.name)}-{index + 1}", spaces)
        if spaces.start is None:
            section.blocks.append(
                Note("Where this model started is not known: its folder has no seed, or was imported.")
            )
    section.intro = (
        "A mode λ fades as exp(Re λ · t) and turns as exp(i · Im λ · t); a kernel is a sum of such modes. The start is "
        "drawn again from the run's seed."
    )
    return [section]


def _samples(runs: list[Run], prompt: str | None) -> Section:
    section = Section("Text")
    for index, run in enumerate(runs):
        text = run.sample if prompt is None else None
        if text is None and run.loaded:
            text = _written(run, prompt if prompt is not None else "")
        if text is None:
            section.blocks.append(Note(f"{run.name} has no sample: {run.trouble}"))
        else:
            section.blocks.append(Sample(run.name, run_variable(index), text))
    section.intro = f"As the model writes it, temperature 0.8, at most {_SAMPLE_TOKENS} tokens."
    return section


def _written(run: Run, prompt: str) -> str:
    assert run.loaded is not None
    model, tokenizer, *_ = run.loaded
    sampling = Sampling(temperature=0.8)
    return prompt + generate(model, tokenizer, prompt, max_tokens=_SAMPLE_TOKENS, sampling=sampling)


def _differences(runs: list[Run]) -> Section:
    table = difference_table(runs)
    if table is None:
        return Section("What differs", blocks=[Note("All settings of these runs are the same.")])
    return Section("What differs", "Settings that are not the same in all of these runs.", [table])


def _file_name(name: str) -> str:
    """A run's name as a part of file names and ids."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "run"
