"""A report as one HTML file: figures inside as SVG, nothing loaded from anywhere, every text escaped."""

from collections.abc import Iterator
from html import escape
from importlib.resources import files
from itertools import groupby

from gss.report.curves import Picture
from gss.report.document import Block, Card, Document, Heading, Note, Sample, Section, Table
from gss.report.theme import css_variables, svg

# Said in the file itself: whatever ends up in it, nothing is loaded and nothing runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html(document: Document) -> str:
    """The whole page."""
    css = css_variables() + (files("gss.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{_anchor(section)}">{escape(section.title)}</a>' for section in document.sections)
    found = "".join(f"<li>{escape(finding)}</li>" for finding in document.findings)
    sections = "".join(_section(section) for section in document.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(document.title)}</title>\n<style>\n{css}</style></head>\n<body><main>"
        f'<h1>{escape(document.title)}</h1><p class="about">{escape(document.about)}</p>'
        f'<nav aria-label="Sections">{links}</nav>'
        + (f'<ul class="findings">{found}</ul>' if found else "")
        + f"{sections}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    intro = f'<p class="intro">{escape(section.intro)}</p>' if section.intro else ""
    title = escape(section.title)
    return f'\n<section id="{_anchor(section)}"><h2>{title}</h2>{intro}{"".join(_blocks(section.blocks))}</section>'


def _blocks(blocks: list[Block]) -> Iterator[str]:
    """Neighbours of one kind stand side by side where there is room."""
    for kind, group in groupby(blocks, type):
        inside = "\n".join(map(_block, group))
        if kind in (Picture, Card, Sample):
            yield f'<div class="grid{" cards" if kind is Card else ""}">{inside}</div>'
        else:
            yield inside


def _block(block: Block) -> str:
    match block:
        case Picture():
            image = svg(block.figure, block.name, block.title)
            caption = f"<figcaption>{escape(block.caption)}</figcaption>"
            return f"<figure><h3>{escape(block.title)}</h3>{image}{caption}</figure>"
        case Card():
            facts = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(much)}</dd></div>" for what, much in block.facts)
            about = f'<p class="about">{escape(block.about)}</p>'
            style = f'style="--mark:var(--{block.colour})"'
            return f'<article class="card" {style}><h3>{escape(block.name)}</h3>{about}<dl>{facts}</dl></article>'
        case Table():
            return _table(block)
        case Sample():
            style = f'style="--mark:var(--{block.colour})"'
            return f'<div class="sample" {style}><h3>{escape(block.name)}</h3><pre>{escape(block.text)}</pre></div>'
        case Heading():
            return f'<h3 class="named" style="--mark:var(--{block.colour})">{escape(block.name)}</h3>'
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
