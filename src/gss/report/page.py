"""The parts of a page as HTML, and the page: figures inside as SVG, nothing loaded from anywhere, all text escaped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from gss.report.figures import Picture, draw
from gss.report.theme import css_variables, svg

# Said in the file itself: whatever ends up in it, nothing is loaded and nothing runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: list[Sequence[str]]
    quiet: frozenset[int] = frozenset()
    """Rows that are there to compare with."""
    words: bool = False
    """Columns hold words, not numbers."""

    def html(self) -> str:
        """The table, in a box that scrolls where it is too wide."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.header)
        body = ""
        for number, (name, *cells) in enumerate(self.rows):
            quiet = ' class="quiet"' if number in self.quiet else ""
            inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            body += f'<tr{quiet}><th scope="row">{escape(name)}</th>{inside}</tr>'
        words = ' class="words"' if self.words else ""
        return (
            f'<div class="scroll" tabindex="0"><table{words}><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )


def page(title: str, about: str, sections: Mapping[str, Iterable[str]]) -> str:
    """The whole page: each section's parts under its title. `about` says when and with what it was made."""
    css = css_variables() + (files("gss.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name in sections)
    inside = "".join(
        f'\n<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{"".join(parts)}</section>'
        for name, parts in sections.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style></head>\n<body><main>"
        f'<h1>{escape(title)}</h1><p class="about">{escape(about)}</p>'
        f'<nav aria-label="Sections">{links}</nav>'
        f"{inside}</main></body></html>\n"
    )


def side_by_side(parts: Iterable[str], kind: str = "grid") -> str:
    """Parts beside each other where there is room; nothing where there are none."""
    inside = "\n".join(parts)
    return inside and f'<div class="{kind}">{inside}</div>'


def figures(pictures: Iterable[Picture]) -> str:
    """Pictures side by side, each with its title and caption."""
    return side_by_side(
        f"<figure><h3>{escape(picture.title)}</h3>{svg(draw(picture), picture.name, picture.title)}"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        for picture in pictures
    )


def card(name: str, colour: str, about: str, facts: Iterable[tuple[str, str]]) -> str:
    """A run in a few figures; `colour` is the name of the run's colour."""
    listed = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(much)}</dd></div>" for what, much in facts)
    inside = f'<h3>{escape(name)}</h3><p class="about">{escape(about)}</p><dl>{listed}</dl>'
    return f'<article class="card" style="--mark:var(--{colour})">{inside}</article>'


def sample(name: str, colour: str, text: str) -> str:
    """Text that a model wrote."""
    inside = f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>"
    return f'<div class="sample" style="--mark:var(--{colour})">{inside}</div>'


def heading(name: str, colour: str) -> str:
    """A run's name over its part of a section."""
    return f'<h3 class="named" style="--mark:var(--{colour})">{escape(name)}</h3>'


def paragraph(kind: str, text: str) -> str:
    """An `intro` to a section, or a `note` on something that is missing."""
    return f'<p class="{kind}">{escape(text)}</p>'


def _anchor(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())
