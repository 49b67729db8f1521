"""The page of results, on made-up results: all tables from some runs, and what is missing said."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import best_recipe, long_range, page_plots
from experiments.page import fill, missing, sections, write_page
from experiments.records import Collection, read_results
from experiments.results import ResultStore
from experiments.studies import EVERY
from gss.reproduce import SCALES, Corpus, Trial
from gss.reproduce.trials import trial_of
from tests.reproduce.conftest import BOOKS, made_up

OWN = replace(BOOKS, name="books-own", lossless=True, identity={"tokenizer": "own"})
PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def scored(run: Trial, perplexity: float, at_65k: float | None = None, **changes: Any) -> dict[str, Any]:
    """A made-up result with a perplexity up to 16k and on whole documents, and another at 65k."""
    row = made_up(run)["lengths"]["512"]
    lengths = {name: {**row, "perplexity": perplexity} for name in ("512", "4096", "16384", "whole")}
    if at_65k is not None:
        lengths["65536"] = {**row, "perplexity": at_65k}
    return made_up(run, lengths=lengths, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some runs on books: GSS with two seeds, DSS with one, a hybrid, lanes, a block-recurrent one, two starts."""
    shelf = ResultStore(tmp_path_factory.mktemp("results"))

    def put(system: str, *figures: Any, corpus: Corpus = BOOKS, seed: int = 0, tokens: int | None = None) -> None:
        run = trial_of(EVERY[system], SCALES["small"], corpus, seed, tokens)
        *scores, speed = figures
        shelf.put(run, scored(run, *scores, tokens_per_second=speed))

    put("gss", 50.0, 49.5, 800_000.0)
    put("gss", 51.0, 50.49, 800_000.0, seed=1)
    put("dss", 52.0, 60.0, 250_000.0)
    put("gss-hybrid", 49.0, 48.0, 700_000.0)
    put("gss-lanes", 51.51, 50.5, 790_000.0)
    put("rec-fixed-skip", 47.0, 47.0, 300_000.0)
    put("init-1-100", 53.0, 54.0, 800_000.0)
    put("gss", 46.0, 45.0, 800_000.0, tokens=2 * 104_857_600)
    put("gss-0.0016", 55.0, 54.0, 800_000.0)
    put("gss-0.0016", 56.0, 54.0, 800_000.0, seed=1)
    put("vocabulary", 48.0, 47.0, 800_000.0, corpus=OWN)
    put("rec-fixed-skip-adafactor-0.03", 900.0, 300_000.0, tokens=2_621_440)  # one way alone: no row of `rates`
    return shelf.folder


def test_results_are_read_without_their_corpora(folder: Path) -> None:
    found = read_results(folder)
    assert [run.name for run, _ in found] == sorted(path.stem for path in folder.glob("*.json"))
    results = Collection(found, "small")
    assert results.tokens == 104_857_600
    assert results.corpora() == ["books"]
    assert [run.config.seed for run, _ in results.of("books", "gss")] == [0, 1]
    # The default start, at the rate that starts are compared at, is another name of a row of `rates`.
    assert [kept["system"] for _, kept in results.of("books", "init-half-low-frequencies")] == ["gss-0.0016"] * 2
    assert len(results.of("books", "init-1-100")) == 1
    assert not results.stale()


def test_the_answers(folder: Path) -> None:
    found = read_results(folder)
    parts = {name: make() for name, make in sections(found, Collection(found, "small"), "").items()}
    assert "at or below DSS (−2.88%) and trains 3.20× as fast, which meets our goal of 2.5×" in parts["dss"]
    assert "| 50.50 ± 0.71 |" in parts["dss"]
    assert "−1.00% ± 0.00" in parts["lengths"]
    assert "Worse at 65k than at 4k: DSS on books." in parts["lengths"]
    books = [cell.strip() for cell in parts["hybrid"].splitlines()[2].split("|")]
    assert books[1:8] == ["books", "GSS-Hybrid", "GSS", "−2.97%", "−2.97%", "−2.97%", "−3.99%"]
    books = [cell.strip() for cell in parts["lanes"].splitlines()[2].split("|")]
    assert books[2:6] == ["GSS in lanes", "GSS", "+2.00%", "+2.00%"]
    assert (
        "GSS-Hybrid (49.00) and the best block-recurrent model is Rec:fixed:skip (47.00): +4.26%"
        in (parts["block-recurrent"])
    )
    assert "GSS, 210M tokens" in parts["equal-time"]  # 4.4 minutes against 5.8
    assert "−2.13%" in parts["equal-time"]
    assert parts["vocabulary"].count("| books") == 2
    assert "no mode slower than 100 tokens" in parts["init"]
    assert "55.50 ± 0.71" in parts["init"]
    assert "GSS, rate 0.0032" in parts["rates"]
    assert "GSS, rate 0.0016" in parts["rates"]
    assert "Rec:fixed:skip" not in parts["rates"]
    missing = next(line for line in parts["table2"].splitlines() if "| GSS-L " in line)
    assert missing.replace(" ", "").endswith("|–|–|–|–|–|12.48|11.33|11.16|11.12|")
    assert len({len(line) for line in parts["table2"].splitlines() if line.startswith("|")}) == 1
    assert "| GSS (2 seeds) " in parts["table1"]
    rows = [line for line in parts["papers-recipe"].splitlines() if "GSS-Hybrid" in line]
    assert [cell.strip() for cell in rows[0].split("|")[1:8]] == [
        "books", "GSS-Hybrid", "46.3M", "1", "700,000", "49.00", "49.00",
    ]  # fmt: skip
    assert parts["runs"].count("\n") == 1 + 12
    assert "abc1234" in parts["runs"]
    assert "gss reproduce table1" in parts["commands"]


