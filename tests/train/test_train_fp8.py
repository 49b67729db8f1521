"""Training in fp8: refused without the hardware, near bf16, resumed to the bit, the same under FSDP2 as under DDP."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from train_runs import final_files, run, small_config

from gss.data import as_tensors, open_dataset
from gss.model import build_model
from gss.ops import fast
from gss.training.config import TrainConfig
from gss.training.distributed import World
from gss.training.loop import BATCHINGS
from gss.training.step import Stepper
from tests.interpreted_fp8 import products_in_fp8

STEPS = 4
pytest.importorskip("triton")
IN_INTERPRETER = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device")


def _config(**settings: Any) -> TrainConfig:
    sizes = {"model__channels": 16, "model__vocab_size": 272, "batch_tokens": 64, "length": 32, "steps": STEPS}
    return small_config("gss", **{**sizes, "precision": "fp8", "checkpoint__every": 2, "model__depth": 1, **settings})


def test_hardware_without_fp8_is_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"compute capability 8\.9 or more .*the device is 'cpu': use bf16 or fp32"):
        run(_config(), corpus, tmp_path / "run")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    for usable, reason in ((True, r"this one has 8\.0"), (False, "Triton")):
        monkeypatch.setattr(fast, "usable", lambda device, usable=usable: usable)
        with pytest.raises(ValueError, match=reason):
            fast.check_fp8(torch.device("cuda"))


@IN_INTERPRETER
def test_a_run_in_fp8_is_near_bf16_and_resumes_to_the_bit(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated in bf16 on the way. Nothing but the model and the optimizer is kept: units are each step's own."""
    products_in_fp8(monkeypatch)
    straight = run(_config(report__evaluate_every=2), corpus, tmp_path / "straight")
    half = run(_config(precision="bf16"), corpus, tmp_path / "bf16")
    assert straight not in (half, run(_config(precision="fp32"), corpus, tmp_path / "fp32"))
    assert straight == pytest.approx(half, abs=0.02)
    assert half[0] - half[-1] > 0.1
    run(_config(steps=2), corpus, tmp_path / "stopped")
    assert run(_config(), corpus, tmp_path / "stopped", allow=["steps"]) == straight
    assert final_files(tmp_path / "stopped", STEPS) == final_files(tmp_path / "straight", STEPS)


def _losses(config: TrainConfig, world: World, corpus: Path) -> list[float]:
    torch.manual_seed(config.seed)
    stepper = Stepper(build_model(config.model), config, world)
    batches = BATCHINGS[config.batching](open_dataset(corpus, "train"), config.length, config.rows)
    batch = (as_tensors(batches.batch(step, world.rank, world.size)) for step in range(2))
    return [stepper.step(each, step).loss.item() for step, each in enumerate(batch)]


def _rank(rank: int, corpus: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    products_in_fp8(pytest.MonkeyPatch())
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    world = World(torch.device("cpu"), rank, 2)
    found = {
        parallel: _losses(_config(parallel=parallel, batch_tokens=128), world, corpus) for parallel in ("ddp", "fsdp2")
    }
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@IN_INTERPRETER
def test_two_processes(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are cast after FSDP2 has gathered them; a process's units are those of its own rows."""
    torch.multiprocessing.spawn(_rank, (corpus, tmp_path), nprocs=2)
    found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["fsdp2"] == pytest.approx(found[0]["ddp"], abs=1e-5)
    products_in_fp8(monkeypatch)
    assert found[0]["ddp"] == pytest.approx(
        _losses(_config(batch_tokens=128), World(torch.device("cpu")), corpus), abs=0.02
    )
