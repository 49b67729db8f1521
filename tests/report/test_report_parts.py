"""The numbers behind a report: the start drawn again, scores kept or missing, axes named, runs with parts missing."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import gss
from gss.data import open_dataset
from gss.evaluation import evaluate
from gss.model import build_model
from gss.report import write_report
from gss.report.figures import length_pictures, memory_pictures, records, state_spaces, training_pictures
from gss.report.page import difference_table, length_table, size
from gss.report.runs import Scores, read_run, read_runs, same_tokens, scores
from gss.report.theme import COLOURS, LIGHT, power_of_ten, style, tokens
from tests.conftest import small_config
from tests.making import make_corpus, make_run
from tests.report.conftest import Lab


def silent(stage: str, share: float) -> None:
    assert 0 <= share <= 1


def test_the_start_is_the_runs_own(lab: Lab, tmp_path: Path) -> None:
    """A run of one step that hardly moves ends where the report says that it began; torch's own draws are not moved."""
    still = {"steps": 1, "seed": 5, "optimizer__state_space_learning_rate": 1e-12}
    run = read_run(make_run("gss-tiny", lab.data, tmp_path / "still", **still))
    before = torch.random.get_rng_state()
    now, start = state_spaces(run)
    assert torch.equal(before, torch.random.get_rng_state())
    assert [space.name for space in now] == ["1", "2"]
    for after, begin in zip(now, start, strict=True):
        assert after.time_constants == pytest.approx(begin.time_constants, rel=1e-6)
        assert after.taps == pytest.approx(begin.taps, abs=1e-5)
    tuned = {"steps": 1, "length": 16, "batch_tokens": 32, "start": str(run.folder)}
    gss.train(None, lab.data, tmp_path / "tuned", quiet=True, **tuned)
    now, start = state_spaces(read_run(tmp_path / "tuned"))
    assert len(now) == 2
    assert start == []  # not what the seed would have drawn


def test_kernels_are_the_models(lab: Lab) -> None:
    model = build_model(small_config("gss"))
    layer = model.layers[0]
    impulse = torch.zeros(1, 64, 5)
    impulse[0, 0] = 1
    heard, _ = layer.state_space(impulse)
    heard[0, 0] -= layer.state_space.skip
    space = records(model, 64)[0]
    assert space.taps[:, :64] == pytest.approx(heard[0].T.detach().numpy(), abs=1e-5)
    assert space.time_constants == pytest.approx((1 / layer.state_space.log_decay.exp()).detach().numpy(), rel=1e-5)


def test_scores_are_computed_once_and_kept(lab: Lab) -> None:
    run = read_run(lab.dss)
    first = scores(run, silent, max_tokens=900, lengths=[32, 128])
    assert first.result is not None
    expected = evaluate(gss.load(lab.dss).model, open_dataset(lab.data, "valid"), [32, 128], max_tokens=900)
    assert [row.loss for row in first.result.rows] == [row.loss for row in expected.rows]

    def never(stage: str, share: float) -> None:
        raise AssertionError("scored again")

    assert scores(run, never, max_tokens=900) == first
    assert scores(run, never, data=lab.data, max_tokens=0, lengths=[32, 128]) == first
    anew = scores(run, silent, max_tokens=500, lengths=[32, 128], again=True)
    assert anew.result is not None
    assert anew.result.tokens == 500
    assert not same_tokens([first, anew])
    assert same_tokens([first, Scores(None)])
    (kept,) = (lab.dss / "evaluations").iterdir()
    facts = json.loads(kept.read_text())
    assert facts["step"] == 12
    # Another checkpoint's scores are not this one's, and broken files are passed over.
    kept.write_text(json.dumps({**facts, "step": 11}))
    (lab.dss / "evaluations" / "broken.json").write_text("[")
    (lab.dss / "evaluations" / "odd.json").write_text('{"rows": [{"length": 3}]}')
    assert scores(run, silent, max_tokens=0).result is None


def test_scores_on_another_corpus_are_not_the_runs_own(lab: Lab, tmp_path: Path) -> None:
    other = make_corpus(tmp_path, {f"{split}/one": f"another corpus, {split}. " * 20 for split in ("train", "valid")})
    run = read_run(lab.dss)
    foreign = scores(run, silent, data=other, max_tokens=300, lengths=[32])
    assert foreign.result is not None
    assert scores(run, silent, max_tokens=0).result is None
    own = scores(run, silent, max_tokens=300, lengths=[32])
    assert own.data == run.data["hash"] != foreign.data
    # Neither has taken the other's place, and a file of the name that an older version gave is read as well.
    assert len(list((lab.dss / "evaluations").iterdir())) == 2
    (kept,) = (lab.dss / "evaluations").glob(f"*-{own.data[:12]}.json")
    kept.rename(kept.with_name("valid-step-00000012.json"))
    assert scores(run, silent, max_tokens=0) == own
    # Of one document there is no standard error: JSON has null, a report NaN.
    again = scores(run, silent, data=other, max_tokens=0).result
    assert again is not None
    assert math.isnan(again.rows[0].standard_error)
    (kept,) = (lab.dss / "evaluations").glob(f"*-{foreign.data[:12]}.json")
    assert "NaN" not in kept.read_text()
    assert [row.loss for row in again.rows] == [row.loss for row in foreign.result.rows]


