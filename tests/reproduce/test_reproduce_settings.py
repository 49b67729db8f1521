"""The settings are complete: every system at every scale builds, in the sizes that the tables state."""

from dataclasses import replace
from pathlib import Path

import pytest

from gss.accounting import account
from gss.config import to_mapping
from gss.presets import PRESETS
from gss.reproduce import SCALES, SYSTEMS, TARGETS, Corpus, planned
from gss.reproduce.settings import paper_corpus, preset_name
from gss.reproduce.trials import trial_of
from gss.training.config import TrainConfig, differences
from tests.reproduce.conftest import BOOKS


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
    corpus = Corpus("books", Path("books"), 9, False, {}, 60, 100, 400, held_out=((10, 40), (20, 70), (30, 130)))
    assert [corpus.whole_documents(size) for size in (1, 40, 41, 110, 111, None)] == [10, 10, 30, 30, None, None]
    small = trial_of(SYSTEMS["gss"], replace(SCALES["small"], evaluate_bytes=41), corpus)
    assert (small.evaluate_tokens, small.scored_tokens) == (30, 30)
    assert trial_of(SYSTEMS["gss"], SCALES["tiny"], corpus).evaluate_tokens is None
    assert trial_of(SYSTEMS["gss"], SCALES["small"], corpus, evaluate_tokens=7).evaluate_tokens == 7
