"""What the results say together: table.md, results.json and a figure a corpus, in a target's folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gss.report.files import replace
from gss.report.theme import MissingMatplotlibError
from gss.reproduce.plots import draw
from gss.reproduce.settings import Target
from gss.reproduce.tables import Found, markdown, notes, table


def write_report(target: Target, found: Found, folder: Path, say: Callable[[str], None], figures: bool = True) -> str:
    """Write all three; returns the table with its notes as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report_text(target, found)
    images: dict[str, bytes] = {}
    if found and figures:
        try:
            images = draw(found)
        except MissingMatplotlibError as error:
            say(f"no figures: {error}")
    for name, content in images.items():
        replace(folder / name, content)
    pictures = "".join(f"\n![Perplexity by length and loss by position]({name})\n" for name in images)
    replace(folder / "table.md", (text + pictures).encode())
    everything: dict[str, Any] = {"target": target.name, "runs": [kept for _, kept in found]}
    replace(folder / "results.json", (json.dumps(everything, indent=1) + "\n").encode())
    return text


def report_text(target: Target, found: Found) -> str:
    """The table under its title, its notes below."""
    lines = [f"# {target.title}", ""]
    if found:
        lines += [markdown(*table(target, found)), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(target, found))]) + "\n"
