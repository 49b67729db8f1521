"""Sequences that several ranks share have the loss, the gradients and the state of one process."""

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
from gss.model import LanguageModel
from gss.nn.context import Context
from tests.comparing import relative_error
from tests.conftest import FAMILIES, SLIDING, WINDOW_FAMILIES, small_config

BOUNDED = [family for family in (*FAMILIES, *WINDOW_FAMILIES, SLIDING) if family != "transformer"]
RANKS = 4
LENGTH = 96  # stretches of 24 and 48 tokens, which no window or chunk divides
CASES = {
    "rows": BOUNDED,
    "pieces": BOUNDED,
    "packed": [family for family in BOUNDED if not family.startswith(("rec-", "feedback-"))],
}
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
    if case == "pieces":
        states = [model(torch.randint(0, 61, (1, read)))[1] for read in (5, 11, 26)]
        state = gss.ModelState.join([state for state in states if state is not None])
        leaf = state.map(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
        rows = {"piece_tokens": LENGTH if context is None else LENGTH * context.size // RANKS, "keep_state": True}
    elif case == "packed":
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


def _rank(rank: int, folder: Path) -> None:
    """Everything in one set of processes: starting them takes longest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    for size in (2, RANKS):
        context = Context(
            init_device_mesh("cpu", (RANKS // size, size), mesh_dim_names=("data", "context"))["context"].get_group()
        )
        replica = rank // size
        jobs = [(case, family) for case, families in CASES.items() for family in families]
        for case, family in jobs[replica :: RANKS // size]:
            found = _found(family, case, context)
            if context.rank == (1 if case == "pieces" else 0):
                save_file(found, folder / f"{size} {case} {family}.safetensors")
    dist.barrier()
    (folder / f"done{rank}").touch()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks find: computed once, also where several workers have tests of this file."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "context"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done0").exists():
            folder.mkdir(exist_ok=True)
            multiprocessing.set_forkserver_preload([__name__])  # they import torch once
            torch.multiprocessing.start_processes(_rank, (folder,), nprocs=RANKS, start_method="forkserver")
    return folder


@pytest.mark.parametrize(
    ("case", "family"), [(case, family) for case, families in CASES.items() for family in families]
)
def test_ranks_give_what_one_process_gives(folder: Path, case: str, family: str) -> None:
    alone = _found(family, case)
    for size in (2, RANKS):
        found = load_file(folder / f"{size} {case} {family}.safetensors")
        assert found.keys() == alone.keys()
        errors = {name: relative_error(found[name], alone[name]) for name in alone}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-10, f"{worst} differs by {errors[worst]:.1e} on {size} ranks"
