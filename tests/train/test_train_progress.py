"""The figures that a run shows of itself."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from train_runs import run, small_config

import gss
from gss.accounting import flops_per_token
from gss.config import override
from gss.data import open_dataset
from gss.io.runs import read_metrics, training_summary
from gss.training import loop, train
from gss.training.distributed import World
from gss.training.folder import RunFolder
from gss.training.progress import Progress, training_line


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
    monkeypatch.setattr(loop, "validation_losses", taking(100.0, loop.validation_losses))
    monkeypatch.setattr(loop.checkpoint, "save", taking(100.0, loop.checkpoint.save))
    monkeypatch.setattr(loop, "matmul_rate", lambda *_: 1e9)
    config = small_config("gss", steps=13, report__log_every=5, report__evaluate_every=3, checkpoint__every=4)
    train(config, corpus, tmp_path / "run", quiet=True)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 13
    assert all(row["tokens_per_second"] == pytest.approx(config.batch_tokens) for row in rows)
    flops = 3 * flops_per_token(config.model, config.length)  # a backward pass costs two forward passes
    assert all(row["mfu"] == pytest.approx(config.batch_tokens * flops / 1e9) for row in rows)


def test_looks_on_the_way_change_nothing(corpus: Path, tmp_path: Path) -> None:
    """Dropout goes on after an evaluation and a sample, and is in neither."""
    settings = {"steps": 6, "model__dropout": 0.3, "seed": 2}
    plain = run(small_config("gss2", **settings), corpus, tmp_path / "plain")
    settings |= {"report__evaluate_every": 2, "report__evaluate_lengths": [16, 10**6], "report__sample_every": 2}
    assert run(small_config("gss2", **settings, report__sample_tokens=9), corpus, tmp_path / "run") == plain
    text = gss.load(tmp_path / "run").generate(max_tokens=9, temperature=0.8, seed=2)
    assert (tmp_path / "run" / "samples" / "step-00000006.txt").read_text() == text + "\n"
    looks = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "evaluation"]
    longest = int(open_dataset(corpus, "valid").lengths.max())
    assert [(row["step"], row["length"]) for row in looks] == [(s, n) for s in (2, 4, 6) for n in (16, longest)]


def test_a_run_in_three_figures() -> None:
    """The time of all its steps, its usual speed and the loss of its last twentieth."""
    rows = [{"loss": 9.0 - step / 10, "tokens_per_second": 50.0 if step < 4 else 200.0} for step in range(40)]
    expected = {"seconds": 4 * 2 + 36 / 2, "tokens_per_second": 200.0, "train_loss": 5.15}
    assert training_summary(rows, 100) == pytest.approx(expected)


@pytest.mark.parametrize(("width", "gone"), [(None, []), (200, []), (80, ["gradient", "rate"])])
def test_a_narrow_line_keeps_speed_and_time_left(width: int | None, gone: list[str]) -> None:
    row = {"step": 1234, "loss": 3.2, "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens_per_second": 123456.0}
    line = training_line({**row, "mfu": 0.4}, 125_000, 1e6, width)
    assert "123,456 tokens/s" in line
    assert "11d13h left" in line
    assert all(word not in line for word in gone)
    assert width is None or len(line) < width


def test_the_live_line_moves_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    progress = Progress(100)
    progress._console = Console(force_terminal=True, width=80, file=io.StringIO())
    with progress:
        assert progress._live is not None
        monkeypatch.setattr(progress._live, "update", lambda text: shown.append(text.plain))
        progress.stepped(1)
        progress.stepped(2)
        row = {"step": 2, "loss": 3.2, "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens_per_second": 9.0}
        progress.training(row, 98.0)
        progress.stepped(3)
    assert [line.split(" · ")[0] for line in shown] == [f"step {step}/100" for step in (1, 2, 2, 3)]
    assert re.search(r"about \d+s left$", shown[1])  # before there is any figure
    assert "9 tokens/s" in shown[3]


@pytest.mark.parametrize(("rows", "less"), [(2, "micro_batch_tokens=32"), (1, "piece_tokens=4096")])
@pytest.mark.parametrize(("steps", "warned"), [(2, False), (100_000_000_000, True)])
def test_a_run_without_end_on_a_cpu_is_warned_of(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, warned: bool, rows: int, less: str
) -> None:
    config = small_config("gss", steps=steps, length=32, batch_tokens=32 * rows, optimizer__learning_rate=0.01)
    run = loop._Run(config, open_dataset(corpus, "train"), RunFolder(tmp_path), World(torch.device("cpu")), (), False)
    run._introduce()
    said = " ".join(capsys.readouterr().out.split())
    assert ("days on this CPU" in said) == (f"use less memory, --set {less}" in said) == warned


def test_weights_and_biases(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of every step, in order, under one id that a resumed run has too; without the package, one line."""
    lengths = {"report__evaluate_every": 2, "report__evaluate_lengths": [8, 16]}
    config = small_config("gss", steps=3, report__wandb=True, **lengths)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"needs the wandb package: pip install 'gss-lm\[wandb\]'"):
        train(config, corpus, tmp_path / "run", quiet=True)
    begun: list[dict] = []
    logged: list[tuple[int, dict]] = []
    ended: list[bool] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: ended.append(True))

    def init(**options):
        begun.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    train(config, corpus, tmp_path / "run", quiet=True)
    train(override(config, {"steps": 4}), corpus, tmp_path / "run", quiet=True, allow=["steps"])
    trained = [(step, values) for step, values in logged if "train/loss" in values]
    assert [step for step, _ in trained] == [1, 2, 3, 4]
    assert all(values["train/loss"] > 0 for _, values in trained)
    names = [name for _, values in logged for name in values if name.startswith("evaluation")]
    assert names == ["evaluation/loss at 8", "evaluation/loss at 16"] * 3  # after steps 2, 3 and 4
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)
    assert len({options["id"] for options in begun}) == 1
    assert begun[0]["config"]["model"]["width"] == 16
    assert ended == [True, True]
