"""Schedules: the learning rate by step. A new one is a function here, named in `SCHEDULES`; imports no torch."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gss.training.config import OptimizerConfig


def cosine(config: "OptimizerConfig", step: int, steps: int) -> float:
    """A cosine to the final rate at the last step."""
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    span = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def inverse_sqrt(config: "OptimizerConfig", step: int, steps: int) -> float:
    """As 1/√step, never under the final rate."""
    decayed = config.learning_rate * math.sqrt(max(1, config.warmup_steps) / (step + 1))
    return max(config.final_learning_rate, decayed)


SCHEDULES: dict[str, Callable[["OptimizerConfig", int, int], float]] = {"cosine": cosine, "inverse_sqrt": inverse_sqrt}
"""By name: the rate of a step after the warm-up, from the config, the step (counted from 0) and the number of steps."""


def learning_rate(config: "OptimizerConfig", step: int, steps: int) -> float:
    """The scheduled rate of a step (counted from 0): linear warm-up to the base rate, then down to the final one."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return SCHEDULES[config.schedule](config, step, steps)
