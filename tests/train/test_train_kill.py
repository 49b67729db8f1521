"""SIGKILL at random moments, some of them inside a save: no work before the newest checkpoint is ever lost."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from train_runs import final_files, losses, run, small_config

from gss.io import checkpoint
from gss.training import train
from gss.training.config import TrainConfig
from tests.conftest import posix

pytestmark = posix

EVERY, STEPS = 3, 60


def _config() -> TrainConfig:
    return small_config("gss-hybrid", batching="lanes", steps=STEPS, checkpoint__every=EVERY)


def _train(corpus: Path, out: Path) -> None:
    torch.set_num_threads(1)
    train(_config(), corpus, out, quiet=True)


def _inside_a_save(folder: Path) -> bool:
    """Whether a folder is being written; one that is being deleted ends in "-old" and does not count."""
    return folder.is_dir() and any(n.startswith(".aside-") and not n.endswith("-old") for n in os.listdir(folder))


def _kill_at(process: multiprocessing.process.BaseProcess, folder: Path, draw: random.Random, in_save: bool) -> None:
    """Wait for a moment and kill: some time from now, or some time after the next save has begun to write."""
    assert process.pid is not None
    wait = draw.uniform(0, 0.6)
    until = time.monotonic() + wait
    while time.monotonic() < until and process.is_alive():
        time.sleep(0.005)
    if in_save:
        while process.is_alive() and not _inside_a_save(folder):
            pass
        time.sleep(draw.uniform(0, 0.01))
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def _kills(corpus: Path, work: Path, kills: int, kills_in_save: int, seed: int) -> None:
    straight = run(_config(), corpus, work / "straight")
    expected = final_files(work / "straight", STEPS)
    # A server that has torch loaded forks the trainers: each starts in milliseconds, and each is a process of its own.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gss.training"])
    draw = random.Random(seed)
    killed = killed_in_save = finished = 0
    out = work / "run0"
    newest_step = 0
    while killed < kills or killed_in_save < kills_in_save:
        process = context.Process(target=_train, args=(corpus, out))
        process.start()
        _kill_at(process, out / "checkpoints", draw, in_save=draw.random() < 0.5)
        steps_logged = len(losses(out)) if (out / "metrics.jsonl").exists() else 0
        killed += process.exitcode == -signal.SIGKILL
        killed_in_save += process.exitcode == -signal.SIGKILL and _inside_a_save(out / "checkpoints")
        newest, damaged = checkpoint.newest_good(out / "checkpoints")
        assert damaged == []
        step = checkpoint.step_of(newest) if newest else 0
        assert step >= newest_step
        assert steps_logged - step <= EVERY, "more than one interval was lost"
        newest_step = step
        if process.exitcode == 0:
            assert losses(out) == straight
            assert final_files(out, STEPS) == expected
            finished += 1
            out, newest_step = work / f"run{finished}", 0
        else:
            assert process.exitcode == -signal.SIGKILL
    assert run(_config(), corpus, out) == straight
    assert final_files(out, STEPS) == expected
    print(f"{killed} kills, {killed_in_save} of them inside a save, {finished + 1} runs finished")


def test_twenty_kills(corpus: Path, tmp_path: Path) -> None:
    _kills(corpus, tmp_path, 20, 5, seed=1)


@pytest.mark.soak
def test_two_hundred_kills(corpus: Path, tmp_path: Path) -> None:
    _kills(corpus, tmp_path, 200, 50, seed=2)
