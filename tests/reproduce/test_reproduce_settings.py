"""The settings are complete: every system at every scale builds, in the sizes that the tables state."""

from dataclasses import replace
from pathlib import Path

import pytest

from gss.accounting import account
from gss.config import to_mapping
from gss.presets import PRESETS
from gss.reproduce.candidates import INITIALISATIONS
from gss.reproduce.plan import Corpus, planned, run_of, toml
from gss.reproduce.settings import SCALES, SYSTEMS, TARGETS, paper_corpus, preset_name
from gss.train.config import TrainConfig, differences, resolve

T5 = 32_000
EVERY = {system.name: system for target in TARGETS.values() for system in target.systems}
BOOKS = Corpus("books", Path("books"), T5, False, {}, "", 4_778_601, 104_667_316, 399_616_561)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_model_at_every_scale(system: str, scale: str) -> None:
    run = run_of(SYSTEMS[system], SCALES[scale], BOOKS)
    assert preset_name(SYSTEMS[system], SCALES[scale], "PG-19") in PRESETS
    assert run.tokens == SCALES[scale].tokens  # equal tokens, whatever the batch
    assert run.config.model.vocab_size == T5
    if scale == "small":
        low, high = (70e6, 85e6) if "-l" in system.removesuffix("-lanes") and "lstm" not in system else (44e6, 60e6)
        assert low < account(run.config.model).parameters < high
        assert run.tokens >= 100e6


@pytest.mark.parametrize("system", EVERY)
def test_every_candidate_resolves(system: str) -> None:
    for scale in SCALES.values():
        config = run_of(EVERY[system], scale, BOOKS).config
        assert config.optimizer.warmup_steps <= config.steps / 4


def test_one_of_the_starts_is_the_default() -> None:
    for model, name in (("gss", "init-half-low-frequencies"), ("gss-hybrid", "init-hybrid-half-low-frequencies")):
        default = run_of(replace(SYSTEMS[model], recipe="study"), SCALES["small"], BOOKS).config
        assert run_of(EVERY[name], SCALES["small"], BOOKS).config == default
    assert len(INITIALISATIONS) >= 6
    models = [run_of(system, SCALES["small"], BOOKS).config.model for system in TARGETS["init"].systems]
    assert len({str(to_mapping(model)) for model in models}) == len(models)


def test_the_papers_scale_is_the_papers_recipe() -> None:
    config = run_of(SYSTEMS["gss"], SCALES["paper"], BOOKS).config
    assert not differences(to_mapping(TrainConfig()), config)
    hub = run_of(SYSTEMS["gss-l"], SCALES["paper"], replace(BOOKS, name="github")).config
    assert (hub.steps, hub.batch_tokens) == (125_000, 1 << 20)
    sentences = run_of(SYSTEMS["dss"], SCALES["paper"], replace(BOOKS, name="lm1b", vocab_size=30_000)).config
    assert (sentences.preset, sentences.length, sentences.rows, sentences.batching) == ("dss-lm1b", 512, 1024, "packed")
    recurrent = run_of(SYSTEMS["rec-fixed-skip"], SCALES["paper"], BOOKS).config
    assert (recurrent.steps, recurrent.rows, recurrent.optimizer.name) == (500_000, 32, "adafactor")


@pytest.mark.parametrize("system", ["gss", "xl", "init-quiet"])
def test_a_written_config_is_the_run(system: str, tmp_path: Path) -> None:
    run = run_of(EVERY[system], SCALES["paper"], BOOKS, seed=3)
    path = tmp_path / "run.toml"
    path.write_text(toml(run))
    assert not differences(to_mapping(resolve(None, path, (), T5)), run.config)


def test_settings_do_not_depend_on_the_corpus() -> None:
    """Chosen on books, then fixed: at the scales that are run here every corpus has the same."""
    for scale in ("tiny", "small"):
        for target in TARGETS.values():
            books, code = (planned(target, SCALES[scale], [replace(BOOKS, name=name)]) for name in ("books", "code"))
            assert [run.config for run in books] == [run.config for run in code]


def test_a_study_stands_when_the_tables_get_another_rate() -> None:
    def rate(system: str) -> float:
        return run_of(EVERY[system], SCALES["small"], BOOKS).config.optimizer.learning_rate

    assert {rate(name) for name in ("transformer", "dss", "gss", "gss-lanes", "gss-hybrid-l")} == {3.2e-3}
    assert {rate(name) for name in ("init-1-1000", "vocabulary", "dss-embedding-1")} == {1.6e-3}
    assert rate("transformer-0.0008") == 8e-4


def test_corpora_of_the_paper() -> None:
    assert paper_corpus("books-own") == "PG-19"
    assert paper_corpus("anything") is None


def test_short_evaluations_have_whole_documents() -> None:
    corpus = Corpus("books", Path("books"), 9, False, {}, "", 60, 100, 400, held_out=((10, 40), (20, 70), (30, 130)))
    assert [corpus.whole_documents(size) for size in (1, 40, 41, 110, 111, None)] == [10, 10, 30, 30, None, None]
    small = run_of(SYSTEMS["gss"], replace(SCALES["small"], evaluate_bytes=41), corpus)
    assert (small.evaluate_tokens, small.scored_tokens) == (30, 30)
    assert run_of(SYSTEMS["gss"], SCALES["tiny"], corpus).evaluate_tokens is None
    assert run_of(SYSTEMS["gss"], SCALES["small"], corpus, evaluate_tokens=7).evaluate_tokens == 7


def test_names_do_not_collide() -> None:
    books = Corpus("books", Path("books"), 9, False, {}, "", 60, 100, 400)
    corpora = [books, replace(books, name="books-own"), replace(books, name="math")]
    runs = [
        run
        for target in TARGETS.values()
        for tokens in (None, 1_000_000)
        for run in planned(target, SCALES["small"], corpora, seeds=[0, 1, 10], tokens=tokens)
    ]
    assert len({run.name for run in runs}) == len({(run.name, run.config, run.corpus.name) for run in runs})
