"""The optimizers: which parameter gets which rate and decay, the schedule, and the clipping.

Four groups. State-space parameters have a constant rate and no decay: they sit in exponents, where decay would
push time constants towards one token. Norm scales and biases follow the schedule without decay. Matrices follow
it with decay. So does the embedding, which is the head too (the recipe that the paper's hyper-parameters come from,
Flax's lm1b example, decays it), at its own multiple of the rate.
Knows nothing of data, loops or processes.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gss.nn.state_space import StateSpace
from gss.train.adafactor import Adafactor
from gss.train.config import OptimizerConfig

STATE_SPACE, DECAYED, UNDECAYED, EMBEDDING = "state_space", "decayed", "undecayed", "embedding"


def group_of_parameters(model: nn.Module) -> dict[str, str]:
    """The group of every parameter, by the parameter's name."""
    special = {
        id(parameter): group
        for module in model.modules()
        for kind, group in ((StateSpace, STATE_SPACE), (nn.Embedding, EMBEDDING))
        if isinstance(module, kind)
        for parameter in module.parameters()
    }

    def group(parameter: nn.Parameter) -> str:
        return special.get(id(parameter), DECAYED if parameter.ndim > 1 else UNDECAYED)

    return {name: group(parameter) for name, parameter in model.named_parameters()}


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups as torch optimizers take them, each with its name; rates are those of the first step."""
    parameters = dict(model.named_parameters())
    groups: dict[str, list[nn.Parameter]] = {DECAYED: [], UNDECAYED: [], STATE_SPACE: [], EMBEDDING: []}
    for name, group in group_of_parameters(model).items():
        groups[group].append(parameters[name])
    # Decay is a share of the rate: divided by the factor, what it takes away a step stays what it is elsewhere.
    decay = {DECAYED: config.weight_decay, EMBEDDING: config.weight_decay / config.embedding_factor}
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
    """A group's rate where the schedule is at `scheduled`."""
    if group == STATE_SPACE:
        return config.state_space_learning_rate
    return scheduled * config.embedding_factor if group == EMBEDDING else scheduled


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=config.betas, eps=config.epsilon, fused=True)


def _adafactor(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return Adafactor(groups, momentum=config.betas[0])


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names, over the model's parameters in their groups."""
    return OPTIMIZERS[config.name](parameter_groups(model, config), config)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The scheduled rate of a step (counted from 0): linear warm-up to the base rate, then down to the final one."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "inverse_sqrt":
        decayed = config.learning_rate * math.sqrt(max(1, config.warmup_steps) / (step + 1))
        return max(config.final_learning_rate, decayed)
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    span = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, steps: int) -> float:
    """Give every group its rate for this step; returns the scheduled one."""
    scheduled = learning_rate(config, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = _rate(group["name"], config, scheduled)
    return scheduled


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale all gradients together to a norm of at most `most`; returns the norm they had, over all shards."""
    kept = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in kept if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(kept, most, norm)
    return norm
