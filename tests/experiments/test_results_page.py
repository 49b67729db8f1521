"""The pages of results: names of settings, tables on made-up results, and pages that are current."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments import best_recipe, paper_recipe, plots, recall
from experiments.compare import grouped
from experiments.page import fill
from experiments.results_page import PAGES, parts


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def best_run(system: str, nats: float, parameters: int = 45_000_000, **more: Any) -> dict[str, Any]:
    """A made-up result of `experiments.quality`: four documents, of which the second and fourth are reported."""
    settings = dict(change.split("=", 1) for change in system.split("+")[1:])
    documents = {"512": [(500.0, 100), (nats * 100, 100)] * 2, "4096": [(nats, 100), (nats * 90, 100)] * 2}
    about = {"hardware": "a GPU", "date": "today", "commit": "abc1234", "tokens": 104_857_600, "train": [9.0, 3.3]}
    return {"system": system, "settings": settings, "parameters": parameters, "documents": documents, **about, **more}


LLAMA = "llama-small+model.zero_outputs=true"


def test_the_pages_are_current() -> None:
    made = parts()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert fill(text, made) == text, f"run python -m experiments.results_page for {page.name}"


def test_settings_have_short_names_and_others_stand_as_they_are() -> None:
    def named(system: str) -> list[str]:
        return best_recipe.settings({"system": system})

    assert named("gss2-small+optimizer.learning_rate=6.4e-3+seed=1") == []
    assert named(f"{LLAMA}+optimizer.learning_rate=3.2e-3") == ["rate 3.2e-3"]
    assert named("llama-small") == ["without `zero_outputs=true`"]
    assert named("gss2-small+model.pattern=gss2+model.attention.sliding=16384+length=16384") == [
        "no attention", "16k rows and window",
    ]  # fmt: skip
    assert named("gss2-small+late_length=16384") == ["16k rows in the last tenth"]
    windowed = named("gss2-small+late_length=16384+model.attention.sliding=16384")
    assert windowed == ["16k rows and window in the last tenth"]
    assert named("gss2-small+model.width=8+length=16384") == ["`width=8`", "`length=16384`"]
    for name in best_recipe.NAMES:
        assert name.removesuffix(", unbounded") in best_recipe.MEANINGS


def test_the_best_recipe_has_the_best_settings_of_each_model(tmp_path: Path) -> None:
    runs = [
        best_run(LLAMA, 4.0),
        best_run(f"{LLAMA}+optimizer.learning_rate=1.28e-2", 3.8),
        best_run("gss2-small", 3.7),
        best_run("gss2-small+seed=1", 3.6),
        best_run("gss2-small+model.attention.sliding=512", 3.9),
        best_run("gss2-small+model.pattern=gss2", 3.95),
        best_run("gss2-small+steps=943", 3.5, tokens=123_600_896),
        best_run("gss2", 3.0, parameters=190_000_000),
        best_run("mamba2", 3.9),
        best_run("mamba2+seed=1", 3.9),
        best_run("mamba2+model.attention.sliding=512", 3.85),
        best_run("gss2-small+steps=200+optimizer.warmup_steps=25", 5.0, tokens=26_214_400),
    ]
    (tmp_path / "books.json").write_text(json.dumps(runs))
    (tmp_path / "code.json").write_text(json.dumps([best_run("gss-hybrid-small", 1.0)]))
    found = best_recipe.corpora(tmp_path)
    rows = cells(best_recipe.table(found, best=True))
    assert [row[1:5] for row in rows] == [
        ["GSS2", "–", "190M", "1"],
        ["GSS2", "Llama's time", "45.0M", "1"],
        ["GSS2", "–", "45.0M", "2"],
        ["Llama", "rate 1.28e-2", "45.0M", "1"],
        ["Mamba-2", "window 512", "45.0M", "1"],
        ["Mamba-2", "–", "45.0M", "2"],  # not the best, but of several seeds
        ["GSS2", "no attention", "45.0M", "1"],
        ["GSS-Hybrid", ", ".join(f"without `{part}`" for part in best_recipe.USUAL["gss-hybrid"]), "45.0M", "1"],
    ]
    assert [row[9] for row in rows] == [
        "–",  # no Llama of its size
        f"{math.exp(0.9 * (3.5 - 3.8)):.3f} ± 0.000",  # of other tokens, but of the same time
        f"{math.exp(0.9 * (3.65 - 3.8)):.3f} ± 0.000",
        "1",
        f"{math.exp(0.9 * (3.85 - 3.8)):.3f} ± 0.000",
        f"{math.exp(0.9 * (3.9 - 3.8)):.3f} ± 0.000",
        f"{math.exp(0.9 * (3.95 - 3.8)):.3f} ± 0.000",
        "–",
    ]
    assert rows[3][6] == f"{math.exp(0.9 * 3.8):.2f}"
    everything = cells(best_recipe.table(found))
    assert len(everything) == len(rows) + 3  # another rate of Llama's, the window, the short run
    assert everything[-2][9] == "–"  # of the short run: no Llama had so few tokens
    assert "GSS2, no attention" in best_recipe.summary(tmp_path)
    assert "`pattern=gss2`" in best_recipe.legend(tmp_path)
    assert "books: 200 tokens of 2 documents; a GPU." in best_recipe.sources(tmp_path)
    (alone,) = [row for row in cells(best_recipe.every(tmp_path)) if row[0] == "code"]
    assert alone[4:] == ["2.72", "2.46", "–", "–", "3.300", "–", "–", "abc1234", "today"]


def test_models_are_compared_with_what_was_done_to_both(tmp_path: Path) -> None:
    decay = "optimizer.weight_decay=1.0"
    runs = [best_run(LLAMA, 4.0), best_run("gss2-small", 4.2)]
    runs += [best_run(f"{LLAMA}+{decay}", 3.0), best_run(f"gss2-small+{decay}", 3.1), best_run("mamba2", 2.5)]
    (tmp_path / "math.json").write_text(json.dumps(runs))
    assert cells(best_recipe.summary(tmp_path)) == [
        ["GSS2, decay 1.0 in both", f"{math.exp(0.9 * 0.1):.3f} ± 0.000"],
        ["GSS2", f"{math.exp(0.9 * 0.2):.3f} ± 0.000"],
        ["Mamba-2", f"{math.exp(0.9 * -0.5):.3f} ± 0.000"],
    ]


def test_what_is_planned_and_not_there(tmp_path: Path) -> None:
    (tmp_path / "books.json").write_text(json.dumps([best_run("gss2-small", 3.7)]))
    plan = [("books", "gss2-small"), ("books", "gss2-small+seed=1"), ("books", "gss2-small+seed=2"), ("code", "mamba2")]
    assert cells(best_recipe.to_come(plan, tmp_path)) == [["books", "GSS2", "–", "1, 2"], ["code", "Mamba-2", "–", "0"]]
    assert best_recipe.to_come(plan[:1], tmp_path) == "None."


def test_how_far_back_is_of_the_best_and_of_the_farthest(tmp_path: Path) -> None:
    probe = {"distances": [512, 4096, 65_536], "loss": [3.4, 3.3, 3.3], "interval": [4096, 4096], "effective": 4096}
    probe |= {"excess": [0.1, 0.0, 0.0], "excess_error": [0.01, 0.01, 0.0]}
    far, none = {**probe, "effective": 65_536}, {**probe, "excess": [0.02, 0.0, 0.0]}
    runs = [
        best_run("gss2-small", 3.6, context=probe),
        best_run("gss2-small+model.attention.sliding=512", 3.7, context=probe),
        best_run("gss2-small+late_length=16384", 3.8, context=far),
        best_run(LLAMA, 3.9, context={**none, "effective": 65_536}),
        best_run("mamba2", 3.9),
    ]
    (tmp_path / "books.json").write_text(json.dumps(runs))
    assert cells(best_recipe.context(best_recipe.shown(tmp_path))) == [
        ["books", "GSS2", "–", "4,096 tokens", "10.5%"],
        ["books", "GSS2", "16k rows in the last tenth", "65,536 tokens", "10.5%"],
        ["books", "Llama", "–", "nothing measurable", "2.0%"],  # of two standard errors
    ]
    full = cells(best_recipe.context(list(best_recipe.probed(tmp_path)), full=True))
    assert full[-1] == ["books", "Llama", "–", "0", "65,536", "4,096 to 4,096", "2.0%", "0.0%"]
    (axes,) = plots.context(best_recipe.shown(tmp_path))
    assert [line.get_label() for line in axes.lines] == ["GSS2", "GSS2, 16k rows in the last tenth", "Llama"]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([100 * math.expm1(0.1), 0, 0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "4k", "64k"]


def paper_run(folder: Path, name: str, perplexity: float, speed: float | None, **config: Any) -> None:
    """A made-up result of `gss reproduce`."""
    model = {"depth": 12, "state_space": {"modes": 256, "frequency_init": config.pop("start", "mixed")}}
    about = {"preset": "small", "length": 4096, "batch_tokens": 131_072, "batching": "segments"}
    kept = {
        "config": {**about, "model": model, "optimizer": {"name": "adamw"}, **config},
        "parameters": 46_349_312, "tokens": 104_857_600, "epochs": 1.0, "tokens_per_second": speed,
        "lengths": {length: {"perplexity": perplexity} for length in ("512", "4096", "16384", "whole")},
        "evaluation": {"tokens": 1000, "documents": 2, "precision": "bf16"}, "versions": {"torch": "2.11.0"},
        "peak_memory_bytes": 3e10, "hardware": "a GPU", "commit": "abc1234", "date": "2026-11-15T12:00:00",
    }  # fmt: skip
    path = folder / name / "result.json" if "/" not in name else folder / f"{name.removeprefix('/')}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept))


def test_tables_of_the_papers_models(tmp_path: Path) -> None:
    paper_run(tmp_path, "/books.gss.small.800steps.seed0", 50.0, None)
    paper_run(tmp_path, "books.gss.small.800steps.seed1", 51.0, None)  # a run folder
    paper_run(tmp_path, "/books.gss-embedding-1.small.800steps.seed0", 90.0, 800_000.0, start="log_normal")
    paper_run(tmp_path, "/books.gss-0.0016.small.800steps.seed0", 55.0, None)
    paper_run(tmp_path, "/books.dss.small.800steps.seed0", 60.0, 400_000.0, preset="dss-small")
    paper_run(tmp_path, "books.gss.small.800steps.seed0.optimizer.learning_rate=1", 1.0, None)
    paper_run(tmp_path, "books.gss.tiny.800steps.seed0", 1.0, None)
    runs = paper_recipe.read(tmp_path)
    assert len(runs) == 6
    # A run that shared its GPU has the speed of one of the same shape that did not; settings of its own set it apart.
    assert cells(paper_recipe.models(runs)) == [
        ["books", "DSS", "46.3M", "1", "400,000", "60.00", "60.00", "60.00", "–", "60.00", "13.53"],
        ["books", "GSS", "46.3M", "2", "800,000", *["50.50 ± 0.71"] * 3, "–", "50.50 ± 0.71", "12.84"],
    ]
    assert cells(paper_recipe.pairs(runs)) == [["books", "GSS", "DSS", "−15.83%", "−15.83%", "–", "2.00"]]
    assert cells(paper_recipe.summary(runs)) == [["GSS ÷ DSS", "0.842"]]
    ours = ["+0.00% ± 0.00", "+0.00% ± 0.00", "–"]
    assert cells(paper_recipe.lengths(runs))[1] == ["books", "GSS", *ours, "−8.35%", "+0.78%", "−2.88%"]
    # Another start is no other rate.
    assert cells(paper_recipe.rates(runs).partition("\n\n")[0]) == [
        ["books", "GSS", "–", "50.50 ± 0.71", "55.00", "–", "–"]
    ]
    assert len(cells(paper_recipe.every(runs))) == 6
    assert set(plots.draw(runs, tmp_path / "none")) == {"length", "speed", "starts"}
    paper_run(tmp_path, "/books", 1.0, None)
    with pytest.raises(ValueError, match=r"books\.json is not named as a run"):
        paper_recipe.read(tmp_path)


def test_two_names_of_one_system_are_one_system() -> None:
    runs = paper_recipe.read()
    for pair in paper_recipe.SAME.items():
        there = [run for run in runs if run["system"] in pair]
        keys = [
            json.dumps(
                {**run["config"], "seed": 0, "model": {**run["config"]["model"], "vocab_size": 0}}, sort_keys=True
            )
            for run in there
        ]
        assert len(there) > 2
        assert len(set(keys)) == 1


def test_kept_runs_are_named_by_what_is_known() -> None:
    runs = [run for each in best_recipe.corpora(best_recipe.RESULTS).values() for run in each]
    assert not [name for run in runs for name in best_recipe.settings(run) if "`" in name]
    assert {best_recipe.model(run) for run in runs} <= set(best_recipe.LABELS.values())
    assert all(len(group) < 4 for group in grouped(best_recipe.corpora(best_recipe.RESULTS)["books"]))


def test_recall_is_a_row_per_study_and_length(tmp_path: Path) -> None:
    def kept(seed: int, accuracy: float) -> dict[str, Any]:
        scores = [{"length": 512, "accuracy": accuracy, "solved": 0.5}]
        model = {"depth": 1, "pattern": ["gss2"]}
        return {"study": "recall", "seed": seed, "length": 512, "parameters": 1234, "model": model, "accuracy": scores}

    for seed, accuracy in enumerate((0.99, 1.0)):
        (tmp_path / f"recall.seed{seed}.json").write_text(json.dumps(kept(seed, accuracy)))
    assert cells(recall.table(tmp_path)) == [
        ["`recall`", "1 × gss2", "1,234", "512", "512", "2", "99.50 ± 0.71", "50.00 ± 0.00"]
    ]


def test_pages_without_any_results(tmp_path: Path) -> None:
    for name, part in parts(tmp_path, tmp_path).items():
        assert part() or name in ("sources", "best-sources"), name
    assert plots.draw([], tmp_path) == {}


def test_wrong_markers_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no results named 'table9'"):
        fill("<!-- results: table9 -->\n<!-- end -->", {"models": lambda: ""})
    with pytest.raises(ValueError, match="has no <!-- end -->"):
        fill("<!-- results: models -->\n", {"models": lambda: ""})
    assert fill("a <!-- results: x -->\nold\n<!-- end --> b", {"x": lambda: "new"}) == (
        "a <!-- results: x -->\n\nnew\n\n<!-- end --> b"
    )
