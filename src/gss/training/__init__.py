"""Training: the paper's recipe, resumable bit for bit, from one CPU to many nodes.

config → loop → step (loss, optim, distributed) → snapshot → checkpoint
"""

from typing import TYPE_CHECKING, Any

from gss.training.config import CheckpointConfig, OptimizerConfig, ParallelConfig, ReportConfig, TrainConfig, resolve

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in ("TrainResult", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gss.training import loop  # with torch, which settings do without

    return getattr(loop, name)
