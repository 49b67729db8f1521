"""One process or many: this process's rank, how the model is distributed, and collective operations.

torchrun starts the processes, DDP or FSDP2 distributes the model, gloo and NCCL transfer tensors. With a single
process, everything here is the identity. Independent of data, losses and files.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gss.io.devices import pick_device
from gss.model import LanguageModel
from gss.nn.context import Context
from gss.nn.gss import GSSLayer
from gss.training.config import TrainConfig

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the tensor over all processes, on each of them."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, number: int) -> int:
        """The largest of all processes' numbers, on each of them."""
        if self.size == 1:
            return number
        shared = torch.tensor(number)  # on the CPU: gloo transfers it without waiting for the GPU
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def on_leader(self, action: Callable[[], _Result]) -> _Result | None:
        """The result of an action that only the leader takes, None elsewhere. An error there stops every process."""
        result, error = None, None
        if self.leads:
            try:
                result = action()
            except (OSError, ValueError) as caught:
                error = caught
        if self.largest(error is not None):
            raise error or ValueError("the first process stopped; its message says why")
        return result

    def context(self, size: int) -> Context | None:
        """The `size` processes of consecutive ranks that share this one's sequences; None if each has its own."""
        if self.size % size:
            raise ValueError(
                f"parallel.context={size} needs a multiple of {size} processes, but there are {self.size}: start as "
                "many with torchrun, or change parallel.context"
            )
        if size == 1:
            return None
        mesh = init_device_mesh(self.device.type, (self.size // size, size), mesh_dim_names=("data", "context"))
        return Context(mesh.get_group("context"))

    def gather_rows(self, tensor: Tensor, sharing: int = 1) -> Tensor | None:
        """The rows of all processes in order, on the leader's CPU; None elsewhere.

        Shapes must be equal. Each group of `sharing` consecutive processes holds the same rows.
        """
        if self.size == 1:
            return tensor.cpu()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.leads else None
        dist.gather(tensor.contiguous(), parts)
        return torch.cat(parts[::sharing]).cpu() if parts else None


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """The world that torchrun's environment variables describe, or a world of one, until the end of the context."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1 or dist.is_initialized():
        yield World(chosen, rank, size)
        return
    # After a restart on one machine torchrun hands out the same store, which still holds the addresses of the dead
    # processes, so each attempt gets a prefix. (On several machines torchrun must not share it: see the docs.)
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    store, _, _ = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=rank,
        world_size=size,
    )
    try:
        yield World(chosen, rank, size)
    finally:
        dist.destroy_process_group()


def prepare_layers(model: LanguageModel, config: TrainConfig, tokens: int) -> None:
    """Apply activation checkpointing and compilation to each layer in place; parameters keep their names.

    GSS layers keep their wide products for the backward pass if there is memory for those of `tokens` tokens, the
    number that is back-propagated at a time.
    """
    keep = not config.activation_checkpointing and model.device.type == "cuda"
    if keep and keeps_products(model, tokens, torch.cuda.get_device_properties(model.device).total_memory):
        for layer in model.layers:
            if isinstance(layer, GSSLayer):
                layer.keep_products = True
    for layer in model.layers:
        if config.activation_checkpointing:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if config.compile:
            layer.compile()


def keeps_products(model: LanguageModel, tokens: int, memory: int) -> bool:
    """Whether the two wide 16-bit products of every gate take at most a quarter of the memory (bytes) that weights,
    gradients and two moments leave."""
    widths = [layer.gate.out_features for layer in model.layers if isinstance(layer, GSSLayer)]
    lasting = 4 * 4 * sum(parameter.numel() for parameter in model.parameters())
    return 4 * 2 * 2 * tokens * sum(widths) <= memory - lasting


def shard(model: LanguageModel, world: World) -> None:
    """Shard parameters over all processes with FSDP2, in place; they become DTensors, still fp32.

    No mixed-precision policy: under autocast dense layers compute in bf16 anyway, while state-space parameters must
    reach their layers in fp32.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("hidden", "logits"):  # entered from outside, not through forward
        register_fsdp_forward_method(model, method)


def reshard(model: nn.Module) -> None:
    """Reshard parameters that a forward pass without a backward pass left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within the context every process has all parameters: decoding uses them outside of any forward."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(module is not model, recurse=False)  # FSDP2's own default
            module.reshard()


@contextlib.contextmanager
def gradients_synced(module: nn.Module, model: nn.Module, last_rows: bool, last_piece: bool) -> Iterator[None]:
    """Synchronize gradients only in the last backward pass of a step; before that they accumulate locally."""
    last = last_rows and last_piece
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    with contextlib.nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync():
        yield


def whole(tensor: Tensor, world: World) -> Tensor | None:
    """A parameter or optimizer tensor in full on the leader's CPU; None elsewhere. Every process must call it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu() if world.leads else None


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """A full tensor laid out like a parameter: on its device, and in its shards. Needs no communication."""
    full = full.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
