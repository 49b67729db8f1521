"""Training: the paper's recipe, exact to resume, from one CPU to many nodes.

config → loop → step (loss, optim, distributed) → snapshot → checkpoint
"""

from gss.training.config import CheckpointConfig, OptimizerConfig, ParallelConfig, ReportConfig, TrainConfig, resolve
from gss.training.loop import TrainResult, train

__all__ = [
    "CheckpointConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReportConfig",
    "TrainConfig",
    "TrainResult",
    "resolve",
    "train",
]
