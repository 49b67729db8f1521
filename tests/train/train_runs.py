"""Small runs for the training tests: configs that train in a fraction of a second, and what they leave behind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gss.io.runs import read_metrics
from gss.presets import preset
from gss.training import TrainConfig, resolve, train
from tests.making import SMALL, dotted

FAMILIES = ("gss", "gss-hybrid", "dss", "transformer")


def assignments(**settings: Any) -> list[str]:
    """Settings of a small run as `key=value`; a dot in a key is written as two underscores."""
    values: dict[str, Any] = {
        **SMALL,
        "length": 32,
        "steps": 12,
        "optimizer.warmup_steps": 3,
        "optimizer.learning_rate": 0.01,
        "report.log_every": 1,
        "checkpoint.every": 4,
        **dotted(settings),
    }
    return [f"{key}={_toml(value)}" for key, value in values.items()]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def small_config(family: str = "gss-hybrid", **settings: Any) -> TrainConfig:
    """The config of a small run; the hybrid's chunk is 16, so that a row holds two."""
    if preset(f"{family}-tiny").attention.chunk is not None:
        settings.setdefault("model__attention__chunk", 16)
    return resolve(f"{family}-tiny", None, assignments(**settings), 257)


def window_config(family: str, **settings: Any) -> TrainConfig:
    """Of a Transformer on windows: rows of four windows in lanes, Adafactor."""
    sizes: dict[str, Any] = {"model__attention__window": 8, "model__recurrent__vectors": 4}
    if family.startswith("rec-"):
        sizes["model__pattern"] = '["slide", "recurrent"]'
    if family.startswith("feedback-"):
        sizes |= {"model__depth": 1, "model__recurrent__block": 1, "model__recurrent__blocks": 2}
    return small_config(family, **{**sizes, "batching": "lanes", "optimizer__name": "adafactor", **settings})


def run(config: TrainConfig, data: Path, out: Path, **options: Any) -> list[float]:
    """Train quietly; the losses of all steps of the run so far."""
    train(config, data, out, quiet=True, **options)
    return losses(out)


def losses(out: Path) -> list[float]:
    """The training losses in a run folder, in order; each step once."""
    rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def final_files(out: Path, step: int) -> dict[str, bytes]:
    """The tensors of a checkpoint as the bytes on disk."""
    return {path.name: path.read_bytes() for path in (out / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")}


def command(*arguments: str | Path, processes: int = 1, restarts: int = 0) -> subprocess.Popen[str]:
    """`gss …` as a process of its own, with one thread; under torchrun when there are several."""
    launcher = ["-m", "gss"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        launcher += [f"--max-restarts={restarts}", "-m", "gss"]
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
