"""Steps of one process and of two that share a sequence, on this machine's CPU, to check the simulation.

Called by `python -m experiments.scaling --measure`. Times of steps are the CPU time of a rank, the
minimum over repeats, so other work on the machine matters little. They do not include waiting for the other rank; the
speed of the links is measured separately, in wall-clock time.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import gss
from gss import pieces
from gss.bench.machine import provenance
from gss.nn.context import Context

CASES = (("gss-tiny", 4096), ("gss-tiny", 16_384), ("gss-hybrid-tiny", 16_384))


def _least(function: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of some calls, after one to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        started = clock()
        function()
        seconds.append(clock() - started)
    return min(seconds[1:])


def _step(model: gss.LanguageModel, length: int, context: Context | None) -> Callable[[], None]:
    """A training step: forward, backward, the exchange of gradients and the update."""
    tokens = torch.randint(0, model.config.vocab_size, (1, length + 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        pieces.backward(model, tokens[:, :-1], tokens[:, 1:], piece_tokens=length, context=context)
        if context is not None and context.size > 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            dist.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _links(repeats: int) -> dict[str, float]:
    """Latency and bandwidth of two ranks, from the times of a short and a long all-gather."""
    size = 1 << 22
    times = []
    for count in (1, size):
        gather = partial(dist.all_gather, list(torch.zeros(2, count)), torch.zeros(count))
        times.append(_least(gather, repeats, time.perf_counter))
    speed = 4 * size / (times[1] - times[0])
    return {"near": speed, "far": speed, "latency": times[0]}


def _rank(rank: int, folder: Path, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    both, alone = (Context(init_device_mesh("cpu", (2 // size, size)).get_group(1)) for size in (2, 1))
    sent = 0
    plain_gather, plain_scatter = dist.all_gather, dist.reduce_scatter

    def counted(count: Callable[..., int], plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal sent
            sent += count(*arguments)
            return plain(*arguments, **options)

        return call

    found: dict[str, Any] = {"links": _links(10 * repeats), "rows": []}
    for name, length in CASES:
        torch.manual_seed(0)
        model = gss.build_model(gss.preset(name))
        row: dict[str, Any] = {"model": name, "length": length}
        for what, tokens, context in (
            ("alone", length, None),
            ("half", length // 2, None),
            ("shared_alone", length // 2, alone),
            ("shared", length, both),
        ):
            row[what] = _least(_step(model, tokens, context), repeats, time.process_time)
        dist.all_gather = counted(lambda parts, own, *_: own.nbytes * (len(parts) - 1), plain_gather)
        dist.reduce_scatter = counted(lambda own, parts, *_: own.nbytes * (len(parts) - 1), plain_scatter)
        sent = 0
        _step(model, length, both)()
        row["state_bytes"] = sent
        dist.all_gather, dist.reduce_scatter = plain_gather, plain_scatter
        found["rows"].append(row)
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(repeats: int) -> dict[str, Any]:
    """The links and the rows of the check."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (Path(folder), repeats), nprocs=2)
        found = json.loads((Path(folder) / "found").read_text())
    cpu = torch.device("cpu")
    facts = provenance(cpu)
    return {**facts, **found}
