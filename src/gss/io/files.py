"""Atomic files and folders, locks, and strict JSON, on Linux, macOS and Windows. Imports no torch.

Everything is written under a temporary name and renamed once it has reached the disk.
"""

import errno
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

_LARGEST = 1 << 27  # bytes of a file that is read whole: settings, manifests and vocabularies are never near it
_NO_ROOM: tuple[int, ...] = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def write_file(path: str | Path, content: bytes | str) -> None:
    """Write a file completely or not at all, in a folder made if need be; text is UTF-8 with `\\n` line endings."""
    aside = _aside(Path(path))
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.unlink(missing_ok=True)  # an untrusted folder may hold a link of that name, which would be followed
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: str | Path, values: Any) -> None:
    """Write plain data as indented JSON."""
    write_file(path, json.dumps(values, indent=2) + "\n")


def require_name(target: Path) -> None:
    """Refuse the current folder as a target, since nothing can be put in its place."""
    if not target.name:
        raise ValueError(f"{target} cannot be replaced as a whole: name a folder inside it")


def file_to_be(path: str | Path) -> Path:
    """The path of a file that work will end in, before the work: no folder, and inside one, which is made."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{target} is a folder: give a file in it or elsewhere")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


@contextmanager
def written_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed to `target`, new or an empty folder, on success and deleted on failure."""
    require_name(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(target)
    remove(aside)
    aside.mkdir()
    try:
        with explained_full_disk(target, "nothing is left of it"):
            yield aside
            if target.is_dir():
                target.rmdir()  # empty; Windows does not rename onto an existing folder
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def open_synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that has reached the disk once it is closed."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def explained_full_disk(target: Path, outcome: str) -> Iterator[None]:
    """Explain what to do, and what is left of the work, when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise OSError(
            error.errno,
            f"no space left to write {target} ({os.strerror(error.errno)}): free some and run the same command again; "
            f"{outcome}",
        ) from error


def read_whole(path: Path) -> bytes:
    """The contents of a regular file; refused if it is so large that reading it could be an attack."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    if (size := path.stat().st_size) > _LARGEST:
        raise ValueError(f"{path} is too large: {size:,} bytes, where {_LARGEST:,} are allowed")
    return path.read_bytes()


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object (or list) in a file, or an empty one where there is no file."""
    if not path.is_file():
        return kind()
    try:
        values = json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, kind):
        raise ValueError(f"{path} is not a JSON {'object' if kind is dict else kind.__name__}")
    return values


def file_facts(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """A file's size and SHA-256, which is computed unless it is given."""
    if sha256 is None:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": sha256}


def finite(value: Any) -> Any:
    """Plain data for JSON, with null in place of NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def remove(path: Path) -> None:
    """Delete a file, a link (never its target) or a folder with its contents, if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. Windows cannot flush folders."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)  # Windows flushes what is open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(file: IO[Any]) -> None:
    """Lock a file for this process until it is closed; OSError if another process holds it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.aside-{os.getpid()}")
