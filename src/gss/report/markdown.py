"""A report as Markdown with its figures in PNG files beside it."""

import re
from collections.abc import Sequence
from pathlib import Path

from gss.report.curves import Picture
from gss.report.document import Block, Card, Document, Heading, Note, Sample, Table
from gss.report.theme import png

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def markdown(document: Document, pictures: str) -> tuple[str, dict[Path, bytes]]:
    """The text, and each picture's bytes by its path from the text's folder; `pictures` is the folder they go to."""
    lines = [f"# {_escape(document.title)}", "", _escape(document.about), ""]
    lines += [f"- {_escape(finding)}" for finding in document.findings]
    images: dict[Path, bytes] = {}
    for section in document.sections:
        lines += ["", f"## {_escape(section.title)}", ""]
        if section.intro:
            lines += [_escape(section.intro), ""]
        for block in section.blocks:
            if isinstance(block, Picture):
                path = Path(pictures) / f"{block.name}.png"
                images[path] = png(block.figure)
                place = path.as_posix().replace(" ", "%20")
                lines += [
                    f"![{_escape(block.title)}]({place})",
                    "",
                    f"*{_escape(block.title)}.* {_escape(block.caption)}",
                ]
            else:
                lines += _block(block)
            lines.append("")
    return "\n".join(lines).rstrip() + "\n", images


def _block(block: Block) -> list[str]:
    match block:
        case Card():
            rows = [f"| {_escape(what)} | {_escape(much)} |" for what, much in block.facts]
            return [f"**{_escape(block.name)}**: {_escape(block.about)}", "", "| | |", "|---|---|", *rows]
        case Table():
            align = [":--", *((":--" if block.words else "--:") for _ in block.header[1:])]
            table: list[Sequence[str]] = [block.header, align, *block.rows]
            return [
                "| " + " | ".join(cells if row == 1 else map(_escape, cells)) + " |" for row, cells in enumerate(table)
            ]
        case Sample():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
            return [f"**{_escape(block.name)}**", "", f"{fence}text", block.text, fence]
        case Heading():
            return [f"### {_escape(block.name)}"]
        case Note():
            return [f"> {_escape(block.text)}"]
    raise AssertionError(block)


def _escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
