"""The run folder as training writes it: configuration, metrics and samples (`gss.io.runs` reads it).

The files are readable without this library. Only the leading process writes them.
"""

import json
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

import gss
from gss.config import to_mapping
from gss.data import Dataset
from gss.data.shards import MANIFEST
from gss.io import checkpoint
from gss.io.files import explained_full_disk, lock, read_json, write_file, write_json
from gss.io.runs import read_metrics
from gss.training.config import TrainConfig


class RunFolder:
    """The paths of a run, and what is written beside its checkpoints."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Create or lock the folder; refuse one that is not a run folder or in which another process is training.

        Leftovers of an interrupted save are deleted.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: give a folder for the run")
        ours = ("lock", "data.json")  # a model of another library has a config.json, too, which must not be replaced
        if self.path.is_dir() and any(self.path.iterdir()) and not any((self.path / name).exists() for name in ours):
            raise ValueError(f"{self.path} is not empty and is not a run folder: give another --out")
        for written in (self.path / "lock", self.metrics):
            # In a folder from elsewhere, a link could have us write anywhere.
            if written.is_symlink() or (written.exists() and not written.is_file()):
                raise ValueError(f"{written} is a link or not a file, and training would write to it: delete it")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        try:
            lock(self._lock)
        except OSError:
            self.close()
            raise ValueError(f"another process is training in {self.path}: wait, or give another --out") from None
        checkpoint.clean(self.checkpoints)

    def close(self) -> None:
        """Release the folder for other processes, and delete it if nothing was written to it, as after a refusal."""
        if self._lock is not None:
            with suppress(OSError):
                if [path.name for path in self.path.iterdir()] == ["lock"]:
                    (self.path / "lock").unlink()  # while it is held: whoever waits for it is refused
                    self.path.rmdir()
            self._lock.close()
            self._lock = None

    def describe(self, config: TrainConfig, dataset: Dataset, world_size: int, device: torch.device) -> None:
        """Write the configuration, the data and the vocabulary, and append this start to the list of environments."""
        write_json(self.path / "config.json", to_mapping(config))
        write_json(self.path / "data.json", data_facts(dataset))
        dataset.tokenizer().save(self.path / "tokenizer")
        path = self.path / "environment.json"
        try:
            starts = read_json(path, list)
        except (OSError, ValueError):  # an unreadable list is started over
            starts = []
        environment = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "gss": gss.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processes": world_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
        }
        write_json(path, [*starts, environment])

    def cut_metrics(self, step: int) -> None:
        """Drop the rows after a step: those steps were lost with the process and will be taken again."""
        if self.metrics.exists():
            kept = [row for row in read_metrics(self.metrics) if row["step"] <= step]
            write_file(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def append_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        outcome = "it resumes from the newest checkpoint"
        with explained_full_disk(self.metrics, outcome), self.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def write_sample(self, step: int, text: str) -> None:
        write_file(self.path / "samples" / f"step-{step:08d}.txt", text + "\n")


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """What identifies the data of a run."""
    return {
        "folder": str(dataset.folder.resolve()),
        "hash": dataset.hash,
        "split": dataset.split,
        "tokens": len(dataset.tokens),
        "documents": len(dataset),
        "unigram_entropy": dataset.unigram_entropy,
        "tokenizer": dataset.manifest.tokenizer["hash"],
    }


def data_stamps(dataset: Dataset) -> list[tuple[int, int, int]]:
    """Inode, size and time of the data's files: shows whether they changed, without reading them."""
    names = [MANIFEST, *sorted(dataset.manifest.splits[dataset.split]["files"])]
    found = [path.stat() if path.exists() else None for path in (dataset.folder / name for name in names)]
    return [(file.st_ino, file.st_size, file.st_mtime_ns) if file else (0, 0, 0) for file in found]
