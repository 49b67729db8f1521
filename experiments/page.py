"""Fills the marked parts of a hand-written Markdown page from kept results.

    <!-- results: table1 -->
    whatever was here is replaced
    <!-- end -->

The prose around the markers stays. Any subset of the runs will do: a missing figure is a dash, and missing runs are
listed.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments import answers, best_recipe, long_range, page_plots, quality
from experiments.records import Collection, Record, read_results
from experiments.studies import STUDIES
from experiments.tables import markdown, notes, table
from gss.io.files import write_file
from gss.reproduce.settings import SCALES, SYSTEMS, System, Target, paper_corpus
from gss.reproduce.tables import LENGTH_KEYS, LENGTH_NAMES, NONE, Found, mean, millions, paper_figures
from gss.reproduce.trials import Trial

# What the page should have: on books every system of both tables, on the other corpora these. Two more are optional.
_CORPORA = {"PG-19": "books", "ArXiv": "math", "Github": "code"}
_EVERYWHERE = ("transformer", "dss", "gss", "gss-hybrid")
_IF_THERE = ("slide", "xl")
_STARTS = 6  # the start that the study began with and five around it; the others are optional
_MARKED = re.compile(r"(<!-- results: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_INCIDENTAL = re.compile(r" --(?:(?:out|work|time-limit|commit) \S+|partial|shared)(?= |$)")
_TABLES = ("table1", "table2")


def write_page(
    results: Path, pages: list[Path], images: Path, scale: str = "small", best: Path = quality.RESULTS
) -> list[str]:
    """Fill the marked parts of the pages and draw the figures; returns what is missing, a line each.

    `results` has the runs of `gss reproduce`, `best` those of `experiments.quality`.
    """
    if scale not in SCALES:
        raise ValueError(f"there is no scale {scale!r}; choose from: {', '.join(SCALES)}")
    found = read_results(results)
    collection = Collection(found, scale)
    figures = page_plots.draw_page(collection)
    captions = {name: picture.caption for name, picture in figures.items()}
    if by_context := long_range.context_picture(best):
        figures[f"{page_plots.PREFIX}{long_range.CONTEXT}.png"] = by_context
    images.mkdir(parents=True, exist_ok=True)
    for name, picture in figures.items():
        write_file(images / name, picture.png)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        folder = Path(os.path.relpath(images, page.parent)).as_posix()
        parts = sections(found, collection, _pictures(captions, folder), best, folder)
        filled = fill(text, parts)
        if filled != text:
            write_file(page, filled)
    return missing(collection)


def fill(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """The text with what is between markers replaced; a marker that nothing belongs to is refused."""

    def part(match: re.Match[str]) -> str:
        if match[2] not in parts:
            raise ValueError(f"there are no results named {match[2]!r}; there are: {', '.join(parts)}")
        made = parts[match[2]]().strip()
        return f"{match[1]}\n{made}\n\n{match[3]}" if made else f"{match[1]}{match[3]}"

    if text.count("<!-- results:") != len(_MARKED.findall(text)):
        raise ValueError("a marker <!-- results: NAME --> is misspelt or has no <!-- end -->")
    return _MARKED.sub(part, text)


def sections(
    found: Found, results: Collection, pictures: str, best: Path = quality.RESULTS, images: str = "images"
) -> dict[str, Callable[[], str]]:
    """Every part that a page can ask for, by name."""
    context = f"{images}/{page_plots.PREFIX}{long_range.CONTEXT}.png"
    return {
        "missing": lambda: _missing_text(results),
        "headline": lambda: best_recipe.headline(best),
        "best-recipe": lambda: best_recipe.best(best),
        "papers-recipe": lambda: _papers_recipe(results),
        "recall": long_range.recalled,
        "context": lambda: long_range.context(best, context),
        "table1": lambda: _papers_table("table1", results),
        "table2": lambda: _papers_table("table2", results),
        "quality": lambda: quality.page(best),
        "dss": lambda: answers.dss(results),
        "lengths": lambda: answers.lengths(results),
        "hybrid": lambda: answers.hybrid(results),
        "lanes": lambda: answers.lanes(results),
        "block-recurrent": lambda: answers.block_recurrent(results),
        "equal-time": lambda: answers.equal_time(results),
        "vocabulary": lambda: _vocabulary(results),
        "init": lambda: _by_tokens("init", results),
        "init-hybrid": lambda: _by_tokens("init-hybrid", results),
        "rates": lambda: _by_tokens("rates", results),
        "figures": lambda: pictures,
        "runs": lambda: _runs(found, results.stale()),
        "commands": lambda: _commands(found),
    }


def _expected(target: str, results: Collection) -> Iterator[tuple[str, str]]:
    """(corpus, system) of a table: what should be there, then whatever else is, in the table's order."""
    there = {paper_corpus(name) or name: name for name in results.corpora()}
    for paper in dict.fromkeys([*_CORPORA, *there]):
        corpus = there.get(paper) or _CORPORA[paper]
        for system in STUDIES[target].systems:
            if paper == "PG-19":
                wanted = system.name not in _IF_THERE
            else:
                wanted = paper in _CORPORA and system.name in _EVERYWHERE
            if wanted or results.of(corpus, system.name):
                yield corpus, system.name


