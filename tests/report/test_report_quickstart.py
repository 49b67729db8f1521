"""`gss quickstart` goes the whole way, and again, and ends with a report; without matplotlib it says so."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gss.cli import app

SMALL = ("model.width=16", "model.depth=2", "model.gate_width=32", "model.channels=8", "model.feedforward_width=32",
         "model.state_space.modes=4", "model.attention.heads=2", "model.matrix_state.heads=1",
         "model.matrix_state.value_width=4", "steps=3", "length=64",
         "batch_tokens=256")  # fmt: skip


def test_the_whole_way_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [f"--set={setting}" for setting in SMALL]
    monkeypatch.chdir(tmp_path)  # as outside a checkout: the settings come with the package
    runs = tmp_path / "runs[" / "x]"  # with [/x] in it, which is no markup here
    arguments = ["quickstart", "--data", "data", "--runs", str(runs), *sets]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "no report: a report's figures need matplotlib: pip install 'gss-lm[report]'" in first.output
    for name in ("gss2-tiny", "gss-tiny"):
        assert (runs / name / "checkpoints" / "step-00000003").is_dir()
        assert f"{name}: " in first.output
    for word in ("unigrams", "512", "16,384", "nats per byte", "$ gss generate", "run folders: "):
        assert word in first.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert "resuming from step 3 of 3" in again.output
    losses = [[line for line in said.splitlines() if "nats per byte" in line] for said in (first.output, again.output)]
    assert losses[0] == losses[1]
    report = runs / "report.html"
    assert f"wrote {report}" in again.output
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg") == 10
    assert "16k" in page  # the scores that quickstart itself computed
