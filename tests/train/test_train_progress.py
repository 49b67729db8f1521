"""The figures that a run shows of itself."""

from pathlib import Path

import pytest
from train_runs import small_config

from gss.io.runs import read_metrics
from gss.training import loop, train


def test_speed_is_the_steps_own(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second by this clock, an evaluation and a save a hundred: the speed is a batch a second."""
    clock = 0.0

    def taking(seconds: float, function):
        def slow(*arguments, **options):
            nonlocal clock
            clock += seconds
            return function(*arguments, **options)

        return slow

    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(loop.Stepper, "step", taking(1.0, loop.Stepper.step))
    monkeypatch.setattr(loop.probe, "validation_losses", taking(100.0, loop.probe.validation_losses))
    monkeypatch.setattr(loop.checkpoint, "save", taking(100.0, loop.checkpoint.save))
    config = small_config("gss", steps=13, report__log_every=5, report__evaluate_every=3, checkpoint__every=4)
    train(config, corpus, tmp_path / "run", quiet=True)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 13
    assert all(row["tokens_per_second"] == pytest.approx(config.batch_tokens) for row in rows)
