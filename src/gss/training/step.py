"""One optimizer step on a global batch, the same on one process or many, whole, in micro-batches or in pieces.

The loss is the mean over all counted targets of the global batch: the sum of each micro-batch is divided by that one
number, so accumulation, pieces and processes only change the order of additions. With lanes, the state of each row is
carried from step to step, detached from the graph, and reset where a document begins.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gss.data import Batch
from gss.model import LanguageModel
from gss.nn.block_recurrent import RecurrentLayer
from gss.nn.state import ModelState
from gss.pieces import LossModule, Rows, accumulate
from gss.precision import resolved_for_training, running
from gss.training.config import TrainConfig
from gss.training.distributed import World, gradients_synced, prepare_layers, shard
from gss.training.optim import build_optimizer, clip_gradients, set_learning_rates


@dataclass(frozen=True)
class StepResult:
    """The result of a step, as tensors on the device, so that nothing waits for it."""

    loss: Tensor
    """Mean over the global batch's counted targets, before the update."""
    gradient_norm: Tensor
    """Before clipping."""
    learning_rate: float
    targets: Tensor
    """How many targets were counted, over all processes."""


class Stepper:
    """A distributed model, its optimizer, and the carried state of this process's rows.

    Processes that share sequences have the same rows, and each computes the gradients of its own stretch of them.
    """

    def __init__(self, model: LanguageModel, config: TrainConfig, world: World) -> None:
        self.context = world.context(config.parallel.context)
        sharing = config.parallel.context
        self.replica, self.replicas = world.rank // sharing, world.size // sharing
        if (rows := config.batch_tokens // config.longest) % self.replicas:
            each = "processes" if sharing == 1 else f"groups of {sharing} processes"
            raise ValueError(
                f"{rows} rows per step (batch_tokens ÷ length) cannot be divided among {self.replicas} {each}: "
                "change batch_tokens or the number of processes"
            )
        if config.batching == "lanes" and not model.bounded_state:
            raise ValueError(
                "lanes carry the state from step to step, but this model's state grows with everything it has read: "
                "use batching=segments, or a model with attention.chunk set or without attention"
            )
        in_turn = self.context is not None and any(isinstance(layer, RecurrentLayer) for layer in model.layers)
        if in_turn and config.activation_checkpointing:
            raise ValueError(
                "block-recurrent layers with parallel.context do not support activation_checkpointing: "
                "leave it out, or set parallel.context=1"
            )
        self.model, self.config, self.world = model.to(world.device), config, world
        self._compiled_length: int | None = None
        self.precision = resolved_for_training(config.precision, self.model)
        self.lanes: ModelState | None = None
        at_once = config.micro_batch_tokens or config.batch_tokens // self.replicas
        if config.piece_tokens:
            at_once = at_once // config.longest * config.piece_tokens
        prepare_layers(self.model, config, at_once // sharing)
        self._module: nn.Module = LossModule(self.model)
        if world.size > 1 and config.parallel.strategy == "fsdp2":
            shard(self.model, world)
        elif world.size > 1:
            self._module = DistributedDataParallel(self._module, gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        if config.batching == "lanes":
            self.lanes = self.model.initial_state(config.rows // self.replicas).detach()

    def step(self, batch: Batch[Tensor], step: int) -> StepResult:
        """Forward, backward, clip, update: step number `step`, counted from 0."""
        config, world = self.config, self.world
        # Randomness (dropout) depends only on the step's number, so it is the same after a resume.
        torch.manual_seed(((config.seed * 1_000_003 + step) * 65_537 + world.rank) % 2**63)
        if config.compile and self._compiled_length not in (None, batch.tokens.shape[1]):
            torch.compiler.reset()  # compile for the new length: graphs for any length are slower
        self._compiled_length = batch.tokens.shape[1]
        learning_rate = set_learning_rates(self.optimizer, config.optimizer, step, config.steps)
        targets = world.sum((self.context.own(batch.mask) if self.context else batch.mask).sum())
        scale = world.size / targets.clamp(min=1)  # DDP and FSDP2 average over processes, which is undone here
        losses = self._accumulate(batch, scale)
        norm = clip_gradients(self.model.parameters(), config.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = world.sum(torch.stack(losses).sum()) / targets.clamp(min=1)
        return StepResult(loss, norm, learning_rate, targets)

    def _accumulate(self, batch: Batch[Tensor], scale: Tensor) -> list[Tensor]:
        """Backward through every micro-batch; returns their summed losses."""
        losses: list[Tensor] = []
        after: list[ModelState] = []
        config, count, state = self.config, len(batch.tokens), None
        length = batch.tokens.shape[1]
        at_once = (config.micro_batch_tokens or config.batch_tokens) // length
        for first in range(0, count, at_once):
            rows = slice(first, min(first + at_once, count))
            if self.lanes is not None:  # a lane starts fresh where a document begins
                lanes = self.lanes.select(range(rows.start, rows.stop))
                state = lanes.where(batch.starts[rows, 0], self.model.initial_state(lanes.batch))
            starts = batch.starts[rows] if config.batching == "packed" else None
            given = Rows(batch.tokens[rows], batch.targets[rows], batch.mask[rows], starts, self.context)
            pieces = given.split(config.piece_tokens or length)
            synced = partial(gradients_synced, self._module, self.model, rows.stop == count)
            with running(self.model, self.precision):
                loss, kept = accumulate(self._module, self.model, pieces, state, state is not None, scale, synced)
            losses.append(loss)
            if kept is not None:
                after.append(kept)
        if after:
            self.lanes = after[0] if len(after) == 1 else ModelState.join(after)
        return losses
