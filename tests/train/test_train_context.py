"""Rows of 65,536 tokens on two processes, killed and resumed: the losses of one process."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from train_runs import command, losses, run

from gss.data import load_tokenizer, prepare
from gss.io import checkpoint
from gss.training import resolve
from tests.conftest import posix

LENGTH, STEPS = 65_536, 8
SETTINGS = {"length": LENGTH, "batch_tokens": LENGTH, "steps": STEPS, "optimizer.warmup_steps": 2, "device": "cpu"}
SETTINGS |= {"report.evaluate_every": 0, "report.sample_every": 0, "report.log_every": 1, "checkpoint.every": 2}


@posix
@pytest.mark.soak
def test_two_processes_train_on_long_rows_as_one(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(200)]
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=30_000)), encoding="utf-8")
    corpus = tmp_path / "data"
    prepare([str(tmp_path / "text")], corpus, load_tokenizer("bytes"), valid=0.0, workers=1)
    # The command takes this recipe by itself for a model of this size.
    straight = run(
        resolve("gss-tiny", "quickstart", {**SETTINGS, "eos_first": False}, 257), corpus, tmp_path / "straight"
    )

    sets = [f"--set={name}={value}" for name, value in {**SETTINGS, "parallel.context": 2}.items()]
    arguments = [
        "train",
        "--preset",
        "gss-tiny",
        "--data",
        corpus,
        "--out",
        tmp_path / "run",
        "--set=eos_first=false",
        *sets,
    ]
    process = command(*arguments, processes=2)
    while not (tmp_path / "run" / "checkpoints" / "step-00000004").exists() and process.poll() is None:
        time.sleep(0.01)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[2:]:
        os.rename(path, tmp_path / path.name)

    process = command(*arguments, processes=2)
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors
    assert "resuming from step 4 of 8" in output
    print(straight, losses(tmp_path / "run"))
    assert straight[0] - straight[-1] > 0.1
    assert losses(tmp_path / "run") == pytest.approx(straight, abs=1e-6)
