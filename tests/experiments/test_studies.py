"""Studies: their settings, their tables, a run of one, and the helpers that read what comes out."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import compare, study, tabulate
from experiments.results import ResultStore
from experiments.studies import EVERY, INITIALISATIONS, STUDIES
from experiments.tables import markdown, notes, table
from gss.config import to_mapping
from gss.data import load_tokenizer, prepare
from gss.data.tokenizer_training import train_tokenizer
from gss.reproduce import SCALES, SYSTEMS, Corpus, find_corpora, planned
from gss.reproduce.trials import trial_of
from tests.reproduce.conftest import BOOKS, QUICK, made_up

SMALL = SCALES["small"]


def test_one_of_the_starts_is_the_default() -> None:
    for model, name in (("gss", "init-half-low-frequencies"), ("gss-hybrid", "init-hybrid-half-low-frequencies")):
        default = trial_of(SYSTEMS[model], SMALL, BOOKS, changes={"optimizer.learning_rate": 1.6e-3}).config
        assert trial_of(EVERY[name], SMALL, BOOKS).config == default
    assert len(INITIALISATIONS) >= 6
    models = [trial_of(system, SMALL, BOOKS).config.model for system in INITIALISATIONS]
    assert len({str(to_mapping(model)) for model in models}) == len(models)


def test_a_study_stands_when_the_tables_get_another_rate() -> None:
    def rate(system: str) -> float:
        return trial_of(EVERY[system], SMALL, BOOKS).config.optimizer.learning_rate

    assert {rate(name) for name in ("transformer", "dss", "gss", "gss-lanes", "gss-hybrid-l")} == {3.2e-3}
    assert {rate(name) for name in ("init-1-1000", "vocabulary", "dss-embedding-1")} == {1.6e-3}
    assert rate("transformer-0.0008") == 8e-4


def test_names_do_not_collide() -> None:
    corpora = [BOOKS, replace(BOOKS, name="books-own"), replace(BOOKS, name="math")]
    trials = [
        trial
        for target in STUDIES.values()
        for tokens in (None, 1_000_000)
        for trial in planned(target, SMALL, corpora, seeds=[0, 1, 10], tokens=tokens)
    ]
    assert len({t.name for t in trials}) == len({(t.name, t.config, t.corpus.name) for t in trials})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("init", ["1-1000", "700", "900", "2.0%", "no mode slower than 100 tokens"]),
        ("rates", ["GSS, rate 0.0016"]),
        ("vocabulary", ["| no ", "1.2500", "1.5000", "4.49%", "01234567", "3.72"]),
    ],
)
def test_tables(name: str, expected: list[str]) -> None:
    target = STUDIES[name]
    found = [(trial, made_up(trial)) for trial in planned(target, SMALL, [BOOKS])]
    text = "\n".join([markdown(*table(target, found)), *notes(target, found)])
    for words in expected:
        assert words in text, words
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(target.systems)
    assert len({len(line) for line in lines}) == 1


def test_a_trial_that_is_the_same_under_another_name_is_not_run_again(corpus: Corpus, tmp_path: Path) -> None:
    first, same, other = (
        trial_of(EVERY[name], SMALL, corpus) for name in ("gss-0.0016", "init-half-low-frequencies", "init-loud")
    )
    store = ResultStore(tmp_path)
    store.put(first, made_up(first))
    kept = store.find(same)
    assert kept is not None
    assert kept["system"] == "gss-0.0016"
    assert store.find(other) is None
    assert store.find(trial_of(EVERY["init-half-low-frequencies"], SMALL, corpus, seed=1)) is None


def test_vocabularies_by_bits_per_byte(texts: Path, corpus: Corpus, tmp_path: Path) -> None:
    train_tokenizer([str(texts)], tmp_path / "vocabulary", vocab_size=300, model="bpe", threads=1)
    prepare([str(texts)], tmp_path / "books-own", load_tokenizer(tmp_path / "vocabulary"), workers=1)
    corpora = [corpus, *find_corpora([tmp_path / "books-own"])]
    changes = {**QUICK, "steps": 3}
    trials = planned(STUDIES["vocabulary"], SCALES["tiny"], corpora, changes=changes)
    noted = {"shared": True, "tokens_per_second": None}
    assert not study.run(trials, tmp_path / "out", tmp_path / "runs", "cpu", noted)
    kept = [json.loads(path.read_text()) for path in (tmp_path / "out" / "results").iterdir()]
    assert len({result["evaluation"]["text"] for result in kept}) == 1
    for result in kept:
        row = result["lengths"]["whole"]
        assert row["bits_per_byte"] == pytest.approx(row["bits_per_raw_byte"])
        assert row["bits_per_raw_byte"] == row["bits_per_given_back_byte"]
        assert [part["layer"] for part in result["time_constants"]["end"]] == ["1", "2"]
        assert result["time_constants"]["start"] != result["time_constants"]["end"]
        assert result["tokens_per_second"] is None


def test_unknown_characters_do_not_come_back() -> None:
    assert study.without_unknown("a \u2047 b \u2047  \u2047 c") == "abc"


def test_a_paired_comparison_has_the_error_of_the_difference() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(500, 5000, 60)
    hardness = random.normal(3.5, 0.5, 60)  # of a document, for both systems
    gain = random.normal(0.02, 0.01, 60)
    ours = [(float(c * (h - g)), int(c)) for c, h, g in zip(counts, hardness, gain, strict=True)]
    theirs = [(float(c * h), int(c)) for c, h in zip(counts, hardness, strict=True)]
    found = compare.paired_ratio(ours, theirs)
    expected_nats = -float((counts * gain).sum())
    assert found.ratio == pytest.approx(math.exp(expected_nats / counts.sum()))
    left_out = [math.exp((expected_nats - c * -g) / (counts.sum() - c)) for c, g in zip(counts, gain, strict=True)]
    mean = sum(left_out) / 60
    assert found.standard_error == pytest.approx(math.sqrt(59 / 60 * sum((each - mean) ** 2 for each in left_out)))
    assert found.sigmas < -5
    assert compare.paired_ratio(theirs, theirs).ratio == 1
    assert math.isnan(compare.paired_ratio(ours[:1], theirs[:1]).standard_error)
    with pytest.raises(ValueError, match="not scored on the same tokens"):
        compare.paired_ratio(ours, theirs[1:])


def test_result_files_as_a_table(tmp_path: Path) -> None:
    for number, score in enumerate((41.125, None)):
        content = {"label": f"GSS {number}", "seed": number, "lengths": {"4096": {"perplexity": score}}}
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    records = tabulate.load_results(tmp_path)
    assert [record["seed"] for record in records] == [0, 1]
    text = tabulate.table(records, {"model": "label", "seed": "seed", "4k": "lengths.4096.perplexity"})
    assert text.splitlines()[2:] == ["| GSS 0 |    0 | 41.12 |", "| GSS 1 |    1 |     – |"]
    assert tabulate.load_results(tmp_path / "1*.json") == records[1:]
    with pytest.raises(ValueError, match="no result files match"):
        tabulate.load_results(tmp_path / "x*.json")


def test_the_command_keeps_what_is_done(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [f"--set={key}={value}" for key, value in {**QUICK, "steps": 2}.items()]
    options = ["init", "--only=init-loud", "--scale=tiny", "--device=cpu", "--seconds=600", "--shared", "--commit=abc"]
    monkeypatch.setattr("sys.argv", ["study.py", *options, f"--data={corpus.folder}", f"--out={tmp_path}", *sets])
    study.main()
    (kept,) = [json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()]
    assert (kept["system"], kept["commit"], kept["shared"]) == ("init-loud", "abc", True)
    assert kept["command"].startswith("python -m experiments.study init --only=init-loud")
    assert (kept["seed"], kept["data"]["train_bytes"]) == (0, corpus.train_bytes)
    assert kept["wall_seconds"]["training"] > 0
    assert kept["wall_seconds"]["from_step"] == 0
    assert kept["layout"]["micro_batch_tokens"] is None
    # It is known by its file alone; one of other settings is refused, and so is what is not a result.
    monkeypatch.setattr(study, "train_trial", lambda *given: pytest.fail("trained again"))
    study.main()
    path = next((tmp_path / "results").iterdir())
    path.write_text(json.dumps({**kept, "config": {**kept["config"], "seed": 5}}))
    with pytest.raises(ValueError, match=r"seed was 5, now 0.*another --out"):
        study.main()
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a result of a study"):
        study.main()
