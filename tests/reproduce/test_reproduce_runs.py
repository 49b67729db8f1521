"""Runs for real, a few steps each: results, skipping, going on after an interruption, the time limit."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gss.cli import app
from gss.data import load_tokenizer, prepare
from gss.data.tokenizer_training import train_tokenizer
from gss.reproduce import runner, speed
from gss.reproduce.plan import Corpus, Run, find_corpora, run_of
from gss.reproduce.records import EVERY
from gss.reproduce.results import Layout, Shelf
from gss.reproduce.runner import Outcome, reproduce
from gss.reproduce.settings import SCALES, TARGETS
from tests.reproduce.conftest import QUICK, made_up, quick_runs


def go(target: str, runs: list[Run], out: Path, **options: Any) -> Outcome:
    return reproduce(TARGETS[target], runs, out, device="cpu", quiet=True, **options)


@pytest.fixture(scope="module")
def finished(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    outcome = go("table1", quick_runs("table1", corpus, "transformer", "gss"), out)
    assert not outcome.left
    return out


def test_two_systems_give_results_and_a_table(finished: Path, corpus: Corpus) -> None:
    gss = quick_runs("table1", corpus, "gss")[0]
    kept = json.loads((finished / "results" / f"{gss.name}.json").read_text())
    assert kept["config"]["steps"] == 6
    assert kept["tokens"] == 6 * 128
    assert list(kept["lengths"]) == ["512", "4096", "whole"]
    for row in kept["lengths"].values():
        assert 1 < row["perplexity"] < 300
        assert row["bits_per_byte"] == row["bits_per_raw_byte"] == row["bits_per_given_back_byte"]
        assert row["by_position"]
    assert [part["layer"] for part in kept["time_constants"]["end"]] == ["1", "2"]
    assert kept["time_constants"]["start"] != kept["time_constants"]["end"]
    assert kept["seconds"] > 0
    assert {"hardware", "versions", "commit", "date", "seed", "parameters", "peak_memory_bytes"} <= kept.keys()
    assert kept["curve"][-1][0] == 6
    assert kept["data"]["train_bytes"] == corpus.train_bytes
    assert kept["evaluation"]["text"] == corpus.held_out_text
    assert kept["wall_seconds"]["training"] > 0
    assert kept["wall_seconds"]["from_step"] == 0
    table = (finished / "table1" / "table.md").read_text()
    assert table.count("| books") == 2
    assert len(json.loads((finished / "table1" / "results.json").read_text())["runs"]) == 2
    assert (finished / "table1" / "books.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_known_by_their_files_alone(
    finished: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished / "results", tmp_path / "results")
    monkeypatch.setattr(runner, "train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(speed, "probe", lambda *a, **k: pytest.fail("measured again"))
    said: list[str] = []
    outcome = go("table1", quick_runs("table1", corpus, "transformer", "gss"), tmp_path, say=said.append)
    assert len(outcome.done) == 2
    assert all("done before" in text for text in said)
    # The same result serves another table.
    assert len(go("lengths", quick_runs("lengths", corpus, "gss"), tmp_path).done) == 1


def test_a_run_that_is_the_same_under_another_name_is_not_run_again(corpus: Corpus, tmp_path: Path) -> None:
    def of(name: str, seed: int = 0) -> Run:
        return run_of(EVERY[name], SCALES["small"], corpus, seed)

    gss, same, other = map(of, ("gss-0.0016", "init-half-low-frequencies", "init-loud"))
    shelf = Shelf(tmp_path)
    shelf.put(gss, made_up(gss))
    kept = shelf.find(same)
    assert kept is not None
    assert kept["system"] == "gss-0.0016"
    assert shelf.find(other) is None
    assert shelf.find(of("init-half-low-frequencies", seed=1)) is None


def test_results_of_other_settings_are_refused(finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(finished / "results", tmp_path / "results")
    path = next((tmp_path / "results").glob("*.gss.*"))
    kept = json.loads(path.read_text())
    kept["config"]["optimizer"]["learning_rate"] = 0.5
    path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate was 0\.5, now 0\.008.*another --out"):
        go("table1", quick_runs("table1", corpus, "gss"), tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a result of gss reproduce"):
        go("table1", quick_runs("table1", corpus, "gss"), tmp_path)


def test_an_interrupted_run_goes_on(finished: Path, corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    runs = quick_runs("table1", corpus, "gss")
    measured = runner.measure.measured
    real = runner.train

    def interrupted(config: Any, data: Path, out: Path, **options: Any) -> Any:
        class AfterFour:
            """As a signal that comes during the fourth step."""

            def __init__(self) -> None:
                self.steps = 0

            def __enter__(self) -> "AfterFour":
                return self

            def __exit__(self, *error: object) -> None:
                pass

            @property
            def signal(self) -> signal.Signals | None:
                self.steps += 1
                return signal.SIGTERM if self.steps >= 4 else None

        with monkeypatch.context() as patched:
            patched.setattr("gss.train.loop.Interrupt", AfterFour)
            return real(config, data, out, **options)

    with monkeypatch.context() as patched:
        patched.setattr(runner, "train", interrupted)
        patched.setattr(runner.measure, "measured", lambda *a: pytest.fail("scored an unfinished run"))
        outcome = go("table1", runs, tmp_path)
    assert outcome.signal == signal.SIGTERM
    assert not list((tmp_path / "results").glob("*"))
    assert [p.name for p in (tmp_path / "runs" / runs[0].name / "checkpoints").iterdir()]
    monkeypatch.setattr(runner.measure, "measured", measured)
    again = go("table1", runs, tmp_path)
    assert len(again.done) == 1
    one, other = (Shelf(folder / "results").find(runs[0]) for folder in (finished, tmp_path))
    assert one is not None
    assert other is not None
    assert one["lengths"] == other["lengths"]  # to the last bit, as if never interrupted


def test_a_trained_run_that_is_scored_later_has_the_layout_it_was_trained_in(
    corpus: Corpus, tmp_path: Path, monkeypatch: Any
) -> None:
    runs = quick_runs("table1", corpus, "gss")
    monkeypatch.setattr(speed, "probe", lambda config, *a: Layout(False, config.length, 1e6))
    with monkeypatch.context() as patched:
        patched.setattr(runner.measure, "measured", lambda *a: pytest.fail("as if killed while it scored"))
        with pytest.raises(pytest.fail.Exception):
            go("table1", runs, tmp_path)
    go("table1", runs, tmp_path)
    kept = Shelf(tmp_path / "results").find(runs[0])
    assert kept is not None
    assert kept["layout"]["micro_batch_tokens"] == runs[0].config.length


def test_a_run_that_would_not_fit_is_not_started(corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    speeds = {"gss-tiny": 1e6, "transformer-tiny": 1.0}
    monkeypatch.setattr(speed, "probe", lambda config, *a: Layout(False, None, speeds[config.preset]))
    said: list[str] = []
    runs = quick_runs("table1", corpus, "transformer", "gss")
    outcome = go("table1", runs, tmp_path, time_limit=60, say=said.append)
    assert [run.system.name for run in outcome.done] == ["gss"]
    assert [run.system.name for run in outcome.left] == ["transformer"]
    assert any("not now, it takes about" in text for text in said)
    assert not (tmp_path / "runs" / runs[0].name).exists()


def test_a_run_that_would_be_stopped_just_before_its_end_is_not_started(
    corpus: Corpus, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(speed, "probe", lambda *a: Layout(False, None, 1e6))
    monkeypatch.setattr(runner._Session, "_do", lambda *a: pytest.fail("started"))
    said: list[str] = []
    go("table1", quick_runs("table1", corpus, "gss"), tmp_path, time_limit=20.5, partial=True, say=said.append)
    assert any("not now" in text for text in said)


def test_a_run_in_parts(corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    runs = quick_runs("table1", corpus, "gss", steps=100_000, evaluate_tokens=600)
    monkeypatch.setattr(speed, "probe", lambda *a: Layout(False, None, 1e4))
    monkeypatch.setattr(runner, "_RESERVE_SECONDS", 0.5)
    done = 0
    for limit in (2.0, 8.0, 30.0):  # on a busy machine two seconds may not reach the first step
        outcome = go("table1", runs, tmp_path, time_limit=limit, partial=True)
        assert outcome.signal is None
        assert [run.name for run in outcome.left] == [runs[0].name]
        done = runner._steps_done(tmp_path / "runs" / runs[0].name)
        if done:
            break
    assert 0 < done < 100_000
    go("table1", runs, tmp_path, time_limit=limit, partial=True)
    assert runner._steps_done(tmp_path / "runs" / runs[0].name) > done


def test_what_breaks_or_fails_does_not_stop_the_others(corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    real, scored = runner.train, runner.measure.evaluate

    def fails(config: Any, *arguments: Any, **options: Any) -> Any:
        if config.preset == "transformer-tiny":
            raise ValueError("the run diverged")
        return real(config, *arguments, **options)

    def breaks(model: Any, dataset: Any, lengths: list[int | None], **options: Any) -> Any:
        if lengths == [4096]:
            raise ValueError("the model gives losses that are not finite")
        return scored(model, dataset, lengths, **options)

    monkeypatch.setattr(runner, "train", fails)
    monkeypatch.setattr(runner.measure, "evaluate", breaks)
    outcome = go("table1", quick_runs("table1", corpus, "transformer", "gss"), tmp_path)
    assert [run.system.name for run in outcome.done] == ["gss"]
    assert [*outcome.failed.values()] == ["the run diverged"]
    assert [run.system.name for run in outcome.left] == ["transformer"]
    kept = json.loads(next((tmp_path / "results").iterdir()).read_text())
    assert kept["lengths"]["4096"]["perplexity"] is None
    assert kept["lengths"]["whole"]["perplexity"] > 1


def test_the_best_two_starts_get_more_seeds(corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    names = ["init-1-1000", "init-1-100", "init-loud"]
    runs = quick_runs("init", corpus, *names, seeds=[0, 1, 2])
    scores = dict(zip(names, (30.0, 40.0, 20.0), strict=True))
    row = {"perplexity": 0.0, "loss": 3.0, "by_position": [{"start": 64, "stop": 128, "tokens": 1, "loss": 3.0}]}

    def do(session: Any, run: Run, layout: Layout) -> None:
        lengths = {"512": {**row, "perplexity": scores[run.system.name]}}
        session.shelf.put(run, {**made_up(run, lengths=lengths)})

    monkeypatch.setattr(runner._Session, "_do", do)
    monkeypatch.setattr(speed, "probe", lambda *a: Layout(False, None, 1e6))
    outcome = go("init", runs, tmp_path)
    done = {(run.system.name, run.config.seed) for run in outcome.done}
    more = {(name, seed) for name in ("init-1-1000", "init-loud") for seed in (1, 2)}
    assert done == {(name, 0) for name in names} | more
    assert "30.00 ± 0.00" in outcome.text


def test_vocabularies_by_bits_a_byte(texts: Path, corpus: Corpus, tmp_path: Path) -> None:
    train_tokenizer([str(texts)], tmp_path / "vocabulary", vocab_size=300, model="bpe", threads=1)
    prepare([str(texts)], tmp_path / "books-own", load_tokenizer(tmp_path / "vocabulary"), workers=1)
    corpora = [corpus, *find_corpora([tmp_path / "books-own"])]
    assert corpora[0].held_out_text == corpora[1].held_out_text
    runs = [run for one in corpora for run in quick_runs("vocabulary", one, "vocabulary")]
    outcome = go("vocabulary", runs, tmp_path / "out")
    assert outcome.text.count(corpus.held_out_text[:8]) == 2
    assert outcome.text.count("| yes ") == 2


def test_the_command(corpus: Corpus, tmp_path: Path) -> None:
    sets = [item for key, value in {**QUICK, "steps": 2}.items() for item in ("--set", f"{key}={value}")]
    base = ["reproduce", "table1", "--data", str(corpus.folder.parent), "--out", str(tmp_path), "--device", "cpu"]
    quick = ["--evaluate-tokens", "600", *sets]
    done = CliRunner().invoke(app, [*base, "--corpus", "books", "--only", "gss", "--shared", *quick])
    assert done.exit_code == 0, done.output
    assert "| books" in done.stdout
    kept = json.loads(next((tmp_path / "results").glob("*.json")).read_text())
    assert (kept["shared"], kept["tokens_per_second"]) == (True, None)
    left = CliRunner().invoke(app, [*base, "--only", "dss", "--time-limit", "0.001", *sets])
    assert left.exit_code == 0, left.output
    assert "not done, give the same command again: books.dss" in left.stdout


def test_the_papers_scale_writes_commands(corpus: Corpus, tmp_path: Path) -> None:
    folder = str(corpus.folder)
    base = ["reproduce", "table1", "--data", folder, "--out", str(tmp_path), "--scale", "paper", "--device", "cpu"]
    for _ in range(2):
        done = CliRunner().invoke(app, base)
        assert done.exit_code == 0, done.output
        assert "nothing was started" in done.stdout
    script = (tmp_path / "paper" / "launch.sh").read_text()
    assert script.count("torchrun --standalone --nproc-per-node=8 -m gss train --config") == 3
    assert len(list((tmp_path / "paper").glob("*.toml"))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table3"], "there is no target 'table3'; choose from: table1, table2"),
        (["table1", "--scale", "huge"], "there is no scale 'huge'"),
        (["table1", "--scale", "small"], "which data"),
        (["table1", "--only", "lstm"], "has no system 'lstm'; it has: transformer, dss, gss"),
        (["table1", "--seeds", "a"], "is not a list of seeds"),
        (["table1", "--time-limit", "0"], "must be over 0"),
        (["table1", "--corpus", "math"], "there is no corpus 'math' in the data; there are: books"),
        (["vocabulary", "--evaluate-tokens", "9"], "compared on whole documents"),
        (["table1", "--evaluate-tokens", "0"], "--evaluate-tokens must be at least 1, not 0"),
        (["table1", "--set", "seed=3"], "give seeds with --seeds"),
        (["table1", "--data", "/nowhere"], "neither is a prepared corpus nor holds one"),
    ],
)
def test_what_a_user_can_get_wrong(corpus: Corpus, tmp_path: Path, arguments: list[str], message: str) -> None:
    if "--data" not in arguments and "small" not in arguments:
        arguments = [*arguments, "--data", str(corpus.folder)]
    done = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(tmp_path)])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
