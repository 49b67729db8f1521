"""The tables' text, on made-up results."""

from dataclasses import replace
from pathlib import Path

import pytest

from gss.reproduce.measure import _without_unknown
from gss.reproduce.plan import Corpus, planned
from gss.reproduce.plots import draw
from gss.reproduce.report import report_text, write_report
from gss.reproduce.settings import SCALES, TARGETS
from tests.reproduce.conftest import made_up

BOOKS = Corpus("books", Path("books"), 32_000, False, {}, "0123456789", 4_778_601, 104_667_316, 399_616_561)

TABLE_1 = """\
# Table 1: DSS and GSS at equal parameters

| corpus | model         | params | paper's | tokens/s | paper steps/s |          512 |           4k |          16k | \
65k |        whole | paper 512 | paper 4k | paper 16k | paper 65k |
| ------ | ------------- | -----: | ------: | -------: | ------------: | -----------: | -----------: | -----------: | \
--: | -----------: | --------: | -------: | --------: | --------: |
| books  | Transformer   |  46.3M |    182M |  700,000 |           6.6 |        32.00 |        32.00 |        32.00 | \
  – |        32.00 |    13.51† |        – |         – |         – |
| books  | DSS           |  46.3M |    209M |  700,000 |           1.8 |        32.00 |        32.00 |        32.00 | \
  – |        32.00 |     14.51 |    13.53 |    692.10 |         – |
| books  | GSS (2 seeds) |  46.3M |    192M |  700,000 |           5.3 | 32.00 ± 0.00 | 32.00 ± 0.00 | 32.00 ± 0.00 | \
  – | 32.00 ± 0.00 |     14.01 |    12.84 |     12.94 |     12.47 |

"""


def test_table_1_has_the_papers_figures_beside_ours() -> None:
    target = TARGETS["table1"]
    runs = planned(target, SCALES["small"], [BOOKS])
    runs += planned(target, SCALES["small"], [BOOKS], only=["gss"], seeds=[1])
    text = report_text(target, [(run, made_up(run)) for run in runs])
    assert text.startswith(TABLE_1)
    assert "104,857,600 training tokens (1.00 epochs) at length 4,096" in text
    assert "Hardware: a GPU; torch 2.11.0; commit abc1234." in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("table2", ["Rec:fixed:skip", "0.8k", "11.55", "196M+", "373M", "XL:2048"]),
        ("lengths", ["GSS-Hybrid", "12.47"]),
        ("init", ["1-1000", "700", "900", "2.0%", "no mode slower than 100 tokens"]),
        ("rates", ["GSS, rate 0.0016"]),
        ("vocabulary", ["| no ", "1.2500", "1.5000", "4.49%", "01234567", "3.72"]),
    ],
)
def test_other_tables(name: str, expected: list[str]) -> None:
    target = TARGETS[name]
    text = report_text(target, [(run, made_up(run)) for run in planned(target, SCALES["small"], [BOOKS])])
    for words in expected:
        assert words in text, words
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(target.systems)
    assert len({len(line) for line in lines}) == 1


def test_an_empty_table_says_so() -> None:
    assert "Nothing is done yet" in report_text(TARGETS["table2"], [])


def test_figures_and_files(tmp_path: Path) -> None:
    target = TARGETS["lengths"]
    corpora = [BOOKS, replace(BOOKS, name="math")]
    found = [(run, made_up(run)) for run in planned(target, SCALES["small"], corpora)]
    assert list(draw(found)) == ["books.png", "math.png"]
    write_report(target, found, tmp_path / "lengths", lambda text: None)
    assert {path.name for path in (tmp_path / "lengths").iterdir()} == {
        "table.md", "results.json", "books.png", "math.png",
    }  # fmt: skip
    assert "![" in (tmp_path / "lengths" / "table.md").read_text()


def test_unknown_characters_do_not_come_back() -> None:
    assert _without_unknown("a \u2047 b \u2047  \u2047 c") == "abc"