def missing(results: Collection) -> list[str]:
    """Runs that the page should have and lacks, one line per table and corpus."""
    lines = []
    for target in _TABLES:
        for corpus in dict.fromkeys(corpus for corpus, _ in _expected(target, results)):
            names = [name for where, name in _expected(target, results) if where == corpus]
            runs = {SYSTEMS[name].label: results.of(corpus, name) for name in names}
            labels = [label for label, found in runs.items() if not found]
            untimed = [label for label, found in runs.items() if found and not found[0][1]["tokens_per_second"]]
            lines += [f"{target}, {corpus}: {', '.join(labels)}"] if labels else []
            lines += [f"{target}, {corpus}, alone on the GPU for its speed: {', '.join(untimed)}"] if untimed else []
    corpora = list(dict.fromkeys(corpus for corpus, _ in _expected("table1", results)))
    books, by_text = corpora[0], _by_text(results)
    starts = [s.label for s in STUDIES["init"].systems if not results.of(books, s.name)]
    if len(STUDIES["init"].systems) - len(starts) < _STARTS:
        lines.append(f"init, {books}: {', '.join(starts)}")
    for corpus in corpora:
        if len({run.corpus.name for run, _ in by_text.get(corpus, [])}) < 2:
            lines.append(f"vocabulary, {corpus}: GSS on the same text with a second vocabulary")
    return lines


def _missing_text(results: Collection) -> str:
    lines = missing(results)
    if not lines:
        return "No run is missing."
    return "\n".join(["Not run yet, and shown as a dash below:", "", *(f"- {line}" for line in lines)])


def _papers_table(name: str, results: Collection) -> str:
    """A table of the paper with ours beside, at the tokens that most runs have; dashes where there are none."""
    target = STUDIES[name]
    rows, counted = [], []
    header: list[str] = []
    for corpus, system in _expected(name, results):
        part = results.of(corpus, system)
        header, made = table(target, part)
        rows += made or [_unmeasured(target, corpus, SYSTEMS[system])]
        counted += part
    return "\n\n".join([markdown(header, rows), "\n".join(f"- {note}" for note in notes(target, counted))])


def _unmeasured(target: Target, corpus: str, system: System) -> list[str]:
    """The row of a system that has no result yet: dashes beside the paper's figures."""
    size, cost, scores = paper_figures(target, system, paper_corpus(corpus))
    return [corpus, system.label, NONE, size, NONE, cost, *[NONE] * len(LENGTH_KEYS), *scores]


def _papers_recipe(results: Collection) -> str:
    """Every model of both of the paper's tables, on every corpus, without the paper's own figures."""
    header = ["corpus", "model", "params", "seeds", "tokens/s", *LENGTH_NAMES.values()]
    rows = []
    for corpus in results.corpora():
        for name in dict.fromkeys(system.name for target in _TABLES for system in STUDIES[target].systems):
            part = results.of(corpus, name)
            if part:
                scores = [[kept["lengths"].get(at, {}).get("perplexity") for _, kept in part] for at in answers.AT]
                cells = [corpus, SYSTEMS[name].label, millions(part[0][1]["parameters"]), str(len(part))]
                rows.append([*cells, mean([part[0][1]["tokens_per_second"]], 0), *map(mean, scores)])
    return markdown(header, rows) if rows else "Not run yet."