def test_a_run_beside_others_has_the_speed_of_one_that_was_alone(tmp_path: Path) -> None:
    shelf = ResultStore(tmp_path)
    beside, alone = (None, None), (2_621_440, 900_000.0)
    for system, (tokens, speed) in (("gss", beside), ("gss", alone), ("dss", beside)):
        run = trial_of(EVERY[system], SCALES["small"], BOOKS, 0, tokens)
        shelf.put(run, scored(run, 50.0, tokens_per_second=speed, shared=speed is None))
    found = read_results(tmp_path)
    results = Collection(found, "small")
    assert "table1, books, alone on the GPU for its speed: DSS" in missing(results)
    parts = sections(found, results, "")
    rows = [line.split("|") for line in parts["table1"]().splitlines() if line.startswith("| books")]
    assert {row[2].strip(): row[5].strip() for row in rows} == {"Transformer": "–", "DSS": "–", "GSS": "900,000"}
    assert [line.split("|")[6].strip() for line in parts["runs"]().splitlines()[2:]] == ["shared", "900,000", "shared"]


def test_what_is_missing_is_named(folder: Path) -> None:
    lines = missing(Collection(read_results(folder), "small"))
    assert "table1, books: Transformer" in lines
    assert "table2, math: GSS, GSS-Hybrid" in lines
    assert "vocabulary, code: GSS on the same text with a second vocabulary" in lines
    assert not any(line.startswith("vocabulary, books") for line in lines)


def test_settings_that_have_moved_are_left_out(folder: Path, tmp_path: Path) -> None:
    path = next(folder.glob("*.dss.*"))
    kept = json.loads(path.read_text())
    kept["config"]["optimizer"]["learning_rate"] = 0.5
    (tmp_path / path.name).write_text(json.dumps(kept))
    found = read_results(tmp_path)
    results = Collection(found, "small")
    assert not results.of("books", "dss")
    assert "table1, books: Transformer, DSS, GSS" in missing(results)
    *_, last = sections(found, results, "")["runs"]().splitlines()
    assert "other settings than today" in last
    assert kept["name"] in last


def test_the_page_of_this_repository_can_be_filled(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    write_page(folder, [page], page.parent / "images", best=tmp_path)
    text = page.read_text(encoding="utf-8")
    names = {path.name for path in (page.parent / "images").iterdir()}
    assert names == {"results-books.png", "results-speed.png", "results-init.png"}
    assert all(f"](images/{name})" in text for name in names)
    assert "## Is GSS at or below DSS" in text
    before = page.stat().st_mtime_ns
    write_page(folder, [page], page.parent / "images", best=tmp_path)  # nothing new: nothing written
    assert page.stat().st_mtime_ns == before


def best_run(system: str, nats: float, parameters: int = 45_000_000, **more: Any) -> dict[str, Any]:
    """A made-up result of `experiments.quality`: four documents, of which the second and fourth are reported."""
    changes = system.split("+")[1:]
    settings = {"optimizer.learning_rate": "6.4e-3", **dict(change.split("=", 1) for change in changes)}
    documents = {"512": [(nats * 100, 100)] * 4, "4096": [(nats * 90, 100)] * 4}
    about = {"hardware": "a GPU", "date": "today", "commit": "abc1234"}
    result = {"system": system, "settings": settings, "parameters": parameters, "tokens": 104_857_600}
    return {**result, "documents": documents, **about, **more}


def test_the_best_recipe_has_the_best_settings_of_each_model(tmp_path: Path) -> None:
    runs = [
        best_run("llama-small", 4.0),
        best_run("llama-small+optimizer.learning_rate=1.28e-2", 3.8),
        best_run("gss2-small", 3.7),
        best_run("gss2-small+seed=1", 3.6),
        best_run("gss2-small+model.attention.sliding=512", 3.9),
        best_run("gss2-small+model.pattern=gss2", 3.95),
        best_run("gss2", 3.0, parameters=190_000_000),
        best_run("mamba2", 3.9),
    ]
    (tmp_path / "books.json").write_text(json.dumps(runs))
    (tmp_path / "code.json").write_text(json.dumps([best_run("gss-hybrid-small", 1.0)]))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in best_recipe.best(tmp_path).splitlines()[2:]]
    assert [row[1:5] for row in rows] == [
        ["GSS2", "190M", "105M", "1"],
        ["GSS2", "45.0M", "105M", "2"],
        ["Llama", "45.0M", "105M", "1"],
        ["Mamba-2", "45.0M", "105M", "1"],
        ["GSS2 (gss2 layers only)", "45.0M", "105M", "1"],
        ["GSS-Hybrid", "45.0M", "105M", "1"],
    ]
    ratios = {(row[0], row[1], row[2]): row[9] for row in rows}
    assert ratios["books", "GSS2", "190M"] == "–"  # no Llama of its size
    assert ratios["books", "GSS2", "45.0M"] == f"{math.exp(0.9 * (3.65 - 3.8)):.3f} ± 0.000"
    assert ratios["books", "Llama", "45.0M"] == "1"
    assert ratios["code", "GSS-Hybrid", "45.0M"] == "–"
    assert rows[2][10] == "rate 1.28e-2"
    assert rows[2][6] == f"{math.exp(0.9 * 3.8):.2f}"
    assert best_recipe.headline(tmp_path).count("\n") == 6  # books alone
    assert long_range.context(tmp_path, "") == ""


