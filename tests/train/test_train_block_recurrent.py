"""Transformers on windows through training: lanes, dropout, resume, and a run's use afterwards."""

from pathlib import Path

import pytest
import torch
from train_runs import final_files, run, window_config

import gss
from gss.data import Lanes, as_tensors, open_dataset
from gss.evaluation import evaluate
from gss.generate import generate
from gss.model import build_model
from gss.training.config import TrainConfig
from gss.training.distributed import World
from gss.training.step import Stepper
from tests.conftest import WINDOW_FAMILIES


def _stepper(config: TrainConfig, world: World, dtype: torch.dtype = torch.float32) -> Stepper:
    torch.manual_seed(config.seed)
    return Stepper(build_model(config.model).to(dtype), config, world)


def _steps(stepper: Stepper, corpus: Path, steps: int) -> list[float]:
    config, world = stepper.config, stepper.world
    batches = Lanes(open_dataset(corpus, "train"), config.length, config.rows)
    return [
        stepper.step(as_tensors(batches.batch(step, world.rank, world.size)), step).loss.item() for step in range(steps)
    ]


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_train_resume_evaluate_generate(corpus: Path, tmp_path: Path, family: str) -> None:
    """With dropout: a run that stops and goes on ends with the bytes of the one that did not."""
    config = window_config(family, model__dropout=0.1, steps=12, optimizer__learning_rate=0.03)
    straight = run(config, corpus, tmp_path / "straight")
    assert straight[-1] < straight[0] - 0.5
    stopped = tmp_path / "stopped"
    run(config, corpus, stopped)
    for step in (12, 8):
        newest = stopped / "checkpoints" / f"step-{step:08d}"
        newest.rename(tmp_path / f"lost-{step}")
    assert run(config, corpus, stopped) == straight
    assert final_files(stopped, 12) == final_files(tmp_path / "straight", 12)
    loaded = gss.load(stopped)
    model, tokenizer = loaded.model, loaded.tokenizer
    assert loaded.step == 12
    assert not model.training
    rows = evaluate(model, open_dataset(corpus, "valid"), [16, 64], max_tokens=256, piece=24).rows
    assert all(row.loss < 6 for row in rows)
    assert generate(model, tokenizer, "ab", max_tokens=20, seed=1) == generate(
        model, tokenizer, "ab", max_tokens=20, seed=1
    )


@pytest.mark.parametrize("family", ["rec-fixed-skip", "feedback-lstm-single"])
def test_micro_batches_change_nothing_but_rounding(corpus: Path, family: str) -> None:
    world = World(torch.device("cpu"))
    whole = _steps(_stepper(window_config(family), world, torch.float64), corpus, 5)
    pieces = _steps(_stepper(window_config(family, micro_batch_tokens=32), world, torch.float64), corpus, 5)
    assert pieces == pytest.approx(whole, rel=1e-9)
