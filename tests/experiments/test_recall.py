"""Studies of recall: quick copies of them run from one command, and keep what is needed to run them again."""

import json
from pathlib import Path

import pytest

from experiments import recall


@pytest.mark.parametrize("name", list(recall.STUDIES))
def test_studies_are_what_they_claim(name: str) -> None:
    study = recall.STUDIES[name]
    model = study.model()
    assert "attention" not in model.layers
    assert study.length == {"recall": 512, "passkey": 4096}[study.task]
    assert max(stage.length for stage in study.curriculum) <= study.length
    assert sum(stage.steps for stage in study.curriculum) < study.steps
    if study.task == "recall":
        assert model.width == 128
    half = study.scaled(0.5)
    assert half.steps == pytest.approx(study.steps / 2, abs=len(study.curriculum) + 1)


def test_a_result_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = recall.Study(
        "gss2-tiny", {**recall.PASSKEY, "width": 8}, "passkey", 32, 2, 3, (recall.Stage(1, 8, 2, 1),), {}, (64,)
    )
    monkeypatch.setitem(recall.STUDIES, "passkey", small)
    arguments = ["passkey", "--seeds", "3", "--sequences", "2", "--out", str(tmp_path)]
    recall.main(arguments)
    kept = json.loads((tmp_path / "passkey.seed3.json").read_text())
    assert [row["length"] for row in kept["accuracy"]] == [32, 64]
    assert (kept["seed"], kept["steps"], kept["curriculum"]) == (3, 3, [[1, 8, 2, 1]])
    assert kept["model"]["width"] == 8
    assert {"hardware", "commit", "date", "command"} <= set(kept)
    assert "passkey, seed 3" in capsys.readouterr().out
    recall.main(arguments)
    assert not capsys.readouterr().out
