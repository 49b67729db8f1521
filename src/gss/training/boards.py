"""TensorBoard and Weights & Biases as further places for a run's metrics: extras, imported only when enabled."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from gss.config import to_mapping
from gss.training.config import TrainConfig


class Board(NamedTuple):
    """Receives the metrics of each step by name, until it is closed."""

    add: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_boards(config: TrainConfig, folder: Path) -> list[Board]:
    """The boards that a run's settings enable."""
    wanted = {"tensorboard": (config.report.tensorboard, _tensorboard), "wandb": (config.report.wandb, _wandb)}
    boards = []
    for name, (asked, opened) in wanted.items():
        try:
            boards += [opened(config, folder)] if asked else []
        except ImportError:
            raise ValueError(
                f"report.{name} needs the {name} package: pip install 'gss-lm[{name}]', or turn it off"
            ) from None
    return boards


def _tensorboard(config: TrainConfig, folder: Path) -> Board:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def add(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Board(add, writer.close)


def _wandb(config: TrainConfig, folder: Path) -> Board:
    """One W&B run per run folder, continued when training resumes. Account and server are wandb's own settings."""
    import wandb

    run = wandb.init(
        project="gss",
        name=folder.name,
        id=hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest(),
        resume="allow",
        dir=str(folder),
        config=to_mapping(config),
    )
    return Board(lambda step, values: run.log(dict(values), step=step), run.finish)
