"""Training state to named tensors and back: parameters, optimizer, carried states.

Tensors are whole, however they were sharded, and carried states are ordered by global row, so a snapshot can be loaded
by any number of processes with either strategy. Random states are not saved, because the randomness of a step depends
only on its number. Neither are learning rates, which follow from the configuration and the step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gss.io.checkpoint import LANES, MODEL, OPTIMIZER
from gss.nn.state import ModelState
from gss.training.distributed import like, reshard, whole
from gss.training.step import Stepper

Groups = dict[str, dict[str, Tensor]]
_OTHERWISE = "resume with the settings it was saved with, or start anew from its weights, with --from and another --out"


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
def restore(stepper: Stepper, groups: Mapping[str, Mapping[str, Tensor]], scalars: Mapping[str, Any] | None) -> None:
    """Load a snapshot into a new stepper of the same model, on any number of processes.

    If `scalars` is None, the optimizer starts fresh.
    """
    parameters, saved = dict(stepper.model.named_parameters()), groups[MODEL]
    if odd := sorted(parameters.keys() ^ saved.keys()):
        raise ValueError(f"the checkpoint belongs to another model: {', '.join(odd[:4])} … are in only one of the two")
    for name, parameter in parameters.items():
        if parameter.shape != saved[name].shape:
            raise ValueError(
                f"the checkpoint belongs to another model: {name} has shape {list(saved[name].shape)} there, "
                f"{list(parameter.shape)} here"
            )
    if scalars is not None:
        state = dict(groups.get(OPTIMIZER, {}))
        for name, values in scalars.items():
            state |= {f"{name}:{key}": torch.tensor(value) for key, value in values.items()}
        _restore_optimizer(stepper, parameters, state)
    for name, parameter in parameters.items():
        parameter.copy_(like(saved[name], parameter))
    if stepper.lanes is not None:
        count, lanes = stepper.lanes.batch, groups.get(LANES, {})
        rows, needed = min((len(tensor) for tensor in lanes.values()), default=0), count * stepper.replicas
        if rows < needed:
            raise ValueError(
                f"the checkpoint carries the states of {rows} rows, but this run has {needed}: {_OTHERWISE}"
            )
        own = {name: tensor[count * stepper.replica :][:count] for name, tensor in lanes.items()}
        stepper.lanes = ModelState.from_named(own).to(stepper.world.device)
        stepper.model.check_state(stepper.lanes, count)


def _restore_optimizer(stepper: Stepper, parameters: Mapping[str, Parameter], saved: Mapping[str, Tensor]) -> None:
    """Have the optimizer make its state in a step with zero gradients, and fill it. The step changes the parameters."""
    optimizer = stepper.optimizer
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    made = {
        f"{name}:{key}": (value, parameter)
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
    there = {name: list(tensor.shape) for name, tensor in saved.items()}
    here = {name: list(value.shape) for name, (value, _) in made.items()}
    if odd := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
        raise ValueError(
            f"the checkpoint's optimizer state does not fit this run: {odd[0]} has shape "
            f"{there.get(odd[0], 'none')} there, {here.get(odd[0], 'none')} here; {_OTHERWISE}"
        )
    for name, (value, parameter) in made.items():
        value.copy_(like(saved[name], parameter) if value.ndim else saved[name])