def test_the_effective_context_is_a_figure_and_a_table(folder: Path, tmp_path: Path) -> None:
    found = {"distances": [512, 1024, 4096], "loss": [3.4, 3.35, 3.3], "effective": 4096, "interval": [2048, 4096]}
    runs = [best_run(f"gss2-small+seed={seed}", 3.7, context=found) for seed in (0, 1)]
    runs += [best_run("llama-small+model.zero_outputs=true", 3.8, context={**found, "effective": None})]
    runs += [best_run("gss2-small+model.attention.sliding=512", 3.8, context=found)]
    best = tmp_path / "quality"
    best.mkdir()
    (best / "books.json").write_text(json.dumps(runs))
    page = tmp_path / "page.md"
    page.write_text("<!-- results: context -->\n<!-- end -->\n")
    write_page(folder, [page], tmp_path / "images", best=best)
    text = page.read_text(encoding="utf-8")
    assert "## How far back does it look?" in text
    assert "](images/results-context.png)" in text
    assert (tmp_path / "images" / "results-context.png").is_file()
    rows = [[cell.strip() for cell in line.split("|")[1:7]] for line in text.splitlines() if line.startswith("| books")]
    assert rows == [
        ["books", "GSS2", "0", "4,096", "2,048 to 4,096", "0.100"],
        ["books", "GSS2", "1", "4,096", "2,048 to 4,096", "0.100"],
        ["books", "Llama", "0", "–", "2,048 to 4,096", "0.100"],
        ["books", "GSS2", "0", "4,096", "2,048 to 4,096", "0.100"],
    ]
    (axes,) = page_plots.subplots(1)
    long_range.draw_context(axes, list(long_range.with_context(best)))
    assert [line.get_label() for line in axes.lines] == ["GSS2", "_", "Llama", "GSS2, sliding=512"]
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert dict(zip(axes.get_xticks(), ticks, strict=True)) == {512: "512", 1024: "1k", 4096: "4k"}


def test_recall_is_a_row_per_study_and_length(tmp_path: Path) -> None:
    def kept(seed: int, accuracy: float) -> dict[str, Any]:
        scores = [{"length": 512, "accuracy": accuracy, "solved": 0.5}]
        model = {"depth": 1, "pattern": ["gss2"]}
        return {"study": "recall", "seed": seed, "length": 512, "parameters": 1234, "model": model, "accuracy": scores}

    for seed, accuracy in enumerate((0.99, 1.0)):
        (tmp_path / f"recall.seed{seed}.json").write_text(json.dumps(kept(seed, accuracy)))
    (row,) = long_range.recalled(tmp_path).splitlines()[2:]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "`recall`", "1 × gss2", "1,234", "512", "512", "2", "99.50 ± 0.71", "50.00 ± 0.00",
    ]  # fmt: skip


def test_a_page_without_any_results(tmp_path: Path) -> None:
    results = Collection([], "small")
    text = fill(PAGE.read_text(encoding="utf-8"), sections([], results, "None yet."))
    assert "| books  | Transformer " in text
    assert page_plots.draw_page(results) == {}


def test_wrong_markers_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no results named 'table9'"):
        fill("<!-- results: table9 -->\n<!-- end -->", {"table1": lambda: ""})
    with pytest.raises(ValueError, match="has no <!-- end -->"):
        fill("<!-- results: table1 -->\n", {"table1": lambda: ""})
    assert fill("a <!-- results: x -->\nold\n<!-- end --> b", {"x": lambda: "new"}) == (
        "a <!-- results: x -->\n\nnew\n\n<!-- end --> b"
    )
