"""Where else a run's numbers go: TensorBoard, Weights & Biases; each an extra, imported only when asked for."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gss.config import to_mapping
from gss.training.config import TrainConfig


class Board(Protocol):
    """Takes numbers by name."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Those of a step."""

    def close(self) -> None:
        """Nothing more comes."""


def open_boards(config: TrainConfig, folder: Path) -> list[Board]:
    """The boards that a run's settings ask for."""
    wanted = {"tensorboard": config.report.tensorboard, "wandb": config.report.wandb}
    boards: list[Board] = []
    for name in (name for name, asked in wanted.items() if asked):
        try:
            boards.append(_TensorBoard(folder / name) if name == "tensorboard" else _WeightsAndBiases(folder, config))
        except ImportError:
            raise ValueError(
                f"report.{name} needs the {name} package: pip install 'gss-lm[{name}]', or turn it off"
            ) from None
    return boards


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run there for each run folder, which a resumed run goes on with. Who and where is wandb's own to know."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        import wandb

        identity = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        options: dict[str, Any] = {"name": folder.name, "id": identity, "resume": "allow", "dir": str(folder)}
        self._run = wandb.init(project="gss", config=to_mapping(config), **options)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
