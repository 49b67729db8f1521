"""Checkpoints on disk: written under a temporary name and renamed, hashed, and verified before use.

    checkpoints/step-00001000/model.safetensors  optimizer.safetensors  [lanes.safetensors]  trainer.json  manifest.json

A folder gets this name only after everything in it has reached the disk. The manifest holds the size and SHA-256 of
every file, and its own hash. Safetensors and JSON only: nothing here can run code from a file.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from gss.io.files import file_facts, read_json, read_whole, remove, sync

MANIFEST, TRAINER = "manifest.json", "trainer.json"
MODEL, OPTIMIZER, LANES = "model", "optimizer", "lanes"
"""Groups of tensors, each a file."""
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = ".aside-"  # prefix of folders that are being written or deleted, which are not checkpoints
_FORMAT = 1


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files differ from what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """Tensors by name, for each group ("model", "optimizer", "lanes")."""
    trainer: dict[str, Any]
    """Plain data."""


def save(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], trainer: Mapping[str, Any]) -> Path:
    """Write a checkpoint and return its path. A failure leaves nothing behind that could be mistaken for one."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    aside = folder / f"{_ASIDE}{final.name}-{os.getpid()}"
    try:
        remove(aside)
        aside.mkdir()
        for group, members in tensors.items():
            whole = {name: tensor.detach().contiguous() for name, tensor in members.items()}
            safetensors.torch.save_file(whole, aside / f"{group}.safetensors")
        (aside / TRAINER).write_bytes(_json(trainer))
        files = {path.name: file_facts(path) for path in sorted(aside.iterdir())}
        (aside / MANIFEST).write_bytes(_manifest(step, files))
        usual = (aside / TRAINER).stat().st_mode
        for path in aside.iterdir():
            path.chmod(usual)  # safetensors makes files that nobody else may read
            sync(path)
        sync(aside)
        if final.exists():  # damaged, or of a run that was set back to an earlier step
            _retire(final)
        aside.rename(final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            remove(aside)
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"could not write the checkpoint of step {step}: {error}. Earlier checkpoints are untouched. Free some "
            f"space ({shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}) and run the same command again to "
            "resume from the newest",
        ) from error
    return final


def verify(path: Path, groups: Collection[str] | None = None) -> dict[str, Any]:
    """The manifest of an intact checkpoint; DamagedCheckpointError if any file differs from what was written.

    With `groups`, the contents of other groups, which may be many times as large, are not read.
    """
    manifest = _read_manifest(path)
    found = {entry.name for entry in path.iterdir()} - {MANIFEST}
    wrong = [f"{name} is missing" for name in manifest["files"].keys() - found]
    wrong += [f"{name} does not belong there" for name in found - manifest["files"].keys()]
    for name in sorted(manifest["files"].keys() & found):
        expected = manifest["files"][name]
        try:
            size = (path / name).stat().st_size
            if not (path / name).is_file():
                wrong.append(f"{name} is not a file")
            elif size != expected["size"]:
                wrong.append(f"{name} has {size} bytes instead of {expected['size']}")
            elif _wanted(name, groups) and file_facts(path / name)["sha256"] != expected["sha256"]:
                wrong.append(f"{name} has other contents than were written")
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
    if wrong:
        raise DamagedCheckpointError(f"the checkpoint {path} is damaged: {'; '.join(wrong)}")
    return manifest


def load(path: Path, groups: Collection[str] | None = None, *, verified: bool = False) -> Checkpoint:
    """A checkpoint, or some of its groups, on the CPU; verified first unless it has been already."""
    manifest = _read_manifest(path) if verified else verify(path, groups)
    try:
        tensors = {
            name.removesuffix(".safetensors"): safetensors.torch.load_file(path / name)
            for name in manifest["files"]
            if name.endswith(".safetensors") and _wanted(name, groups)
        }
        trainer = read_json(path / TRAINER)
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpointError(f"the checkpoint {path} is damaged: {error}") from None
    return Checkpoint(path, manifest["step"], tensors, trainer)


def _wanted(name: str, groups: Collection[str] | None) -> bool:
    return groups is None or not name.endswith(".safetensors") or name.removesuffix(".safetensors") in groups


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first, whatever their condition."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest_good(folder: Path, groups: Collection[str] | None = None) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint (see `verify`), and what is wrong with each newer one."""
    damaged = []
    for path in reversed(checkpoints(folder)):
        try:
            verify(path, groups)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
        else:
            return path, damaged
    return None, damaged


def retain(folder: Path, newest: int, keep_last: int, keep_every: int | None) -> None:
    """Of the checkpoints up to step `newest`, delete all but the last few and those at multiples of `keep_every` steps.

    Later ones are damaged, or of a run that was set back; they are ignored here and will be overwritten.
    """
    for path in [path for path in checkpoints(folder) if step_of(path) <= newest][:-keep_last]:
        if keep_every is None or step_of(path) % keep_every:
            _retire(path)


def clean(folder: Path) -> None:
    """Delete the leftovers of an interrupted save or deletion. Only for the one process that writes there."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(_ASIDE):
                remove(path)


def step_of(path: Path) -> int:
    """The number of steps taken, from a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint (step-00001000)")
    return int(match[1])


def _retire(path: Path) -> None:
    """Delete a checkpoint without ever leaving it half-deleted under its name."""
    aside = path.with_name(f"{_ASIDE}{path.name}-{os.getpid()}-old")
    remove(aside)
    path.rename(aside)
    remove(aside)


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


def _manifest(step: int, files: Mapping[str, Any]) -> bytes:
    body = {"format": _FORMAT, "step": step, "files": files}
    return _json({**body, "sha256": hashlib.sha256(_json(body)).hexdigest()})


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        written = read_whole(path / MANIFEST)
        manifest: dict[str, Any] = json.loads(written)
        # Rewriting what was read must give the same bytes, so that no change goes unnoticed.
        intact = written == _manifest(manifest["step"], manifest["files"]) and manifest["step"] == step_of(path)
        intact &= all({"size", "sha256"} <= facts.keys() for facts in manifest["files"].values())
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"the checkpoint {path} is damaged: no {MANIFEST} can be read ({error})") from None
    if not intact:
        raise DamagedCheckpointError(f"the checkpoint {path} is damaged: its {MANIFEST} was altered")
    return manifest
