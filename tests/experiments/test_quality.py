"""Systems on the same tokens: trained in a process each, scored by document, paired, resumed."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gss
from experiments import best_recipe, compare, quality
from gss.data import load_tokenizer, prepare
from tests.conftest import small_config
from tests.making import dataset_from_arrays

TINY = ("steps=2", "length=32", "batch_tokens=64", "compile=false", "optimizer.warmup_steps=1", "device=cpu")
SMALL = "+model.width=8+model.depth=3+model.feedforward_width=8+model.attention.heads=2"


def test_a_plan_is_run_kept_and_tabulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, count in (("train", 3), ("valid", 4)):
        (tmp_path / "text" / split).mkdir(parents=True)
        for i in range(count):
            (tmp_path / "text" / split / f"{i}.txt").write_text(f"{split} {i} " * (90 + i))
    prepare([str(tmp_path / "text")], tmp_path / "data" / "small", load_tokenizer("bytes"))
    systems = [f"{name}{SMALL}" for name in ("llama-tiny", "gss2-tiny", "gss2-tiny+seed=1")]
    for number, system in enumerate(systems[1:]):  # what a process of its own would print
        arguments = ["--one", "small", system, "--data", str(tmp_path / "data"), "--work", str(tmp_path / "runs")]
        quality.main(["plan", *arguments, *(f"--set={each}" for each in TINY)])
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [len(documents) for documents in result["documents"].values()] == [4] * len(result["documents"])
        results = json.loads((tmp_path / "small.json").read_text()) if number else []
        kept = [*results, {**result, "hardware": "a CPU", "date": "today", "commit": "this"}]
        (tmp_path / "small.json").write_text(json.dumps(kept))
    plan = tmp_path / "plan"
    plan.write_text("\n".join(f"small {system}  # a remark" for system in systems))
    common = [str(plan), "--data", str(tmp_path / "data"), "--out", str(tmp_path), "--work", str(tmp_path / "runs")]
    quality.main([*common, *(f"--set={each}" for each in TINY)])
    printed = capsys.readouterr().out
    assert f"small {systems[0]}: done" in printed  # the other two were there already
    assert printed.count(": done") == 1
    assert "3 of 3 runs are done" in printed
    rows = [line.split("|") for line in printed.splitlines() if line.startswith("| small ")]
    assert sorted(row[2].strip() for row in rows) == ["gss2-tiny", "gss2-tiny", "llama-tiny", "llama-tiny"]
    assert all(row[5].strip() == "2" and "±" in row[6] for row in rows if "gss2" in row[2])  # over seeds
    own = result["documents"]["512"]
    halves = compare.half(own, "choose") + compare.half(own, "report")
    assert halves != own
    assert sorted(halves) == sorted(own)


def test_what_the_time_does_not_suffice_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan"
    plan.write_text("books llama-tiny\n")
    quality.main(
        [str(plan), "--data", str(tmp_path), "--out", str(tmp_path), "--work", str(tmp_path), "--seconds", "1"]
    )
    assert "0 of 1 runs are done\n  books llama-tiny" in capsys.readouterr().out
    with pytest.raises(ValueError, match="line 2: write CORPUS SYSTEM"):
        quality.parsed("books llama-small\nllama-small\n")
    plan.write_text("books llama-tiny\nbooks llama-tiny+seed=1 probe\n")
    assert quality.missing(plan, lambda _: [{"system": "llama-tiny"}]) == [("books", "llama-tiny+seed=1", True)]


def test_what_would_not_be_scored_in_time_ends_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} " * (90 + i))
    prepare([str(tmp_path / "text")], tmp_path / "data" / "small", load_tokenizer("bytes"))
    (tmp_path / "plan").write_text(f"small llama-tiny{SMALL}+steps=1000000\nsmall llama-tiny{SMALL}\n")
    where = ["--data", str(tmp_path / "data"), "--out", str(tmp_path), "--work", str(tmp_path / "runs")]
    sets = [f"--set={each}" for each in TINY]
    quality.main([str(tmp_path / "plan"), *where, *sets, "--workers=1", "--seconds=300", "--only-whole"])
    printed = capsys.readouterr().out
    assert "steps=1000000: status 1: left out: it would train for " in printed
    assert f"small llama-tiny{SMALL}: done" in printed
    assert not list((tmp_path / "runs").glob("*steps=1000000/checkpoints/*"))


def test_the_plan_names_systems_that_there_are() -> None:
    from experiments.fla_layers import PEERS
    from gss.presets import PRESETS

    plan = quality.parsed((Path(quality.__file__).parent / "quality.plan").read_text())
    assert len({line[:2] for line in plan}) == len(plan)
    assert {system.split("+")[0] for _, system, _ in plan} <= {*PRESETS, *PEERS}


def test_runs_are_compared_where_they_were_scored_on_the_same_tokens() -> None:
    """The second edition of the documents has a token less: each is compared with itself, a document counts once."""
    first = {"documents": {"4096": [(30.0, 10), (62.0, 20), (8.0, 4), (9.0, 4)]}}
    second = {"documents": {"4096": [(27.0, 9), (61.0, 20), (8.0, 4), (9.0, 4)]}}
    theirs = [
        {"documents": {"4096": [(nats + 1, count) for nats, count in run["documents"]["4096"]]}}
        for run in (first, second)
    ]
    found = compare.paired([first, second], theirs, "choose", 4096)
    assert found.documents == 2
    assert found.ratio == pytest.approx(math.exp(-4 / (10 + 9 + 4 + 4)))
    assert compare.paired([second], theirs, "choose", 4096).ratio == pytest.approx(math.exp(-2 / 13))
    with pytest.raises(ValueError, match="no edition"):
        compare.paired([first], theirs[1:], "choose", 4096)


def _run(system: str, *losses: float) -> dict[str, Any]:
    """A made-up result: documents of 10, 20, 30 and 40 tokens with these losses per token."""
    documents = [(loss * count, count) for loss, count in zip(losses, (10, 20, 30, 40), strict=True)]
    return {"system": system, "documents": {"4096": documents}, "parameters": 2_000_000, "tokens": 100}


def test_a_table_is_chosen_on_one_half_and_reports_the_other() -> None:
    """The better Llama on the documents to choose is the worse one on those to report, and is compared with."""
    llama = "llama-small+model.zero_outputs=true+optimizer.learning_rate="
    runs = [
        _run(f"{llama}6.4e-3", 3.0, 2.0, 3.0, 2.0),
        _run(f"{llama}1e-2", 2.5, 3.0, 2.5, 2.4),
        _run("gss2-small+model.bias=true", 2.0, 2.8, 2.9, 2.1),
        _run("gss2-small+model.bias=true+seed=1", 2.2, 2.6, 2.3, 2.3),
    ]
    levels = [math.exp((20 * 3.0 + 40 * 2.4) / 60), math.exp((20 * 2.0 + 40 * 2.0) / 60)]
    seeds = [math.exp((20 * a + 40 * b) / 60) for a, b in ((2.8, 2.1), (2.6, 2.3))]
    twenty, forty = math.exp(2.7 - 3.0), math.exp(2.2 - 2.4)  # the ratios of each document, means over seeds
    ours = math.exp((20 * (2.7 - 3.0) + 40 * (2.2 - 2.4)) / 60), abs(twenty - forty) / 2
    plain = math.exp((20 * (2.0 - 3.0) + 40 * (2.0 - 2.4)) / 60), abs(math.exp(2.0 - 3.0) - math.exp(2.0 - 2.4)) / 2
    gss2 = f"{statistics.mean(seeds):.2f} ± {abs(seeds[0] - seeds[1]) / math.sqrt(2):.2f}"
    rows = best_recipe.table({"books": runs}).splitlines()[2:]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["books", "GSS2", "`bias=true`", "2.0M", "2", "–", gss2, "–", "–", f"{ours[0]:.3f} ± {ours[1]:.3f}"],
        ["books", "Llama", "rate 1e-2", "2.0M", "1", "–", f"{levels[0]:.2f}", "–", "–", "1"],
        ["books", "Llama", "–", "2.0M", "1", "–", f"{levels[1]:.2f}", "–", "–", f"{plain[0]:.3f} ± {plain[1]:.3f}"],
    ]


@torch.no_grad()
def test_long_texts_are_scored_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its training length a model that attends to everything has a sliding window of it; each target of a
    stream is scored once."""
    monkeypatch.setattr(quality, "LENGTHS", (8, 16, 32))
    draw = np.random.default_rng(0)
    held_out = dataset_from_arrays(draw.integers(0, 60, (4, 39)).tolist(), vocab_size=61, eos_id=60)
    model = gss.build_model(small_config("llama"), seed=0).eval()
    slides = gss.build_model(small_config("llama", **{"attention.sliding": 16}))
    slides.load_state_dict(model.state_dict())
    assert quality.scores(model, held_out, 16, probed=False)["documents"].keys() == {"8", "16"}
    monkeypatch.setattr(quality, "context_losses", lambda *_: None)
    found = quality.scores(model, held_out, 16, probed=True)
    for length, scoring in ((16, model), (32, slides)):
        nats = [nats for nats, _ in gss.evaluate(scoring, held_out, [length]).rows[0].by_document]
        assert [nats for nats, _ in found["documents"][str(length)]] == pytest.approx(nats, abs=0.01)
    tokens = torch.from_numpy(held_out.tokens[:129])
    for window in (32, 128):
        rows = tokens.unfold(0, window + 1, window)
        losses = torch.nn.functional.cross_entropy(slides(rows[:, :-1])[0].mT, rows[:, 1:])
        assert found["stream"][str(window)] == pytest.approx(losses.item(), abs=1e-4)


def test_a_paired_comparison_has_the_error_of_the_difference() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(500, 5000, 60)
    hardness = random.normal(3.5, 0.5, 60)  # of a document, for both systems
    gain = random.normal(0.02, 0.01, 60)
    ours = [(float(c * (h - g)), int(c)) for c, h, g in zip(counts, hardness, gain, strict=True)]
    theirs = [(float(c * h), int(c)) for c, h in zip(counts, hardness, strict=True)]
    found = compare.paired_ratio(ours, theirs)
    nats = -float((counts * gain).sum())
    assert found.ratio == pytest.approx(math.exp(nats / counts.sum()))
    left_out = [math.exp((nats + c * g) / (counts.sum() - c)) for c, g in zip(counts, gain, strict=True)]
    mean = sum(left_out) / 60
    assert found.standard_error == pytest.approx(math.sqrt(59 / 60 * sum((each - mean) ** 2 for each in left_out)))
    assert found.ratio < 1 - 5 * found.standard_error
    assert compare.paired_ratio(theirs, theirs).ratio == 1
    assert math.isnan(compare.paired_ratio(ours[:1], theirs[:1]).standard_error)
    with pytest.raises(ValueError, match="not scored on the same tokens"):
        compare.paired_ratio(ours, theirs[1:])