def _by_tokens(name: str, results: Collection) -> str:
    """A table of candidates for every number of training tokens, on the corpora that have any."""
    target, parts = STUDIES[name], []
    for tokens in sorted({run.tokens for run, _ in results.found}):
        part: list[tuple[Trial, Record]] = []
        for corpus in results.corpora():
            there = [entry for system in target.systems for entry in results.of(corpus, system.name, tokens)]
            # A model trained in one way is no comparison: a default that every table has, a short run for its speed.
            ways = {(run.system.model, run.config.batching, run.system.name) for run, _ in there}
            several = {what for what, count in Counter(way[:2] for way in ways).items() if count > 1}
            part += [(run, kept) for run, kept in there if (run.system.model, run.config.batching) in several]
        if part:
            parts += [f"{tokens:,} tokens:", markdown(*table(target, part))]
            parts += ["\n".join(f"- {note}" for note in notes(target, part))]
    return "\n\n".join(parts) or "Not run yet."


def _by_text(results: Collection) -> dict[str, list[tuple[Trial, Record]]]:
    """GSS on every preparation of the same held-out text, by the corpus that the tables have."""
    corpora = {run.corpus.name: kept["evaluation"]["text"] for run, kept in results.found}
    there = {name: results.of(name, "vocabulary") for name in sorted(corpora)}
    return {
        main: [entry for name, part in there.items() if corpora[name] == corpora[main] for entry in part]
        for main in results.corpora()
        if there[main]
    }


def _vocabulary(results: Collection) -> str:
    """Bits per byte where a text was prepared with several vocabularies."""
    part = [entry for rows in _by_text(results).values() for entry in rows if len({r.corpus.name for r, _ in rows}) > 1]
    if not part:
        return "Not run yet."
    return "\n\n".join([markdown(*table(STUDIES["vocabulary"], part)), f"- {notes(STUDIES['vocabulary'], part)[0]}"])


def _runs(found: Found, stale: Sequence[str]) -> str:
    """Every kept run, whatever its scale and settings; those whose settings have moved since are named."""
    header = [
        "run",
        "params",
        "tokens",
        "epochs",
        "seed",
        "tokens/s",
        "steps, min",
        "wall, min",
        "GB",
        "compiled",
        "4k",
    ]
    header += ["hardware", "torch", "commit", "date"]
    rows = []
    for run, kept in found:
        wall, memory = kept["wall_seconds"], kept["peak_memory_bytes"]
        parts = "over " if wall["from_step"] else ""  # what the parts before the last took is not known
        rows.append(
            [
                f"`{run.name}`",
                millions(kept["parameters"]),
                f"{run.tokens:,}",
                f"{kept['epochs']:.2f}",
                str(run.config.seed),
                "shared" if kept.get("shared") else f"{kept['tokens_per_second']:,.0f}",
                f"{kept['seconds'] / 60:.1f}",
                f"{parts}{(wall['training'] + wall['scoring']) / 60:.1f}",
                NONE if memory is None else f"{memory / 1e9:.1f}",
                "yes" if kept["layout"]["compile"] else "no",
                mean([kept["lengths"].get("4096", {}).get("perplexity")]),
                kept["hardware"],
                kept["versions"].get("torch", NONE),
                kept["commit"] or NONE,
                kept["date"][:10],
            ]
        )
    if not rows:
        return "Not run yet."
    names = ", ".join(f"`{name}`" for name in stale)
    moved = [f"Made with other settings than today's, and therefore in no table above: {names}."] if stale else []
    return "\n\n".join([markdown(header, rows), *moved])


def _commands(found: Found) -> str:
    """The commands that made the results, each once, without options that only say where, how long and from what."""
    commands = sorted({_INCIDENTAL.sub("", kept["command"]) for _, kept in found if kept["command"]})
    return "\n".join(["```", *commands, "```"]) if commands else "None yet."


def _pictures(figures: Mapping[str, str], folder: str) -> str:
    lines = [f"![{caption}]({folder}/{name})" for name, caption in figures.items()]
    return "\n\n".join(lines) or "None yet."