def test_missing_validation_data_is_said(lab: Lab, tmp_path: Path) -> None:
    for facts, words in (
        ({"folder": str(tmp_path / "gone"), "hash": "x"}, "the run's data is no longer at"),
        ({"folder": str(lab.data), "hash": "x"}, "holds other data than the run was trained on"),
        ({}, "does not say where its data is"),
    ):
        (lab.dss / "data.json").write_text(json.dumps(facts))
        found = scores(read_run(lab.dss), silent, max_tokens=900)
        assert found.result is None
        assert words in found.missing
    text = write_report([lab.dss], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "does not say where its data is" in text
    assert "no evaluation during training" in text


def test_runs_with_parts_missing(lab: Lab, tmp_path: Path) -> None:
    (lab.hybrid / "metrics.jsonl").unlink()
    (lab.hybrid / "environment.json").unlink()
    config = json.loads((lab.hybrid / "config.json").read_text())
    del config["seed"], config["preset"]
    (lab.hybrid / "config.json").write_text(json.dumps(config))
    shutil.rmtree(lab.dss / "checkpoints")
    text = write_report([lab.hybrid, lab.dss], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "hybrid has no training metrics" in text
    assert "The initial values are unknown" in text
    assert "the run has no checkpoint yet" in text
    assert "dss has no sample" in text
    shutil.rmtree(lab.hybrid / "checkpoints")
    assert write_report([lab.hybrid], tmp_path / "report.html").is_file()


def test_a_model_without_state_spaces(lab: Lab, tmp_path: Path) -> None:
    plain = make_run("transformer-tiny", lab.data, tmp_path / "plain", steps=2)
    text = write_report([plain], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the model has no state spaces" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not valid JSON"), ("{}", "does not describe a run"), ('{"model": {"width": -1}}', "width must be")],
)
def test_folders_that_are_no_runs(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_run(tmp_path)


def test_every_axis_is_named_and_nothing_is_cut_off(lab: Lab) -> None:
    runs = read_runs([lab.hybrid, lab.dss])
    scored = [scores(run, silent, max_tokens=900, lengths=[32, 128]) for run in runs]
    with style():
        pictures = [*training_pictures(runs, scored), *length_pictures(runs, scored)]
        for run in runs:
            pictures += memory_pictures(run.name, *state_spaces(run))
        assert len(pictures) == 4 + 2 + 2 * 2
        for picture in pictures:
            figure = picture.figure
            figure.draw_without_rendering()
            axes = figure.axes
            assert axes[-1].get_xlabel()
            assert all(one.get_ylabel() for one in axes)
            assert all(one.get_shared_x_axes().joined(one, axes[-1]) for one in axes[:-1])
            whole = figure.bbox
            for one in axes:
                box = one.get_tightbbox()
                assert box is not None
                assert whole.x0 <= box.x0 < box.x1 <= whole.x1 + 1, picture.name
                assert whole.y0 <= box.y0 < box.y1 <= whole.y1 + 1, picture.name
                for legend in figure.legends:
                    assert not legend.get_window_extent().overlaps(one.get_window_extent()), picture.name


def test_runs_scored_on_other_tokens_are_not_compared(lab: Lab, tmp_path: Path) -> None:
    scores(read_run(lab.dss), silent, max_tokens=500, lengths=[32, 128])
    scores(read_run(lab.hybrid), silent, max_tokens=900, lengths=[32, 128])
    text = write_report([lab.hybrid, lab.dss], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "were scored on different tokens" in text
    assert "unigrams" not in text
    again = write_report([lab.hybrid, lab.dss], tmp_path / "report.html", max_tokens=700, again=True)
    assert "were scored on different tokens" not in again.read_text(encoding="utf-8")


def test_the_papers_figures_stand_beside(lab: Lab) -> None:
    run = read_run(lab.dss)
    run.config["preset"] = "gss-l"
    score = scores(run, silent, max_tokens=900, lengths=[32, 128])
    table = length_table([run], [score])
    assert table is not None
    assert table.header[:8] == ["perplexity at", "params", "32", "128", "512", "4k", "16k", "65k"]
    assert [row[0] for row in table.rows] == [
        "unigrams of the split",
        "dss",
        *(f"paper's gss-l, {c}" for c in ("PG-19", "ArXiv", "Github")),
    ]
    assert table.rows[2][4:8] == ["12.48", "11.33", "11.16", "11.12"]
    assert table.quiet == {0, 2, 3, 4}
    assert length_table([run], [Scores(None)]) is None


def test_differences_of_configs(lab: Lab) -> None:
    one, other = read_runs([lab.hybrid, lab.dss])
    table = difference_table([one, other])
    assert table is not None
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["seed"] == ["0", "3"]
    assert rows["model.state_space.step_range"] == ["none", "0.001, 0.1"]
    assert "steps" not in rows
    assert difference_table([one]) is None
    assert difference_table([one, one]) is None


def test_names_tell_runs_apart(lab: Lab, tmp_path: Path) -> None:
    for place in ("a", "b"):
        shutil.copytree(lab.dss, tmp_path / place / "run")
    assert [run.name for run in read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])] == ["a/run", "b/run"]


def test_numbers_in_little_room() -> None:
    assert [tokens(value) for value in (512, 4096, 1.5e6, 0.25, 4e19)] == ["512", "4.1k", "1.5M", "0.25", "4e+19"]
    assert [tokens(value) for value in (999.4, 999.7, 999_700.0, -999.7)] == ["999", "1k", "1M", "-1k"]
    assert [tokens(value) for value in (9.997e11, float("inf"), float("nan"))] == ["1e+12", "inf", "nan"]
    assert [size(count) for count in (999, 999.7, 999_700, 5e15)] == ["999 bytes", "1 kB", "1 MB", "5e+06 GB"]
    assert [power_of_ten(value) for value in (1e-3, 0.1, 1, 100, 1e7, 0)] == ["10⁻³", "0.1", "1", "100", "10⁷", "0"]
    assert len(set(LIGHT.values())) == len(COLOURS)
