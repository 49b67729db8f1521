"""Sources: from what the user names (paths or a recipe) to the pieces that will be read, in a fixed order.

Looks at names and sizes only; contents are read later by `readers`, piece by piece. Knows nothing of tokens.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gss.data.blocks import BLOCK, block_count
from gss.data.readers import COMPRESSIONS, Piece

SPLITS = ("train", "valid", "test")
SPLIT_RULES = ("auto", "own", "hash")
PIECE_BYTES = 1 << 24  # a longer plain file is read in pieces of this size, so that several processes share it

_SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_LEADING_NAME = re.compile(r"^([a-z]+)(?=[-_.0-9]|$)")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How a source is read. `local` is where a recipe finds its corpus; None: on the hub."""

    local: str | None = None
    suffixes: tuple[str, ...] = ()  # further endings of plain text files
    field: str = "text"
    splits: str = "auto"
    hub_name: str | None = None
    hub_revision: str | None = None
    piece_bytes: int = PIECE_BYTES

    def __post_init__(self) -> None:
        if self.splits not in SPLIT_RULES:
            raise ValueError(f"splits are one of {', '.join(SPLIT_RULES)}, not {self.splits!r}")
        if self.piece_bytes < 1:
            raise ValueError(f"a piece has at least 1 byte, not {self.piece_bytes}")


def find_pieces(sources: Sequence[str], options: SourceOptions) -> list[Piece]:
    """Every piece of the named sources, in an order that depends on names alone."""
    from gss.data.recipes import RECIPES

    if not sources:
        raise ValueError(f"name a source: a file, a folder, or one of {', '.join(RECIPES)}")
    recipes = [source for source in sources if source in RECIPES]
    if recipes:
        if len(sources) > 1:
            raise ValueError(f"the recipe {recipes[0]!r} stands alone: prepare the other sources into another folder")
        return RECIPES[recipes[0]](options)
    if options.local is not None:
        raise ValueError(f"--from belongs to a recipe ({', '.join(RECIPES)}); name paths as sources themselves")
    files = [found for source in sources for found in _files(Path(source), options)]
    return pieces_of_files(files, options, rule=options.splits)


def pieces_of_files(files: list[tuple[Path, str]], options: SourceOptions, rule: str) -> list[Piece]:
    """Pieces of (path, name) files; under rule `auto` the names' own splits count if every file has one."""
    splits = [split_of_name(name) for _, name in files]
    if rule == "own" and None in splits:
        name = files[splits.index(None)][1]
        raise ValueError(
            f"{name} is in no split: with --splits own every file lies in a folder train, valid or test, or its "
            "name begins so; use --splits hash"
        )
    own = rule == "own" or (rule == "auto" and None not in splits)
    pieces: list[Piece] = []
    for (path, name), split in zip(files, splits, strict=True):
        pieces += file_pieces(path, name, split if own else None, options)
    return pieces


def split_of_name(name: str) -> str | None:
    """The split that a file's folder or own name tells."""
    parts = [part.lower() for part in name.split("/")]
    for folder in parts[:-1]:
        if folder in _SPLIT_NAMES:
            return _SPLIT_NAMES[folder]
    leading = _LEADING_NAME.match(parts[-1])
    return _SPLIT_NAMES.get(leading.group(1)) if leading else None


def file_kind(name: str, suffixes: tuple[str, ...]) -> str | None:
    """How a file is read, by the ending of its name; None for one that is not text to us."""
    plain = name.lower()
    compressed = plain.endswith(COMPRESSIONS)
    if compressed:
        plain = plain.rsplit(".", 1)[0]
    if plain.endswith((".txt", *map(str.lower, suffixes))):
        return "text"
    if plain.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if plain.endswith(".parquet") and not compressed:
        return "parquet"
    return None


def _files(source: Path, options: SourceOptions) -> Iterator[tuple[Path, str]]:
    if source.is_file():
        if file_kind(source.name, options.suffixes) is None:
            raise ValueError(
                f"{source} ends in none of .txt, .jsonl, .parquet (plain, .gz, .xz, .zst): "
                f"if it is text, add --suffix {source.suffix or source.name}"
            )
        yield source, source.name
        return
    if not source.is_dir():
        from gss.data.recipes import RECIPES

        raise ValueError(f"no source {source}: neither a file, a folder nor one of {', '.join(RECIPES)}")
    found = list(walk_files(source, options.suffixes))
    if not found:
        raise ValueError(
            f"{source} holds no .txt, .jsonl or .parquet file (plain, .gz, .xz, .zst); "
            "name other endings of text files with --suffix"
        )
    yield from found


def walk_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """The readable files under a folder, sorted by path, named from the folder's own name on."""
    base = folder.resolve().name
    for directory, names, files in os.walk(folder):
        names.sort()
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and file_kind(name, suffixes) and path.is_file():
                yield path, f"{base}/{path.relative_to(folder).as_posix()}"


def file_pieces(path: Path, name: str, split: str | None, options: SourceOptions) -> Iterator[Piece]:
    """The pieces of one file: a plain one is shared out by its bytes, a compressed one is read at a stretch."""
    kind = file_kind(name, options.suffixes)
    assert kind is not None
    if kind == "parquet":
        yield from parquet_pieces(path, name, split, options.field)
    else:
        yield from stretches(kind, path, name, split, options)


def stretches(kind: str, path: Path, name: str, split: str | None, options: SourceOptions) -> Iterator[Piece]:
    """A text's blocks, or the bytes of a file of lines, in pieces of about `piece_bytes`."""
    status = path.stat()
    size, stamp = status.st_size, status.st_mtime_ns
    if size <= options.piece_bytes or name.lower().endswith(COMPRESSIONS):
        yield Piece(kind, str(path), name, size, split, field=options.field, stamp=stamp)
        return
    unit = BLOCK if kind == "text" else 1
    total = block_count(size) if kind == "text" else size
    step = max(1, options.piece_bytes // unit)
    for start in range(0, total, step):
        stop = start + step if start + step < total else None
        piece_size = min((start + step) * unit, size) - start * unit
        yield Piece(kind, str(path), name, piece_size, split, start, stop, options.field, stamp)


def parquet_pieces(path: Path, name: str, split: str | None, column: str) -> Iterator[Piece]:
    """A piece for each row group of a parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs the extra 'formats': pip install 'gss-lm[formats]'") from error
    status = path.stat()
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError):
        yield Piece("unreadable", str(path), name, status.st_size, split, stamp=status.st_mtime_ns)
        return
    columns = metadata.schema.to_arrow_schema().names
    if column not in columns:
        raise ValueError(f"{path} has no column {column!r} but {', '.join(columns)}: name one with --field")
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).total_byte_size
        yield Piece("parquet", str(path), name, size, split, group, group + 1, column, status.st_mtime_ns)
