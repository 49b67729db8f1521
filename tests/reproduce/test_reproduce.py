"""Trials for real, a few steps each: results, skipping, going on after an interruption; tables; settings."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gss
from gss.accounting import account
from gss.config import to_mapping
from gss.presets import PRESETS
from gss.reproduce import SCALES, SYSTEMS, TARGETS, Corpus, Outcome, Trial, planned, reproduce, runner
from gss.reproduce.settings import paper_corpus, preset_name
from gss.reproduce.tables import report_text
from gss.reproduce.trials import trial_of
from gss.training.config import TrainConfig, differences
from tests.making import call, stop_in_step
from tests.reproduce.conftest import BOOKS, QUICK, made_up, quick_trials

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


def go(trials: list[Trial], out: Path, target: str = "table1", **options: Any) -> Outcome:
    return reproduce(TARGETS[target], trials, out, device="cpu", quiet=True, **options)


@pytest.fixture(scope="module")
def finished(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    assert len(go(quick_trials(corpus, "transformer", "gss"), out).done) == 2
    return out


def test_table_1_has_the_papers_figures_beside_ours() -> None:
    target = TARGETS["table1"]
    trials = planned(target, SCALES["small"], [BOOKS])
    trials += planned(target, SCALES["small"], [BOOKS], only=["gss"], seeds=[1])
    text = report_text(target, [(trial, made_up(trial)) for trial in trials])
    assert text.startswith(TABLE_1)
    assert "104,857,600 training tokens (1.00 epochs) at length 4,096" in text
    assert "Hardware: a GPU; torch 2.11.0; commit abc1234." in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("table2", ["Rec:fixed:skip", "0.8k", "11.55", "196M+", "373M", "XL:2048"]),
        ("lengths", ["GSS-Hybrid", "12.47"]),
    ],
)
def test_other_tables(name: str, expected: list[str]) -> None:
    target = TARGETS[name]
    text = report_text(target, [(trial, made_up(trial)) for trial in planned(target, SCALES["small"], [BOOKS])])
    for words in expected:
        assert words in text, words
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(target.systems)
    assert len({len(line) for line in lines}) == 1
    assert "Nothing is done yet" in report_text(target, [])


def test_two_systems_give_results_and_a_table(finished: Path, corpus: Corpus) -> None:
    trial = quick_trials(corpus, "gss")[0]
    kept = json.loads((finished / trial.name / "result.json").read_text())
    assert kept["config"]["steps"] == 6
    assert kept["tokens"] == 6 * 128
    assert list(kept["lengths"]) == ["512", "4096", "whole"]
    for row in kept["lengths"].values():
        assert 1 < row["perplexity"] < 300
        assert row["bits_per_byte"] > 0
        assert row["by_position"]
    assert kept["seconds"] > 0
    assert {"hardware", "versions", "commit", "date", "parameters", "peak_memory_bytes"} <= kept.keys()
    assert kept["config"]["seed"] == 0
    assert (finished / "table1.md").read_text().count("| books") == 2


def copy_results(folder: Path, to: Path) -> None:
    for path in folder.glob("*/result.json"):
        (to / path.parent.name).mkdir()
        shutil.copy(path, to / path.parent.name)


def test_finished_trials_are_known_by_their_files_alone(
    finished: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_results(finished, tmp_path)
    monkeypatch.setattr(runner, "train", lambda *a, **k: pytest.fail("trained again"))
    said: list[str] = []
    outcome = go(quick_trials(corpus, "transformer", "gss"), tmp_path, say=said.append)
    assert len(outcome.done) == 2
    assert all("done before" in text for text in said)
    # The same result serves another table.
    assert len(go(quick_trials(corpus, "gss", target="lengths"), tmp_path, "lengths").done) == 1


def test_results_of_other_settings_are_refused(finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    copy_results(finished, tmp_path)
    path = next(tmp_path.glob("*.gss.*/result.json"))
    kept = json.loads(path.read_text())
    kept["config"]["optimizer"]["learning_rate"] = 0.5
    path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate was 0\.5, now 0\.008.*another --out"):
        go(quick_trials(corpus, "gss"), tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a result of gss reproduce"):
        go(quick_trials(corpus, "gss"), tmp_path)


def test_an_interrupted_trial_goes_on(finished: Path, corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    trials = quick_trials(corpus, "gss")
    with monkeypatch.context() as patched:
        stop_in_step(patched, 4)
        patched.setattr(runner, "score_trial", lambda *a: pytest.fail("scored an unfinished trial"))
        outcome = go(trials, tmp_path)
    assert outcome.signal == signal.SIGTERM
    assert not list(tmp_path.glob("*/result.json"))
    assert [p.name for p in (tmp_path / trials[0].name / "checkpoints").iterdir()]
    assert len(go(trials, tmp_path).done) == 1
    one, other = (json.loads((folder / trials[0].name / "result.json").read_text()) for folder in (finished, tmp_path))
    assert one["lengths"] == other["lengths"]  # to the last bit, as if never interrupted


def test_windows_start_as_rows_of_training_did(corpus: Corpus, tmp_path: Path) -> None:
    [trial] = quick_trials(corpus, "gss", steps=1)
    trial = replace(trial, config=replace(trial.config, eos_first=True))
    runner.train_trial(trial, tmp_path, torch.device("cpu"), quiet=True)
    found = runner.score_trial(trial, tmp_path, torch.device("cpu"), lambda share: None)
    expected = gss.evaluate(gss.load(tmp_path), corpus.folder, [512]).rows[0].loss
    assert found["lengths"]["512"]["loss"] == expected


def test_what_breaks_or_fails_does_not_stop_the_others(corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    real, scored = runner.train, runner.evaluate

    def fails(config: Any, *arguments: Any, **options: Any) -> Any:
        if config.preset == "transformer-tiny":
            raise ValueError("the run diverged")
        if config.micro_batch_tokens is None:
            raise torch.OutOfMemoryError
        return real(config, *arguments, **options)

    def breaks(model: Any, dataset: Any, lengths: list[int | None], **options: Any) -> Any:
        if lengths == [4096]:
            raise ValueError("the model's losses are not finite")
        return scored(model, dataset, lengths, **options)

    monkeypatch.setattr(runner, "train", fails)
    monkeypatch.setattr(runner, "evaluate", breaks)
    outcome = go(quick_trials(corpus, "transformer", "gss"), tmp_path)
    assert [trial.system.name for trial in outcome.done] == ["gss"]
    assert [*outcome.failed.values()] == ["the run diverged"]
    kept = json.loads(next(tmp_path.glob("*/result.json")).read_text())
    assert kept["lengths"]["4096"]["perplexity"] is None
    assert kept["lengths"]["whole"]["perplexity"] > 1
    config = json.loads((tmp_path / outcome.done[0].name / "config.json").read_text())
    assert config["micro_batch_tokens"] == 64  # halved, since the whole batch did not fit


def test_longer_rows_that_do_not_fit_into_memory(corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    (trial,) = quick_trials(corpus, "gss")
    config = replace(trial.config, late_length=2 * trial.config.length, batch_tokens=4 * trial.config.length)
    tried = []

    def fails(config: TrainConfig, *arguments: Any, **options: Any) -> Any:
        tried.append(config.micro_batch_tokens)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(runner, "train", fails)
    with pytest.raises(ValueError, match=f"not even one row of {config.late_length} tokens of gss-tiny fits"):
        runner.train_trial(replace(trial, config=config), tmp_path, torch.device("cpu"), quiet=True)
    assert tried == [None, config.late_length]


def test_the_command(corpus: Corpus, tmp_path: Path) -> None:
    sets = [f"--set={key}={value}" for key, value in {**QUICK, "steps": 2}.items()]
    base = ("reproduce", "table1", "--data", corpus.folder, "--out", tmp_path, "--device", "cpu")
    assert "| books" in call(*base, "--corpus", "books", "--only", "gss", "--evaluate-tokens", 600, *sets)
    kept = json.loads(next(tmp_path.glob("*/result.json")).read_text())
    assert kept["evaluation"]["tokens"] == 600
    assert kept["config"]["steps"] == 2


def test_the_papers_scale_prints_commands(corpus: Corpus, tmp_path: Path) -> None:
    base = ("reproduce", "table1", "--data", corpus.folder, "--out", tmp_path, "--scale", "paper", "--device", "cpu")
    printed = call(*base)
    assert printed.count("torchrun --standalone --nproc-per-node=8 -m gss train --config") == 3
    assert "--config pg19 --preset dss --data" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table3"], "there is no target 'table3'; choose from: table1, table2"),
        (["table1", "--scale", "huge"], "there is no scale 'huge'"),
        (["table1", "--scale", "small"], "no data: add --data"),
        (["table1", "--only", "lstm"], "has no system 'lstm'; it has: transformer, dss, gss"),
        (["table1", "--seeds", "a"], "is not a list of seeds"),
        (["table1", "--corpus", "math"], "there is no corpus 'math' in the data; there are: books"),
        (["table1", "--evaluate-tokens", "0"], "--evaluate-tokens must be at least 1, not 0"),
        (["table1", "--set", "seed=3"], "give seeds with --seeds"),
        (["table1", "--data", "/nowhere"], "neither is a prepared corpus nor holds one"),
    ],
)
def test_what_a_user_can_get_wrong(corpus: Corpus, tmp_path: Path, arguments: list[str], message: str) -> None:
    if "--data" not in arguments and "small" not in arguments:
        arguments = [*arguments, "--data", str(corpus.folder)]
    with pytest.raises(ValueError, match=message):
        call("reproduce", *arguments, "--out", tmp_path)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_model_at_every_scale(system: str, scale: str) -> None:
    trial = trial_of(SYSTEMS[system], SCALES[scale], BOOKS)
    assert preset_name(SYSTEMS[system], SCALES[scale], "PG-19") in PRESETS
    assert trial.tokens == {"tiny": 192 * 4096, "small": 800 * 131_072, "paper": 125_000 * 524_288}[scale]
    assert trial.config.model.vocab_size == BOOKS.vocab_size
    assert trial.config.optimizer.warmup_steps <= trial.config.steps / 4
    if scale == "small":
        low, high = (70e6, 85e6) if "-l" in system.removesuffix("-lanes") and "lstm" not in system else (44e6, 60e6)
        assert low < account(trial.config.model).parameters < high


def test_the_papers_scale_is_the_papers_recipe() -> None:
    config = trial_of(SYSTEMS["gss"], SCALES["paper"], BOOKS).config
    assert not differences(to_mapping(TrainConfig()), config)
    hub = trial_of(SYSTEMS["gss-l"], SCALES["paper"], replace(BOOKS, name="github")).config
    assert (hub.steps, hub.batch_tokens) == (125_000, 1 << 20)
    sentences = trial_of(SYSTEMS["dss"], SCALES["paper"], replace(BOOKS, name="lm1b", vocab_size=30_000)).config
    assert (sentences.preset, sentences.length, sentences.rows, sentences.batching) == ("dss-lm1b", 512, 1024, "packed")
    recurrent = trial_of(SYSTEMS["rec-fixed-skip"], SCALES["paper"], BOOKS).config
    assert (recurrent.steps, recurrent.rows, recurrent.optimizer.name) == (500_000, 32, "adafactor")


def test_settings_do_not_depend_on_the_corpus() -> None:
    """Chosen on books, then fixed: at the scales that are run here every corpus has the same."""
    for scale in ("tiny", "small"):
        for target in TARGETS.values():
            books, code = (planned(target, SCALES[scale], [replace(BOOKS, name=name)]) for name in ("books", "code"))
            assert [trial.config for trial in books] == [trial.config for trial in code]


def test_corpora_of_the_paper() -> None:
    assert paper_corpus("books-own") == "PG-19"
    assert paper_corpus("anything") is None


def test_short_evaluations_have_whole_documents() -> None:
    corpus = Corpus("books", Path("books"), 9, False, {}, 60, 100, held_out=((10, 40), (20, 70), (30, 130)))
    assert [corpus.whole_documents(size) for size in (1, 40, 41, 110, 111, None)] == [10, 10, 30, 30, None, None]
    small = trial_of(SYSTEMS["gss"], replace(SCALES["small"], evaluate_bytes=41), corpus)
    assert (small.evaluate_tokens, small.scored_tokens) == (30, 30)
    assert trial_of(SYSTEMS["gss"], SCALES["tiny"], corpus).evaluate_tokens is None
    assert trial_of(SYSTEMS["gss"], SCALES["small"], corpus, evaluate_tokens=7).evaluate_tokens == 7
