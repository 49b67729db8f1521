"""Files of a folder, changed as an attacker or a bad disk would: bytes, JSON values, safetensors headers, links.

Everything is drawn from one `random.Random`, so that a seed and a number name an input.
"""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gss.data import shards
from gss.data.tokenizer import DESCRIPTION, _hash
from gss.io import checkpoint

ODD = [
    *(None, True, False, -1, 0, 1, 2, 7, 255, 256, 257, 65_536, 2**31, 2**32 - 1, 2**63, 10**9, 10**30, 10**400),
    *(0.5, -0.0, 1e-308, 1e308, float("inf"), float("nan"), "", "x", "x" * 100_000, "\ufffd", "\x00", "\ud800"),
    *("../../outside/precious", "/dev/zero", "none", "bytes", "model", [], {}, [[]], [1, 2], {"x": 1}),
]


def mutate(folder: Path, draw: random.Random, outside: Path) -> str:
    """Change one to three things in a folder, and mostly make its hashes true again; says what was done."""
    done = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        files = sorted(path for path in folder.rglob("*") if _plain(path))
        if not files:
            break
        path = draw.choice(files)
        kinds: list[Callable[[Path, random.Random], str]] = [_bytes]
        if path.suffix == ".json" or path.suffix == ".jsonl":
            kinds = [_bytes, _values, _values, _values, _values]
        elif path.suffix == ".safetensors":
            kinds = [_bytes, _header, _header, _header]
        elif path.suffixes[-2:] == [".tar", ".gz"] or path.suffix == ".gz":
            kinds = [_bytes, _archive, _archive, _archive]
        if draw.random() < 0.08:
            done.append(f"{path.relative_to(folder)}: {_place(path, draw, outside)}")
        else:
            done.append(f"{path.relative_to(folder)}: {draw.choice(kinds)(path, draw)}")
    if draw.random() < 0.85:
        _reseal(folder)
    return "; ".join(done)


def _plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24


