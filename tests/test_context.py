"""Sequences that several ranks share have the loss, the gradients and the state of one process."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import gss
from gss import pieces
from gss.data import Batch
from gss.decode import read
from gss.io import checkpoint
from gss.model import LanguageModel
from gss.nn.context import Context
from gss.scoring import score_sequences
from gss.training import OptimizerConfig, ParallelConfig, TrainConfig, snapshot
from gss.training.distributed import World
from gss.training.step import Stepper
from tests.comparing import relative_error
from tests.conftest import FAMILIES, SLIDING, WINDOW_FAMILIES, small_config

BOUNDED = [family for family in (*FAMILIES, *WINDOW_FAMILIES[:-1], SLIDING) if family != "transformer"]
RANKS = 4
LENGTH = 96  # stretches of 24 and 48 tokens, which no window or chunk divides
CASES = {
    "rows of 4": BOUNDED,
    "pieces of 2": BOUNDED,
    "packed of 4": [family for family in BOUNDED if not family.startswith(("rec-", "feedback-"))],
}
READERS = ("gss-hybrid", "gss2")
TRAININGS = ("ddp packed", "fsdp2 lanes")
STEPS = 4
JOBS = [(case, family) for case, families in CASES.items() for family in families]


def _model(family: str) -> LanguageModel:
    torch.manual_seed(1)
    chunks = {"attention.window": 7} if family in WINDOW_FAMILIES else {}
    if family == "gss-hybrid":
        chunks = {"attention.chunk": 10}
    return gss.build_model(small_config(family, **chunks)).double()


def _found(family: str, case: str, context: Context | None = None) -> dict[str, Tensor]:
    """The loss, every gradient and the state after some rows: the parts of a rank, or the whole."""
    model = _model(family)
    tokens = torch.randint(0, 61, (3, LENGTH + 1))
    rows: dict[str, Any] = {"piece_tokens": LENGTH}
    leaf = None
    if case.startswith("pieces"):
        states = [model(torch.randint(0, 61, (1, read)))[1] for read in (5, 11, 26)]
        state = gss.ModelState.join([state for state in states if state is not None])
        leaf = state.map(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
        rows = {"piece_tokens": LENGTH if context is None else LENGTH // 2, "keep_state": True}
    elif case.startswith("packed"):
        starts = torch.zeros(3, LENGTH, dtype=torch.bool)
        # Over a border; on borders; a document longer than a stretch, and one that ends with the row.
        starts[0, [3, 20, 30, 90]] = starts[1, [0, 24, 48, 71]] = starts[2, [10, 95]] = True
        rows["starts"] = starts
    mask = torch.rand(3, LENGTH) < 0.8
    loss, after = pieces.backward(model, tokens[:, :-1], tokens[:, 1:], mask, state=leaf, context=context, **rows)
    named = {**dict(model.named_parameters()), **({f"before {k}": v for k, v in leaf.named().items()} if leaf else {})}
    found = {name: tensor.grad for name, tensor in named.items() if tensor.requires_grad}
    found = {name: torch.zeros_like(named[name]) if tensor is None else tensor for name, tensor in found.items()}
    found["loss"] = loss.detach()
    if context is not None:
        for tensor in found.values():
            dist.all_reduce(tensor, group=context.group)
    return found | ({f"after {name}": tensor for name, tensor in after.named().items()} if after else {})


def _read(family: str, context: Context | None = None) -> dict[str, Tensor]:
    """Scores of two sequences in pieces of 11, of which ranks have some together and read the rest alike; and the
    logits and state after one.
    """
    model = _model(family)
    ids = torch.randint(0, 61, (2, 121))
    parts = list(score_sequences(model, [ids[0], ids[1, :70]], piece=11, context=context))
    logits, state = read(model, ids, piece=11, context=context)
    scores = {
        f"scores {row}": torch.cat([part.log_probability[row] for part in parts if len(part.counted) > row])[:count]
        for row, count in enumerate((120, 69))  # without what filled up a piece
    }
    return {**scores, "logits": logits, **state.map(Tensor.contiguous).named()}


def _stepper(training: str, world: World, context: int) -> Stepper:
    strategy, batching = training.split()
    config = TrainConfig(
        model=small_config("gss2"),
        steps=STEPS,
        length=LENGTH,
        batch_tokens=4 * LENGTH,
        micro_batch_tokens=LENGTH if batching == "lanes" else None,
        piece_tokens=LENGTH // 2 if batching == "lanes" else None,
        batching=batching,
        activation_checkpointing=batching == "packed",
        parallel=ParallelConfig(strategy=strategy, context=context),
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    torch.manual_seed(0)
    return Stepper(gss.build_model(config.model), config, world)


def _losses(stepper: Stepper, steps: range) -> list[float]:
    """Of steps on made-up batches, whose documents start anywhere in packed rows."""
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 9, (4, LENGTH + 1), generator=draw)
        starts = torch.rand(4, LENGTH, generator=draw) < 0.05
        mask = torch.rand(4, LENGTH, generator=draw) < 0.8
        batch = Batch(tokens[:, :-1], tokens[:, 1:], mask, starts, step, 0)
        own = batch.map(lambda tensor: tensor.chunk(stepper.replicas)[stepper.replica])
        losses.append(stepper.step(own, step).loss.item())
    return losses


def _restored(folder: Path, training: str, world: World, context: int) -> Stepper:
    stepper = _stepper(training, world, context)
    saved = checkpoint.load(folder / training / f"step-{STEPS // 2:08d}")
    snapshot.restore(stepper, saved.tensors, saved.trainer["optimizer"])
    return stepper


def _refusals(context: Context) -> None:
    """On every rank alike, so that none waits for another."""
    with pytest.raises(ValueError, match=r"attention over everything .* attention\.chunk or attention\.sliding"):
        _found("transformer", "rows of 4", context)
    with pytest.raises(ValueError, match=r"packed rows .* block-recurrent model: set parallel\.context=1"):
        _found("rec-fixed-skip", "packed of 4", context)
    with pytest.raises(ValueError, match="each of 4 ranks gets 4 tokens of a sequence, fewer than the 10 that a layer"):
        _model("gss-hybrid").hidden(torch.zeros(1, 16, dtype=torch.int64), context=context)
    with pytest.raises(ValueError, match="18 tokens cannot be divided among 4 ranks"):
        _model("gss").hidden(torch.zeros(1, 18, dtype=torch.int64), context=context)


def _rank(rank: int, folder: Path) -> None:
    """Everything in one set of processes: starting them takes longest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    for size in (2, RANKS):
        mesh = init_device_mesh("cpu", (RANKS // size, size), mesh_dim_names=("data", "context"))
        context = Context(mesh.get_group("context"))
        jobs = [job for job in JOBS if job[0].endswith(str(size))]
        for case, family in jobs[rank // size :: RANKS // size]:
            found = _found(family, case, context)
            if context.rank == size - 1:
                save_file(found, folder / f"{case} {family}.safetensors")
    _refusals(context)
    for family in READERS:
        found = _read(family, context)
        if rank == 1:
            save_file(found, folder / f"read {family}.safetensors")
    world = World(torch.device("cpu"), rank, RANKS)
    for training in TRAININGS:
        stepper = _stepper(training, world, 2)
        losses = _losses(stepper, range(STEPS // 2))
        tensors, scalars = snapshot.take(stepper)
        if rank == 0:
            checkpoint.save(folder / training, STEPS // 2, tensors, {"optimizer": scalars})
        losses += _losses(stepper, range(STEPS // 2, STEPS))
        dist.barrier()
        resumed = _losses(_restored(folder, training, world, RANKS), range(STEPS // 2, STEPS))
        (folder / f"{training} {rank}.json").write_text(json.dumps([losses, resumed]))
    dist.barrier()
    (folder / f"done{rank}").touch()
    dist.destroy_process_group()


def _compare(found: dict[str, Tensor], alone: dict[str, Tensor]) -> None:
    assert found.keys() == alone.keys()
    errors = {name: relative_error(found[name], alone[name]) for name in alone}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-10, f"{worst} differs by {errors[worst]:.1e}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks find: computed once, also where several workers have tests of this file."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "context"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done0").exists():
            folder.mkdir(exist_ok=True)
            multiprocessing.set_forkserver_preload(["torch._dynamo", __name__])  # imported once
            torch.multiprocessing.start_processes(_rank, (folder,), nprocs=RANKS, start_method="forkserver")
    return folder


@pytest.mark.parametrize(("case", "family"), JOBS)
def test_ranks_give_what_one_process_gives(folder: Path, case: str, family: str) -> None:
    alone = _found(family, case)
    _compare(load_file(folder / f"{case} {family}.safetensors"), alone)


@pytest.mark.parametrize("family", READERS)
def test_ranks_read_what_one_process_reads(folder: Path, family: str) -> None:
    _compare(load_file(folder / f"read {family}.safetensors"), _read(family))


@pytest.mark.parametrize("training", TRAININGS)
def test_training_on_a_mesh_of_ranks_is_training_on_one(folder: Path, training: str) -> None:
    """Two ranks a sequence, two sequences side by side; gone on with by four ranks a sequence, and by one process."""
    alone = World(torch.device("cpu"))
    expected = _losses(_stepper(training, alone, 1), range(STEPS))
    assert expected[0] - expected[-1] > 0.003  # by far more than the tolerance
    for rank in range(RANKS):
        losses, resumed = json.loads((folder / f"{training} {rank}.json").read_text())
        assert losses == pytest.approx(expected, abs=1e-6)
        assert resumed == pytest.approx(expected[STEPS // 2 :], abs=1e-6)
    gone_on = _losses(_restored(folder, training, alone, 1), range(STEPS // 2, STEPS))
    assert gone_on == pytest.approx(expected[STEPS // 2 :], abs=1e-6)


def test_sharing_needs_enough_processes() -> None:
    with pytest.raises(ValueError, match=r"parallel\.context=2 needs a multiple of 2 processes, but there are 1"):
        _stepper("ddp segments", World(torch.device("cpu")), 2)
