"""The paper's own scale, which is a matter of many GPUs: every run as a config file and a command that launches it.

When a run's folder holds its last checkpoint, `gss reproduce … --scale paper` with the same --out scores it.
"""

from pathlib import Path

from gss.reproduce.plan import Run, toml

PROCESSES = 8
"""That the written commands ask for; any number that divides the rows of a batch will do."""


def write(run: Run, folder: Path, out: Path) -> None:
    """Write a run's config, and its command to `launch.sh` beside it, once."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file(run, folder).write_text(toml(run), encoding="utf-8")
    script = folder / "launch.sh"
    lines = script.read_text(encoding="utf-8").splitlines() if script.is_file() else ["#!/bin/sh", "set -e"]
    line = shell_line(run, folder, out)
    if line not in lines:
        script.write_text("\n".join([*lines, line]) + "\n", encoding="utf-8")


def config_file(run: Run, folder: Path) -> Path:
    """Where a run's config lies."""
    return folder / f"{run.name}.toml"


def command(run: Run, folder: Path, out: Path, processes: int = PROCESSES) -> list[str]:
    """The arguments after `python -m` that train a run on one machine."""
    return [
        "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "gss", "train",
        "--config", str(config_file(run, folder)), "--data", str(run.corpus.folder), "--out", str(out),
    ]  # fmt: skip


def shell_line(run: Run, folder: Path, out: Path) -> str:
    """The command as one types it."""
    import shlex

    return shlex.join(["torchrun", *command(run, folder, out)[1:]])
