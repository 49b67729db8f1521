"""`gss quickstart` goes the whole way, and again, and ends with a report; without matplotlib it says so."""

import sys
from pathlib import Path

import pytest

from tests.making import SMALL_MODEL, call


def test_the_whole_way_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SMALL_MODEL | {"model.matrix_state.heads": 1, "model.matrix_state.value_width": 4}
    small |= {"steps": 3, "length": 64, "batch_tokens": 256}
    monkeypatch.chdir(tmp_path)  # as outside a checkout: the settings come with the package
    runs = tmp_path / "runs[" / "x]"  # with [/x] in it, which is no markup here
    arguments = ["quickstart", "--data", "data", "--runs", runs, *(f"--set={key}={small[key]}" for key in small)]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        first = call(*arguments)
    assert "no report: a report's figures need matplotlib: pip install 'gss-lm[report]'" in first
    for name in ("gss2-tiny", "gss-tiny"):
        assert (runs / name / "checkpoints" / "step-00000003").is_dir()
        assert f"{name}: " in first
    for word in ("unigrams", "512", "16,384", "nats per byte", "$ gss generate", "run folders: "):
        assert word in first
    again = call(*arguments)
    assert "resuming from step 3 of 3" in again
    losses = [[line for line in said.splitlines() if "nats per byte" in line] for said in (first, again)]
    assert losses[0] == losses[1]
    report = runs / "report.html"
    assert f"wrote {report}" in again
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg") == 10
    assert "16k" in page  # the scores that quickstart itself computed
