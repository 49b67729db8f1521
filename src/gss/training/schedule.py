"""Learning-rate schedules. To add one, write a function and name it in `SCHEDULES`. Imports no torch."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gss.training.config import OptimizerConfig


def cosine(config: "OptimizerConfig", step: int, steps: int) -> float:
    """A cosine that reaches the final rate at the last step."""
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    span = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def inverse_sqrt(config: "OptimizerConfig", step: int, steps: int) -> float:
    """Proportional to 1/√step, with the final rate as its floor."""
    decayed = config.learning_rate * math.sqrt(max(1, config.warmup_steps) / (step + 1))
    return max(config.final_learning_rate, decayed)


SCHEDULES: dict[str, Callable[["OptimizerConfig", int, int], float]] = {"cosine": cosine, "inverse_sqrt": inverse_sqrt}
"""By name: the rate after the warm-up, given the config, the step (counted from 0) and the number of steps."""


def learning_rate(config: "OptimizerConfig", step: int, steps: int) -> float:
    """The scheduled rate of a step (counted from 0): linear warm-up to the base rate, then the schedule."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return SCHEDULES[config.schedule](config, step, steps)
