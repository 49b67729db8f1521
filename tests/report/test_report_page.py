"""Reports as files: what is in them, and what never is."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gss.report import write_report
from tests.conftest import Command
from tests.report.conftest import Lab


class Page(HTMLParser):
    """Tags that are open at the end, ids, references and the text of a page."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                self.references.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(path: Path) -> tuple[Page, str]:
    source = path.read_text(encoding="utf-8")
    return Page(source), source


def test_one_run_has_every_part(lab: Lab, tmp_path: Path) -> None:
    page, source = page_of(write_report([lab.hybrid], tmp_path / "deep" / "report.html"))
    assert page.open == []
    assert page.tags.count("svg") == 4 + 2 + 2
    for title in ("Summary", "Training", "Perplexity by length", "What the state spaces remember", "Text"):
        assert title in page.text
    for axis in ("step", "loss (nats per token)", "learning rate", "gradient norm", "tokens per second",
                 "evaluation length (tokens)", "perplexity per token", "position in the window (tokens)",
                 "time constant −1/Re λ (tokens)", "tokens back"):  # fmt: skip
        assert axis in page.text
    assert "circles: held-out data" in page.text
    assert "prefers-color-scheme:dark" in source
    assert 'name="viewport"' in source
    assert not list(lab.hybrid.parent.glob("**/.*aside*"))


def test_several_runs_are_compared_and_nothing_comes_from_elsewhere(lab: Lab, tmp_path: Path) -> None:
    page, source = page_of(write_report([lab.hybrid, lab.dss], tmp_path / "report.html"))
    for words in ("hybrid and dss", "What differs", "model.pattern", "seed", "gss, attention, gss, gss"):
        assert words in page.text
    assert "optimizer.weight_decay" not in page.text
    assert re.search(r"<details><summary>\d\d settings</summary>.*model\.pattern.*</details>", source, re.DOTALL)
    assert page.tags.count("svg") == 4 + 2 + 2 * 2
    assert page.references
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.references)
    assert all(name in page.ids for name in re.findall(r"url\(#([^)]+)\)", source))
    assert len(page.ids) == len(set(page.ids))
    addresses = set(re.findall(r"""https?://[^"'\s<>)]+""", source))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "@import" not in source
    assert not re.search(r"\son\w+=", source)


def test_texts_are_escaped(lab: Lab, tmp_path: Path) -> None:
    wild = "<script>alert(1)</script> $x^2$ & \"'`"
    (lab.hybrid / "samples" / "step-00000012.txt").write_text(wild, encoding="utf-8")
    named = lab.hybrid.rename(tmp_path / "<b>run & $co$")
    page, source = page_of(write_report([named, lab.dss], tmp_path / "report.html"))
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert wild in page.text
    assert "<b>run & $co$" in page.text
    assert source.count("<svg") == 10


def test_the_command(lab: Lab, tmp_path: Path, command_line: Command) -> None:
    page = tmp_path / "r.html"
    options = ("--lengths", "32,128", "--max-tokens", 600, "--prompt", "abc")
    status, said, errors = command_line("report", lab.dss, "--out", page, *options)
    assert status == 0, errors
    assert f"wrote {page}" in said
    assert "scoring dss: 100%" in errors
    assert "128" in page_of(page)[0].text
    status, said, errors = command_line("report", tmp_path, "--out", tmp_path / "none.html")
    assert (status, said) == (1, "")
    assert "is not a run folder" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "none.html").exists()


def test_without_matplotlib_the_extra_is_named(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'gss-lm\[report\]'"):
        write_report([lab.dss], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_bad_requests(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder: give a file"):
        write_report([lab.dss], tmp_path)
    with pytest.raises(ValueError, match="given twice"):
        write_report([lab.dss, lab.dss], tmp_path / "report.html")
    with pytest.raises(ValueError, match="no such folder"):
        write_report([tmp_path / "gone"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="0 or more"):
        write_report([lab.dss], tmp_path / "report.html", max_tokens=-1)
