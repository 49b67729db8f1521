"""Transformers on windows through training: lanes, dropout, resume, processes, and a run's use afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from train_runs import final_files, run, small_config

import gss
from gss.data import Batch, Lanes, as_tensors, open_dataset
from gss.evaluation import evaluate
from gss.generate import generate
from gss.model import build_model
from gss.training.config import TrainConfig
from gss.training.distributed import World
from gss.training.step import Stepper

FAMILIES = ("slide", "xl", "rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip")


def _config(family: str, **settings: Any) -> TrainConfig:
    """Rows of four windows in lanes, Adafactor."""
    sizes: dict[str, Any] = {"model__attention__window": 8, "model__recurrent__vectors": 4}
    if family.startswith("rec-"):
        sizes["model__pattern"] = '["slide", "recurrent"]'
    if family.startswith("feedback-"):
        sizes |= {"model__depth": 1, "model__recurrent__block": 1, "model__recurrent__blocks": 2}
    return small_config(family, **{**sizes, "batching": "lanes", "optimizer__name": "adafactor", **settings})


def _stepper(config: TrainConfig, world: World, dtype: torch.dtype = torch.float32) -> Stepper:
    torch.manual_seed(config.seed)
    return Stepper(build_model(config.model).to(dtype), config, world)


def _steps(stepper: Stepper, corpus: Path, steps: int) -> list[float]:
    config, world = stepper.config, stepper.world
    batches = Lanes(open_dataset(corpus, "train"), config.length, config.rows)
    return [
        stepper.step(as_tensors(batches.batch(step, world.rank, world.size)), step).loss.item() for step in range(steps)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_train_resume_evaluate_generate(corpus: Path, tmp_path: Path, family: str) -> None:
    """With dropout: a run that stops and goes on ends with the bytes of the one that did not."""
    config = _config(family, model__dropout=0.1, steps=12, optimizer__learning_rate=0.03)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lane_starts_a_document_afresh(family: str) -> None:
    """What a step sees of a new document, and leaves behind, does not depend on the document before in its lane."""
    config = _config(family)

    def after(seed: int) -> tuple[float, Stepper]:
        stepper = _stepper(config, World(torch.device("cpu")))
        draw = torch.Generator().manual_seed(seed)
        shape = (config.rows, config.length)
        uncounted = torch.zeros(shape, dtype=torch.bool)
        starts = uncounted.clone()
        starts[:, 0] = True
        # Nothing is learned from the first document: none of its targets count.
        first = torch.randint(0, 257, shape, generator=draw)
        stepper.step(Batch(first, first, uncounted, starts, 0, 0), 0)
        second = torch.randint(0, 257, shape, generator=torch.Generator().manual_seed(9))
        loss = stepper.step(Batch(second, second, ~uncounted, starts, 1, 0), 1).loss.item()
        return loss, stepper

    loss, stepper = after(1)
    other_loss, other = after(2)
    assert loss == other_loss
    assert stepper.lanes is not None
    assert other.lanes is not None
    for layer, other_layer in zip(stepper.lanes.layers, other.lanes.layers, strict=True):
        assert all(torch.equal(layer[name], other_layer[name]) for name in layer)


@pytest.mark.parametrize("family", ["rec-fixed-skip", "feedback-lstm-single"])
def test_micro_batches_change_nothing_but_rounding(corpus: Path, family: str) -> None:
    world = World(torch.device("cpu"))
    whole = _steps(_stepper(_config(family), world, torch.float64), corpus, 5)
    pieces = _steps(_stepper(_config(family, micro_batch_tokens=32), world, torch.float64), corpus, 5)
    assert pieces == pytest.approx(whole, rel=1e-9)


CASES = {
    "ddp adafactor rec": ("rec-fixed-skip", {}),
    "ddp adafactor feedback": ("feedback-lstm-single", {"micro_batch_tokens": 32}),
    "ddp adamw short rows": ("rec-fixed-skip", {"optimizer__name": "adamw", "length": 8, "batch_tokens": 32}),
    "ddp adamw pieces": ("rec-fixed-skip", {"optimizer__name": "adamw", "piece_tokens": 12}),
    "fsdp2 adamw pieces": ("feedback-fixed-skip", {"optimizer__name": "adamw", "parallel": "fsdp2", "piece_tokens": 5}),
    "fsdp2 adamw rec": ("rec-fixed-skip", {"optimizer__name": "adamw", "parallel": "fsdp2"}),
    "fsdp2 adamw feedback": ("feedback-fixed-skip", {"optimizer__name": "adamw", "parallel": "fsdp2"}),
}


def _case(name: str) -> TrainConfig:
    family, settings = CASES[name]
    return _config(family, **{"optimizer__learning_rate": 2e-3, **settings})


def _rank(rank: int, corpus: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    world = World(torch.device("cpu"), rank, 2)
    found = {name: _steps(_stepper(_case(name), world), corpus, 6) for name in CASES}
    try:
        _stepper(_config("slide", parallel="fsdp2"), world)
    except ValueError as error:
        found["refused"] = [str(error)]  # type: ignore[list-item]
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_processes_give_the_losses_of_one(corpus: Path, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (corpus, tmp_path), nprocs=2)
    found, other = (json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in (0, 1))
    assert found == other
    assert "adafactor needs whole matrices" in found["refused"][0]
    for name in CASES:
        alone = _steps(_stepper(_case(name), World(torch.device("cpu"))), corpus, 6)
        assert found[name] == pytest.approx(alone, rel=2e-4), name
