"""Training state to named tensors and back: parameters, optimizer, carried states.

Tensors are whole, however they were sharded, and carried states are ordered by global row, so a snapshot can be loaded
by any number of processes with either strategy. Random states are not saved, because the randomness of a step depends
only on its number. Neither are learning rates, which follow from the configuration and the step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gss.io.checkpoint import LANES, MODEL, OPTIMIZER
from gss.nn.state import ModelState
from gss.training.distributed import like, reshard, whole
from gss.training.step import Stepper

Groups = dict[str, dict[str, Tensor]]


def take(stepper: Stepper) -> tuple[Groups, dict[str, dict[str, float]]]:
    """Groups of tensors, and the optimizer's scalars by parameter, on the leader; empty on other processes.

    Every process must call it, since shards are gathered, one tensor at a time.
    """
    reshard(stepper.model)
    groups: dict[str, dict[str, Tensor | None]] = {MODEL: {}, OPTIMIZER: {}}
    scalars: dict[str, dict[str, float]] = {}
    for name, parameter in stepper.model.named_parameters():
        groups[MODEL][name] = whole(parameter, stepper.world)
        for key, value in sorted(stepper.optimizer.state[parameter].items()):
            if isinstance(value, Tensor) and value.ndim:
                groups[OPTIMIZER][f"{name}:{key}"] = whole(value, stepper.world)
            elif stepper.world.leads:
                scalars.setdefault(name, {})[key] = float(value)
    if stepper.lanes is not None:
        lanes, sharing = stepper.lanes.named(), stepper.config.parallel.context
        groups[LANES] = {name: stepper.world.gather_rows(tensor, sharing) for name, tensor in lanes.items()}
    return {group: {k: v for k, v in tensors.items() if v is not None} for group, tensors in groups.items()}, scalars


@torch.no_grad()
def restore(stepper: Stepper, groups: Mapping[str, Mapping[str, Tensor]], scalars: Mapping[str, Any]) -> None:
    """Load a snapshot into a new stepper of the same model, on any number of processes."""
    parameters, saved = dict(stepper.model.named_parameters()), groups[MODEL]
    if odd := sorted(parameters.keys() ^ saved.keys()):
        raise ValueError(f"the checkpoint belongs to another model: {', '.join(odd[:4])} … are in only one of the two")
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in groups[OPTIMIZER].items():
        owner, _, key = name.rpartition(":")
        state.setdefault(owner, {})[key] = tensor
    for name, parameter in parameters.items():
        if parameter.shape != saved[name].shape:
            raise ValueError(
                f"the checkpoint belongs to another model: {name} has shape {list(saved[name].shape)} there, "
                f"{list(parameter.shape)} here"
            )
        parameter.copy_(like(saved[name], parameter))
        own: dict[str, Any] = {key: like(tensor, parameter) for key, tensor in state.get(name, {}).items()}
        for key, value in scalars.get(name, {}).items():
            own[key] = torch.tensor(value, device=parameter.device)  # float32, as torch's optimizers count steps
        stepper.optimizer.state[parameter] = own
    if stepper.lanes is not None:
        if LANES not in groups:
            raise ValueError("the checkpoint has no carried states: it was not trained with lanes")
        count = stepper.lanes.batch
        rows = {name: tensor[count * stepper.replica :][:count] for name, tensor in groups[LANES].items()}
        stepper.lanes = ModelState.from_named(rows).to(stepper.world.device)
        stepper.model.check_state(stepper.lanes, count)
