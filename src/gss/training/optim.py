"""The optimizers: learning rate and weight decay by parameter group, and gradient clipping.

There are five groups:

    state space    constant rate, no decay: these are exponents, and decay would push time constants towards one token
    undecayed      norm scales and biases: on the schedule, without decay
    decayed        the layers' matrices: on the schedule with decay, at a rate of their own if set; Muon's matrices
    table          several dimensions, but not used in products: on the schedule, with decay
    embedding      also the head: on the schedule at its own multiple of the rate, with decay, as in Flax's lm1b
                   example, the source of the paper's hyperparameters
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gss.nn.state_space import StateSpace
from gss.training.adafactor import Adafactor
from gss.training.config import OptimizerConfig
from gss.training.muon import Muon
from gss.training.schedule import learning_rate

STATE_SPACE, DECAYED, TABLE, UNDECAYED, EMBEDDING = "state_space", "decayed", "table", "undecayed", "embedding"


def group_of_parameters(model: nn.Module) -> dict[str, str]:
    """The group of every parameter, by the parameter's name."""
    owners = {  # by identity: a tied parameter has several names
        id(parameter): group
        for module in model.modules()
        for kind, group in ((StateSpace, STATE_SPACE), (nn.Embedding, EMBEDDING), (nn.Linear, DECAYED))
        if isinstance(module, kind)
        for parameter in module.parameters()
    }
    groups = {}
    for name, parameter in model.named_parameters():
        owner = owners.get(id(parameter), TABLE)
        groups[name] = owner if owner in (STATE_SPACE, EMBEDDING) or parameter.ndim > 1 else UNDECAYED
    return groups


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups in the form of torch's optimizers, each with its name."""
    parameters = dict(model.named_parameters())
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in (DECAYED, TABLE, UNDECAYED, STATE_SPACE, EMBEDDING)}
    for name, group in group_of_parameters(model).items():
        if parameters[name].requires_grad:
            groups[group].append(parameters[name])
    # Decay is multiplied by the rate: dividing it by the factor gives the same decay per step as elsewhere.
    decay = dict.fromkeys((DECAYED, TABLE), config.weight_decay)
    decay[EMBEDDING] = config.weight_decay / config.embedding_factor
    return [
        {
            "params": members,
            "name": name,
            "lr": _rate(name, config, config.learning_rate),
            "weight_decay": decay.get(name, 0.0),
        }
        for name, members in groups.items()
        if members
    ]


def _rate(group: str, config: OptimizerConfig, scheduled: float) -> float:
    """A group's rate when the schedule is at `scheduled`."""
    if group == STATE_SPACE:
        return config.state_space_learning_rate
    if group == DECAYED and config.matrix_learning_rate is not None:
        return scheduled * config.matrix_learning_rate / config.learning_rate
    return scheduled * config.embedding_factor if group == EMBEDDING else scheduled


Groups = list[dict[str, Any]]


def _muon(model: nn.Module, groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    groups = [{**group, "orthogonal": group["name"] == DECAYED} for group in groups]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # Not `m.weight`: with LoRA it is computed, not a parameter.
    blocks: dict[Tensor, int] = {p: getattr(m, "blocks", 1) for m in linear for p in m.parameters(recurse=False)}
    return Muon(groups, betas=config.betas, epsilon=config.epsilon, blocks=blocks)


OPTIMIZERS: dict[str, Callable[[nn.Module, Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": lambda model, groups, config: torch.optim.AdamW(
        groups, betas=config.betas, eps=config.epsilon, fused=True
    ),
    "adafactor": lambda model, groups, config: Adafactor(groups, momentum=config.betas[0]),
    "muon": _muon,
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names, over the model's parameters in their groups."""
    return OPTIMIZERS[config.name](model, parameter_groups(model, config), config)


def set_learning_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, steps: int) -> float:
    """Give every group its rate for this step; returns the scheduled one."""
    scheduled = learning_rate(config, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = _rate(group["name"], config, scheduled)
    return scheduled


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Clip the norm of all gradients together to `most`; returns the norm before clipping, over all shards."""
    kept = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in kept if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(kept, most, norm)
    return norm
