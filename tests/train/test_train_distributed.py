"""Two gloo processes under DDP and FSDP2 give what one process gives, and load what the others saved."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from filelock import FileLock
from torch.distributed.tensor import DTensor
from train_runs import assignments, command, losses, small_config, window_config

from gss.data import Segments, as_tensors, open_dataset
from gss.io import checkpoint
from gss.io.runs import read_metrics
from gss.model import build_model
from gss.nn.state_space import DiagonalStateSpace
from gss.training import snapshot
from gss.training.config import TrainConfig
from gss.training.distributed import World
from gss.training.loop import BATCHINGS
from gss.training.step import Stepper
from tests.conftest import WINDOW_FAMILIES, Command

STEPS = 12
BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "gss": ("gss", {}),
    "hybrid": ("gss-hybrid", {}),
    "dss": ("dss", {}),
    "transformer": ("transformer", {}),
    "accumulated": ("gss-hybrid", {"micro_batch_tokens": 32}),
    "lanes": ("gss-hybrid", {"batching": "lanes", "micro_batch_tokens": 32}),
    "pieces": ("gss-hybrid", {"batching": "lanes", "micro_batch_tokens": 32, "piece_tokens": 20}),
    "muon": ("gss-hybrid", {"optimizer__name": "muon"}),
    "checkpointed": ("gss", {"activation_checkpointing": True}),
}
CASES = {f"{parallel} {name}": case for parallel in ("ddp", "fsdp2") for name, case in BOTH.items()} | {
    "ddp rec": ("rec-fixed-skip", {"optimizer__learning_rate": 0.01}),
    "ddp feedback": ("feedback-lstm-single", {"optimizer__learning_rate": 0.01, "micro_batch_tokens": 32}),
    "ddp short rows": ("rec-fixed-skip", {"optimizer__name": "adamw", "length": 8, "batch_tokens": 32}),
    "ddp pieces of windows": ("rec-fixed-skip", {"optimizer__name": "adamw", "piece_tokens": 12}),
    "fsdp2 pieces of windows": ("feedback-fixed-skip", {"optimizer__name": "adamw", "piece_tokens": 5}),
    "fsdp2 rec": ("rec-fixed-skip", {"optimizer__name": "adamw"}),
    "fsdp2 feedback": ("feedback-fixed-skip", {"optimizer__name": "adamw"}),
}


def _config(case: str) -> TrainConfig:
    family, settings = CASES[case]
    # Rates of the paper's size; at ten times that Adam turns the rounding of tiny gradients into steps of its own.
    common = {"parallel": case.partition(" ")[0], "optimizer__learning_rate": 1.6e-3, "steps": STEPS}
    return (window_config if family in WINDOW_FAMILIES else small_config)(family, **common | settings)


def _stepper(config: TrainConfig, world: World) -> Stepper:
    torch.manual_seed(config.seed)
    return Stepper(build_model(config.model), config, world)


def _steps(stepper: Stepper, corpus: Path, first: int, last: int) -> list[float]:
    config, world = stepper.config, stepper.world
    batches = BATCHINGS[config.batching](open_dataset(corpus, "train"), config.length, config.rows)
    return [
        stepper.step(as_tensors(batches.batch(step, world.rank, world.size)), step).loss.item()
        for step in range(first, last)
    ]


def _rank(rank: int, corpus: Path, folder: Path) -> None:
    """All cases in one pair of processes: starting them takes longest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    world = World(torch.device("cpu"), rank, 2)
    found: dict[str, Any] = {}
    for case in CASES:
        stepper = _stepper(_config(case), world)
        if case.startswith("fsdp2"):
            assert all(isinstance(parameter, DTensor) for parameter in stepper.model.parameters())
        found[case] = _steps(stepper, corpus, 0, STEPS // 2)
        tensors, scalars = snapshot.take(stepper)
        if rank == 0:
            checkpoint.save(folder / case, STEPS // 2, tensors, {"optimizer": scalars})
        found[case] += _steps(stepper, corpus, STEPS // 2, STEPS)
        dist.barrier()
    for parallel in ("ddp", "fsdp2"):  # and from a checkpoint of the other strategy
        saved = checkpoint.load(folder / f"ddp lanes/step-{STEPS // 2:08d}")
        stepper = _stepper(_config(f"{parallel} lanes"), world)
        snapshot.restore(stepper, saved.tensors, saved.trainer["optimizer"])
        found[f"{parallel} resumed"] = _steps(stepper, corpus, STEPS // 2, STEPS)
    found["kinds"] = _kinds_under_fsdp2(world, corpus)
    try:
        _stepper(window_config("slide", parallel="fsdp2"), world)
    except ValueError as error:
        found["refused"] = str(error)
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _kinds_under_fsdp2(world: World, corpus: Path) -> list[str]:
    """What state-space parameters are, in shards and gathered inside a bf16 forward, and their gradients."""
    kinds = set()
    for family in ("gss", "dss"):
        stepper = _stepper(small_config(family, parallel="fsdp2", precision="bf16"), world)
        spaces = [module for module in stepper.model.modules() if isinstance(module, DiagonalStateSpace)]
        for space in spaces:
            space.register_forward_pre_hook(
                lambda space, _: kinds.update(f"gathered {p.dtype}" for p in space.parameters())
            )
            kinds.update(f"shard {p.dtype}" for p in space.parameters())
        batch = as_tensors(Segments(open_dataset(corpus, "train"), 32, 4).batch(0, world.rank, 2))
        stepper.optimizer.register_step_pre_hook(
            lambda *_, spaces=spaces: kinds.update(
                f"gradient {p.grad.dtype}" for space in spaces for p in space.parameters() if p.grad is not None
            )
        )
        stepper.step(batch, 0)
    return sorted(kinds)


@pytest.fixture(scope="module")
def found(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What two processes find: computed once, also where several workers have tests of this file."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two-processes"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "found1.json").exists():
            folder.mkdir(exist_ok=True)
            torch.multiprocessing.spawn(_rank, (corpus, folder), nprocs=2)
    both = [json.loads((folder / f"found{rank}.json").read_text()) for rank in (0, 1)]
    assert both[0] == both[1]
    return folder, both[0]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_losses_of_one(corpus: Path, found: tuple[Path, dict[str, Any]], case: str) -> None:
    alone = _steps(_stepper(_config(case), World(torch.device("cpu"))), corpus, 0, STEPS)
    assert alone[0] - alone[-1] > 0.1  # it learns, by far more than the tolerance
    assert found[1][case] == pytest.approx(alone, abs=1e-5)


def test_shards_are_refused_where_matrices_must_be_whole(found: tuple[Path, dict[str, Any]]) -> None:
    assert "adafactor needs whole matrices" in found[1]["refused"]


@pytest.mark.parametrize(
    "case", [f"{parallel} {name}" for parallel in ("ddp", "fsdp2") for name in ("lanes", "dss", "muon")]
)
def test_one_process_loads_what_two_saved(corpus: Path, found: tuple[Path, dict[str, Any]], case: str) -> None:
    folder, two = found
    saved = checkpoint.load(folder / f"{case}/step-{STEPS // 2:08d}")
    stepper = _stepper(_config(case), World(torch.device("cpu")))
    snapshot.restore(stepper, saved.tensors, saved.trainer["optimizer"])
    resumed = _steps(stepper, corpus, STEPS // 2, STEPS)
    assert resumed == pytest.approx(two[case][STEPS // 2 :], abs=1e-5)


def test_each_strategy_loads_what_the_other_saved(found: tuple[Path, dict[str, Any]]) -> None:
    for parallel in ("ddp", "fsdp2"):
        assert found[1][f"{parallel} resumed"] == pytest.approx(found[1]["ddp lanes"][STEPS // 2 :], abs=1e-5)


def test_state_space_parameters_stay_fp32_and_real_under_fsdp2(found: tuple[Path, dict[str, Any]]) -> None:
    assert found[1]["kinds"] == ["gathered torch.float32", "gradient torch.float32", "shard torch.float32"]


@pytest.mark.parametrize("parallel", [{"parallel__context": 2}, {"parallel": "fsdp2"}], ids=["context", "fsdp2"])
def test_torchrun_then_one_process(
    corpus: Path, tmp_path: Path, parallel: dict[str, Any], command_line: Command
) -> None:
    """Two processes from the command line, evaluation and sample included; then gone on with by one.

    They have rows of their own, or a stretch of every row each.
    """
    reports = {"report__evaluate_every": 6, "report__sample_every": 6, "report__sample_tokens": 5}
    small = assignments(**parallel, model__attention__chunk=16, **reports)
    settings = [f"--set={setting}" for setting in small]
    arguments = ["train", "--preset", "gss-hybrid-tiny", "--data", corpus, "--out", tmp_path / "run", *settings]
    process = command(*arguments, processes=2)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.count("step 12/12") == 1
    two = losses(tmp_path / "run")
    assert len(two) == 12
    looks = _evaluations(tmp_path / "run")
    assert looks.keys() == {6, 12}
    samples = [(tmp_path / "run" / "samples" / f"step-{step:08d}.txt").read_bytes() for step in (6, 12)]
    for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[1:]:
        os.rename(path, tmp_path / path.name)
    status, output, errors = command_line(*arguments, "--set=parallel.context=1")
    assert status == 0, errors
    assert "resuming from step 4 of 12" in output
    one = losses(tmp_path / "run")
    assert one[:4] == two[:4]
    assert one == pytest.approx(two, abs=1e-5)
    assert _evaluations(tmp_path / "run") == pytest.approx(looks, abs=1e-5)
    assert samples == [(tmp_path / "run" / "samples" / f"step-{step:08d}.txt").read_bytes() for step in (6, 12)]


def _evaluations(out: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "evaluation"}
