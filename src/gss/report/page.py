"""A report as data, and as one HTML file: figures inside as SVG, nothing loaded from anywhere, all text escaped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import groupby

from gss.report.figures import Picture, draw
from gss.report.theme import css_variables, svg

# Said in the file itself: whatever ends up in it, nothing is loaded and nothing runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Card:
    """A run in a few figures; `colour` is the name of the run's colour."""

    name: str
    colour: str
    about: str
    facts: list[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: list[Sequence[str]]
    quiet: frozenset[int] = frozenset()
    """Rows that are there to compare with."""
    words: bool = False
    """Columns hold words, not numbers."""


@dataclass(frozen=True)
class Sample:
    """Text that a model wrote; without text, a run's name over its part of a section."""

    name: str
    colour: str
    text: str | None = None


@dataclass(frozen=True)
class Note:
    """A sentence; something that is missing, as a rule."""

    text: str


Block = Card | Table | Picture | Sample | Note


@dataclass
class Section:
    """A heading and what is under it."""

    title: str
    intro: str = ""
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Report:
    """A whole report."""

    title: str
    about: str
    """When and with what it was made."""
    sections: list[Section]


def html(report: Report) -> str:
    """The whole page."""
    css = css_variables() + (files("gss.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{_anchor(section)}">{escape(section.title)}</a>' for section in report.sections)
    sections = "".join(_section(section) for section in report.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(report.title)}</title>\n<style>\n{css}</style></head>\n<body><main>"
        f'<h1>{escape(report.title)}</h1><p class="about">{escape(report.about)}</p>'
        f'<nav aria-label="Sections">{links}</nav>'
        f"{sections}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    intro = f'<p class="intro">{escape(section.intro)}</p>' if section.intro else ""
    title = escape(section.title)
    return f'\n<section id="{_anchor(section)}"><h2>{title}</h2>{intro}{"".join(_blocks(section.blocks))}</section>'


def _blocks(blocks: list[Block]) -> Iterator[str]:
    """Neighbours of one kind stand side by side where there is room."""
    for kind, group in groupby(blocks, type):
        inside = "\n".join(map(_block, group))
        in_grid = kind in (Picture, Card) or 'class="sample"' in inside
        yield f'<div class="grid{" cards" if kind is Card else ""}">{inside}</div>' if in_grid else inside


def _block(block: Block) -> str:
    match block:
        case Picture():
            image = svg(draw(block), block.name, block.title)
            caption = f"<figcaption>{escape(block.caption)}</figcaption>"
            return f"<figure><h3>{escape(block.title)}</h3>{image}{caption}</figure>"
        case Card():
            facts = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(much)}</dd></div>" for what, much in block.facts)
            inside = f'<h3>{escape(block.name)}</h3><p class="about">{escape(block.about)}</p><dl>{facts}</dl>'
            return f'<article class="card" style="--mark:var(--{block.colour})">{inside}</article>'
        case Table():
            return _table(block)
        case Sample(text=None):
            return f'<h3 class="named" style="--mark:var(--{block.colour})">{escape(block.name)}</h3>'
        case Sample():
            inside = f"<h3>{escape(block.name)}</h3><pre>{escape(block.text or '')}</pre>"
            return f'<div class="sample" style="--mark:var(--{block.colour})">{inside}</div>'
        case Note():
            return f'<p class="note">{escape(block.text)}</p>'


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    body = ""
    for number, (name, *cells) in enumerate(table.rows):
        quiet = ' class="quiet"' if number in table.quiet else ""
        inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr{quiet}><th scope="row">{escape(name)}</th>{inside}</tr>'
    words = ' class="words"' if table.words else ""
    return (
        f'<div class="scroll" tabindex="0"><table{words}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _anchor(section: Section) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in section.title.lower())