def _bytes(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    at, size = draw.randrange(len(data) + 1), draw.choice([1, 2, 8, 100, 5000])
    what = draw.choice(["flip", "cut", "insert", "zero", "repeat", "empty", "sparse", "noise"])
    if what == "flip" and data:
        for _ in range(size):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif what == "cut":
        del data[at : at + size if draw.random() < 0.5 else len(data)]
    elif what == "insert":
        data[at:at] = draw.choice([b"\n", b"[" * size, b"\xff" * size, b"{", draw.randbytes(size)])
    elif what == "zero":
        data[at : at + size] = bytes(size)
    elif what == "repeat":
        data[at:at] = data[at : at + size] * draw.choice([1, 50])
    elif what == "empty":
        data.clear()
    elif what == "noise":
        data[at : at + size] = draw.randbytes(size)
    path.write_bytes(data)
    if what == "sparse":
        # Of text, as much as there is gets read.
        os.truncate(path, draw.choice([1 << 20] if path.suffix in (".txt", ".gz", ".jsonl") else [1 << 30, 1 << 40]))
    return what


def _values(path: Path, draw: random.Random) -> str:
    """Change a value, a key or the nesting of a JSON file, or of one row of JSON lines."""
    lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    row = draw.randrange(len(lines)) if lines else 0
    try:
        content = json.loads(lines[row])
    except (ValueError, IndexError, RecursionError):
        return _bytes(path, draw)
    content, what = changed(content, draw)
    text = json.dumps(content)
    if draw.random() < 0.03:
        depth = draw.choice([50, 900, 200_000])
        text = "[" * depth + text + "]" * depth
    lines[row] = text.encode("utf-8", "surrogatepass")
    path.write_bytes(b"\n".join(lines))
    return what


def changed(content: Any, draw: random.Random) -> tuple[Any, str]:
    """Plain data with one thing changed somewhere in it."""
    if draw.random() < 0.05 or not isinstance(content, dict | list) or not content:
        value = draw.choice(ODD)
        return value, f"{value!r:.40}"
    key: Any = draw.choice(list(content)) if isinstance(content, dict) else draw.randrange(len(content))
    if isinstance(content[key], dict | list) and draw.random() < 0.8:
        content[key], what = changed(content[key], draw)
        return content, f"{key!s:.40}.{what}"
    if draw.random() < 0.15:
        del content[key]
        return content, f"{key!s:.40} deleted"
    old = content[key]
    near = [old + 1, old - 1, old * 2, -old] if isinstance(old, int | float) else [old]
    content[key] = draw.choice(ODD + 4 * near)
    return content, f"{key!s:.40} = {content[key]!r:.40}"


def _header(path: Path, draw: random.Random) -> str:
    data = path.read_bytes()
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header, what = changed(json.loads(data[8 : 8 + size]), draw)
    except (struct.error, ValueError):
        return _bytes(path, draw)
    text = json.dumps(header).encode()
    stated = len(text) if draw.random() < 0.9 else draw.choice([0, 1, 2**20, 2**40, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", stated) + text + data[8 + size :])
    return f"header {what}"


def _archive(path: Path, draw: random.Random) -> str:
    """Another member in a tar, or what is inside of the compression changed."""
    try:
        inner = bytearray(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return _bytes(path, draw)
    what = draw.choice(["member", "member", "inside", "bomb", "header"])
    if what == "bomb":
        inner += bytes(1 << 23)
    elif what == "header":
        inner[draw.randrange(min(512, len(inner) or 1)) : 512] = draw.randbytes(8)
    elif what == "inside":
        for _ in range(20):
            if inner:
                inner[draw.randrange(len(inner))] = draw.randrange(256)
    else:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=draw.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])) as tar:
            name = draw.choice(
                ["a.tex", "../../outside/x.tex", "/etc/x.tex", "d/" * 400 + "x.tex", "x" * 5000 + ".tex"]
            )
            member = tarfile.TarInfo(name)
            member.type = draw.choice([tarfile.REGTYPE] * 4 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
            member.linkname = "../../outside/precious"
            text = draw.choice(
                [
                    b"\\documentclass{x}\\begin{document}\\input{a}\\end{document}",
                    b"\\input{" + b" " * 50_000,
                    b"{" * 50_000 + b"\\begin{document}",
                    draw.randbytes(1000),
                    b"%" * 1_000_000,
                ]
            )
            member.size = len(text) if member.type == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(text))
        inner = bytearray(out.getvalue() + bytes(inner))
    path.write_bytes(gzip.compress(bytes(inner), 1))
    return f"archive {what}"


def _place(path: Path, draw: random.Random, outside: Path) -> str:
    """Something else in a file's place, or beside it."""
    what = draw.choice(["missing", "folder", "link", "zero", "loop", "fifo", "lock", "aside"])
    if what in ("lock", "aside"):
        top = path.parent if what == "aside" else next(p for p in path.parents if p.parent.name == "inputs")
        beside = top / ("lock" if what == "lock" else f".{path.name}.aside-{os.getpid()}")
        if not beside.exists() and not beside.is_symlink():
            beside.symlink_to(outside / "precious")
        return what
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what != "missing":
        path.symlink_to({"link": outside / "precious", "zero": Path("/dev/zero"), "loop": path}[what])
    return what


def _reseal(folder: Path) -> None:
    """Make the hashes of vocabularies, corpora and checkpoints true again, as anyone can."""

    def facts(path: Path) -> dict[str, Any]:
        if not _plain(path):
            return {"size": 0, "sha256": ""}
        return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    for path in filter(_plain, sorted(folder.rglob("*.json"))):
        try:
            content = json.loads(path.read_bytes())
            if path.name == DESCRIPTION:
                file = path.parent / content["file"] if content["file"] else None
                data = file.read_bytes() if file and facts(file)["size"] else b""
                content["hash"] = _hash(content["kind"], content["vocab_size"], content["eos_id"], data)
                path.write_text(json.dumps(content))
            elif path.name == shards.MANIFEST and "splits" in content:
                del content["hash"]
                for split in content["splits"].values():
                    split["files"] = {name: facts(folder / name) for name in split["files"]}
                shards.write_manifest(folder, content)
            elif path.name == checkpoint.MANIFEST:
                names = [each for each in sorted(path.parent.iterdir()) if each.name != checkpoint.MANIFEST]
                files = {each.name: facts(each) for each in names} if isinstance(content["files"], dict) else []
                path.write_bytes(checkpoint._manifest(content["step"], files))
        except (KeyError, TypeError, AttributeError, ValueError, OSError, RecursionError):
            continue


def fresh_copy(source: Path, target: Path) -> Path:
    """A folder as it was, in place of what is there."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target, symlinks=True))
