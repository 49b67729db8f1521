"""`gss train` from outside: its output in a pipe and on a terminal, its exit statuses, its signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from train_runs import assignments, command, final_files, losses, run, small_config

from gss.io import checkpoint
from tests.conftest import posix


def _arguments(corpus: Path, out: Path, **settings: object) -> list[str | Path]:
    settings = {"model__attention__chunk": 16, "optimizer__name": "adamw", "eos_first": "false"} | settings
    sets = [f"--set={setting}" for setting in assignments(**settings)]
    return ["train", "--preset", "gss-hybrid-tiny", "--data", corpus, "--out", out, *sets]


def test_plain_lines_in_a_pipe(corpus: Path, finished: Path, tmp_path: Path) -> None:
    """And what it trains is what the function trains."""
    process = command(*_arguments(corpus, tmp_path / "run", report__log_every=5))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
    assert "\x1b" not in output
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert [line.split(" · ")[0] for line in lines] == ["step 5/12", "step 10/12", "step 12/12"]
    for word in ("loss", "perplexity", "rate", "gradient", "tokens/s", "left"):
        assert all(word in line for line in lines)
    assert losses(finished) == losses(tmp_path / "run")
    assert final_files(finished, 12) == final_files(tmp_path / "run", 12)


@posix
def test_a_live_line_on_a_terminal(corpus: Path, tmp_path: Path) -> None:
    import pty

    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gss", *map(str, _arguments(corpus, tmp_path / "run"))],
        stdout=there,
        stderr=there,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
    )
    os.close(there)
    shown = b""
    while True:
        try:
            part = os.read(here, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait(timeout=60) == 0
    assert b"step 12/12" in shown
    assert b"\x1b[" in shown  # the line is redrawn in place


@posix
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_stop(corpus: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    """However early or late it comes after training has begun, the step that it came in is saved."""
    out = tmp_path / "run"
    settings = {"steps": 5000, "checkpoint__every": 4000}
    process = command(*_arguments(corpus, out, **settings))
    while not (out / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert f"stopped by {number.name} after step" in output
    taken = losses(out)
    newest, _ = checkpoint.newest_good(out / "checkpoints")
    assert newest is not None
    assert checkpoint.step_of(newest) == len(taken) < 5000
    more = len(taken) + 5
    result = run(small_config(steps=more), corpus, out, allow=["steps", "optimizer.learning_rate"])
    assert result[: len(taken)] == taken
    assert len(result) == more


@posix
def test_torchrun_stops_on_a_signal_to_one_process(corpus: Path, tmp_path: Path) -> None:
    """torchrun passes SIGTERM on to its processes; all of them agree on the step and save it."""
    out = tmp_path / "run"
    process = command(*_arguments(corpus, out, steps=5000, checkpoint__every=4000), processes=2)
    while not (out / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    newest, damaged = checkpoint.newest_good(out / "checkpoints")
    assert damaged == []
    assert newest is not None
    assert checkpoint.step_of(newest) == len(losses(out))


@posix
def test_torchrun_restarts_after_a_process_dies(corpus: Path, tmp_path: Path) -> None:
    """Elastic: one of two processes, which share every row, is killed; torchrun restarts both, and they continue from
    the newest checkpoint.
    """
    straight = run(small_config(steps=60), corpus, tmp_path / "straight")
    out = tmp_path / "run"
    arguments = _arguments(corpus, out, steps=60, checkpoint__every=5, parallel__context=2)
    process = command(*arguments, processes=2, restarts=1)
    while not (out / "checkpoints" / "step-00000010").exists() and process.poll() is None:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "resuming from step" in output
    assert losses(out) == pytest.approx(straight, abs=0.01)
    assert losses(out)[:10] == pytest.approx(straight[:10], abs=1e-4)


def test_errors_are_one_line(corpus: Path, tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]) -> None:
    cases = [
        ["train", "--preset", "gss-tiny", "--data", tmp_path / "none", "--out", tmp_path / "run"],
        ["train", "--preset", "nope", "--data", corpus, "--out", tmp_path / "run"],
        [*_arguments(corpus, tmp_path / "run"), "--set", "device=cuda"],
    ]
    for arguments, word in zip(cases, ("not a prepared corpus", "no preset 'nope'", "torch sees no GPU"), strict=True):
        status, _, errors = command_line(*arguments)
        assert status == 1
        assert errors.startswith("error: ")
        assert word in errors
        assert errors.count("\n") == 1
