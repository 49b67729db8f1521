"""Sources: from what the user names (paths, or a recipe) to the spans that will be read, in a fixed order.

Recipes are the corpora of the paper by their names, and the standard library of this Python. `pg19` and `lm1b`
come from a local copy in their published formats or from the hub; `arxiv` and `github` from a local folder, as neither
was ever released. Looks at names and sizes only; contents are read later by `formats`. Knows nothing of tokens.
"""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from gss.data.chunks import CHUNK, chunk_count
from gss.data.formats import COMPRESSIONS, Span
from gss.data.latex import ARCHIVES

SPLIT_RULES = ("auto", "own", "hash")

_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    "test": "test",
}
_LEADING_NAME = re.compile(r"^([a-z]+)(?=[-_.0-9]|$)")

# Where the hub keeps each corpus as plain tables (a loading script would be code that we won't run), and their splits.
# LM1B has one held-out set; training watches it, so that it is `valid` here.
_HUB = {
    "pg19": ("emozilla/pg19", None, {"train": "train", "validation": "valid", "test": "test"}),
    "lm1b": ("billion-word-benchmark/lm1b", "refs/convert/parquet", {"train": "train", "test": "valid"}),
}
_LM1B_TEXT = "monolingual.tokenized.shuffled"
_LM1B_FOLDERS = {f"training-{_LM1B_TEXT}": "train", f"heldout-{_LM1B_TEXT}": "valid"}
_LM1B_FILE = re.compile(r"^news\.en(\.heldout)?-\d{5}-of-\d{5}$")
_NOT_PACKAGES = ("test", "site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How a source is read. `local` is where a recipe finds its corpus; None: on the hub."""

    local: str | None = None
    suffixes: tuple[str, ...] = ()  # further endings of plain text files
    field: str = "text"
    splits: str = "auto"
    hub_name: str | None = None
    hub_revision: str | None = None
    span_bytes: int = 1 << 24  # a longer plain file is read in spans of this size, so that several processes share it

    def __post_init__(self) -> None:
        if self.splits not in SPLIT_RULES:
            raise ValueError(f"splits are one of {', '.join(SPLIT_RULES)}, not {self.splits!r}")
        if self.span_bytes < 1:
            raise ValueError(f"a span has at least 1 byte, not {self.span_bytes}")


def find_spans(sources: Sequence[str], options: SourceOptions, held_out: dict[str, float] | None = None) -> list[Span]:
    """Every span of the named sources, in an order that depends on names alone.

    Documents go to the splits whole, but for a corpus of one plain text file: its end is held out, by these shares.
    """
    if not sources:
        raise ValueError(f"name a source: a file, a folder, or one of {', '.join(RECIPES)}")
    recipes = [source for source in sources if source in RECIPES]
    if recipes:
        if len(sources) > 1:
            raise ValueError(f"the recipe {recipes[0]!r} stands alone: prepare the other sources into another folder")
        return RECIPES[recipes[0]](options)
    if options.local is not None:
        raise ValueError(f"--from belongs to a recipe ({', '.join(RECIPES)}); name paths as sources themselves")
    files = [found for source in sources for found in _source_files(Path(source), options)]
    sections = _sections(*files[0], options, held_out or {}) if len(files) == 1 else []
    return sections or _spans_of_files(files, options, rule=options.splits)


def _spans_of_files(files: list[tuple[Path, str]], options: SourceOptions, rule: str) -> list[Span]:
    """Spans of (path, name) files; under rule `auto` the names' own splits count if every file has one."""
    splits = [split_of_name(name) for _, name in files]
    if rule == "own" and None in splits:
        name = files[splits.index(None)][1]
        raise ValueError(
            f"{name} is in no split: with --splits own every file lies in a folder train, valid or test, or its "
            "name begins so; use --splits hash"
        )
    own = rule == "own" or (rule == "auto" and None not in splits)
    spans: list[Span] = []
    for (path, name), split in zip(files, splits, strict=True):
        spans += _file_spans(path, name, split if own else None, options)
    return spans


def _sections(path: Path, name: str, options: SourceOptions, held_out: dict[str, float]) -> list[Span]:
    """A text file as one document for each split, cut at the ends of lines; none where it is not to be cut."""
    has_own = options.splits == "own" or (options.splits == "auto" and split_of_name(name) is not None)
    plain_text = file_kind(name, options.suffixes) == "text" and not name.lower().endswith(COMPRESSIONS)
    held_out = {split: share for split, share in held_out.items() if share}
    if has_own or not plain_text or not held_out:
        return []
    whole = _whole_file("text", path, name, "train", options.field)
    bounds, share = [0], 1.0 - sum(held_out.values())
    with open(path, "rb") as file:
        for part in held_out.values():
            file.seek(int(share * whole.size))
            if not file.readline(1 << 20).endswith(b"\n"):
                return []  # nowhere to cut
            bounds.append(file.tell())
            share += part
    spans: list[Span] = []
    for split, (begin, end) in zip(("train", *held_out), pairwise([*bounds, whole.size]), strict=True):
        if begin < end:
            own = replace(whole, size=end - begin, split=split, begin=begin, length=end - begin)
            own = own if split == "train" else replace(own, name=f"{name}@{split}")
            spans += _ranges(own, options.span_bytes)
    return spans if len({span.split for span in spans}) > 1 else []


def split_of_name(name: str) -> str | None:
    """The split that a file's folder or own name tells."""
    *folders, own = name.lower().split("/")
    for folder in folders:
        if folder in _SPLIT_NAMES:
            return _SPLIT_NAMES[folder]
    leading = _LEADING_NAME.match(own)
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
    return "parquet" if plain.endswith(".parquet") and not compressed else None


def _source_files(source: Path, options: SourceOptions) -> list[tuple[Path, str]]:
    if source.is_file():
        if file_kind(source.name, options.suffixes) is None:
            raise ValueError(
                f"{source} ends in none of .txt, .jsonl, .parquet (plain, .gz, .xz, .zst): "
                f"if it is text, add --suffix {source.suffix or source.name}"
            )
        return [(source, source.name)]
    if not source.is_dir():
        raise ValueError(f"no source {source}: neither a file, a folder nor one of {', '.join(RECIPES)}")
    found = _folder_files(source, options.suffixes)
    if not found:
        raise ValueError(
            f"{source} holds no .txt, .jsonl or .parquet file (plain, .gz, .xz, .zst); "
            "name other endings of text files with --suffix"
        )
    return found


def _folder_files(folder: Path, suffixes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """The readable files under a folder, sorted by path, named from the folder's own name on."""
    base, found = folder.resolve().name, []
    for directory, names, files in os.walk(folder):
        names.sort()
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and file_kind(name, suffixes) and path.is_file():
                found.append((path, f"{base}/{path.relative_to(folder).as_posix()}"))
    return found


def unread_endings(sources: Sequence[str], suffixes: tuple[str, ...]) -> dict[str, int]:
    """How many files in the folders among the sources are not read, by their endings."""
    files = [path for source in sources if source not in RECIPES for path in Path(source).rglob("*") if path.is_file()]
    unread = [path for path in files if not path.name.startswith(".") and not file_kind(path.name, suffixes)]
    return dict(Counter(path.suffix or path.name for path in unread).most_common())


def _file_spans(path: Path, name: str, split: str | None, options: SourceOptions) -> Iterator[Span]:
    kind = file_kind(name, options.suffixes)
    assert kind is not None
    whole = _whole_file(kind, path, name, split, options.field)
    return _row_groups(whole) if kind == "parquet" else _ranges(whole, options.span_bytes)


def _whole_file(kind: str, path: Path, name: str, split: str | None, field: str) -> Span:
    return Span(kind, str(path), name, path.stat().st_size, split, field=field, stamp=path.stat().st_mtime_ns)


def _ranges(whole: Span, span_bytes: int) -> Iterator[Span]:
    """A plain file in ranges of a text's chunks, or of the bytes of lines; a compressed one is read in one go."""
    size = whole.size
    if size <= span_bytes or whole.name.lower().endswith(COMPRESSIONS):
        yield whole
        return
    unit, total = (CHUNK, chunk_count(size)) if whole.kind == "text" else (1, size)
    step = max(1, span_bytes // unit)
    for start in range(0, total, step):
        stop = start + step if start + step < total else None
        yield replace(whole, size=min((start + step) * unit, size) - start * unit, start=start, stop=stop)


def _row_groups(whole: Span) -> Iterator[Span]:
    """A span for each row group of a parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {whole.path} needs the extra 'formats': pip install 'gss-lm[formats]'") from error
    try:
        metadata = pyarrow.parquet.read_metadata(whole.path)
    except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError):
        yield replace(whole, kind="unreadable", field="text")
        return
    columns = metadata.schema.to_arrow_schema().names
    if whole.field not in columns:
        raise ValueError(f"{whole.path} has no column {whole.field!r} but {', '.join(columns)}: name one with --field")
    for group in range(metadata.num_row_groups):
        yield replace(whole, size=metadata.row_group(group).total_byte_size, start=group, stop=group + 1)


def _pg19(options: SourceOptions) -> list[Span]:
    """Folders train, validation, test of `<id>.txt`, or the hub's tables."""
    folder = _local(options)
    if folder is None:
        return _from_hub("pg19", options)
    files = [(path, name) for path, name in _folder_files(folder, options.suffixes) if split_of_name(name)]
    if not files:
        raise ValueError(f"{folder} is not PG-19: it has no folders train, validation, test of .txt files")
    return _spans_of_files(files, options, rule="own")


def _lm1b(options: SourceOptions) -> list[Span]:
    """The published folders of files with a sentence per line, or tables."""
    folder = _local(options)
    if folder is None:
        return _from_hub("lm1b", options)
    spans: list[Span] = []
    for own_name, split in _LM1B_FOLDERS.items():
        for path in sorted(folder.rglob(f"{own_name}/*")):
            if _LM1B_FILE.match(path.name):
                whole = _whole_file("lines", path, f"{own_name}/{path.name}", split, options.field)
                spans += _ranges(whole, options.span_bytes)
    if spans:
        return spans
    for path, name in _folder_files(folder, options.suffixes):
        if split_of_name(name):
            spans += _file_spans(path, name, "train" if split_of_name(name) == "train" else "valid", options)
    if not spans:
        raise ValueError(f"{folder} is not LM1B: it has neither {' nor '.join(_LM1B_FOLDERS)}, nor tables of splits")
    return spans


def _stdlib(options: SourceOptions) -> list[Span]:
    """The top-level packages and modules of this Python's standard library, without its tests."""
    if options.local is not None:
        raise ValueError("the recipe stdlib reads the Python at hand: leave --from out")
    folder = Path(sysconfig.get_path("stdlib"))
    spans = []
    for path in sorted(folder.iterdir()):
        is_source = path.suffix == ".py" if path.is_file() else (path / "__init__.py").is_file()
        if is_source and path.name not in _NOT_PACKAGES and not path.name.startswith("_sysconfigdata"):
            spans.append(_tree_span("package", path, path.stem, None))
    if not spans:
        raise ValueError(f"no Python source under {folder}: this Python ships its standard library without source")
    return spans


RECIPES: dict[str, Callable[[SourceOptions], list[Span]]] = {
    "stdlib": _stdlib,
    "pg19": _pg19,
    "lm1b": _lm1b,
    "arxiv": lambda options: _entries(
        "arxiv", "article", options, lambda p: p.is_dir() or (p.is_file() and p.name.lower().endswith(ARCHIVES))
    ),
    "github": lambda options: _entries("github", "repository", options, Path.is_dir),
}


def _local(options: SourceOptions) -> Path | None:
    if options.local is None:
        return None
    folder = Path(options.local)
    if not folder.is_dir():
        raise ValueError(f"--from {folder}: no such folder")
    return folder


def _entries(recipe: str, kind: str, options: SourceOptions, wanted: Callable[[Path], bool]) -> list[Span]:
    """A folder of articles or repositories, each a document; splits by folders of that name, else by hash."""
    folder = _local(options)
    if folder is None:
        raise ValueError(f"the recipe {recipe} needs a folder of yours: gss prepare {recipe} --from FOLDER")
    entries = sorted(folder.iterdir())
    own = [path for path in entries if path.is_dir() and split_of_name(f"{path.name}/")]
    if own and options.splits != "hash":
        found = [(entry, split_of_name(f"{path.name}/")) for path in own for entry in sorted(path.iterdir())]
    elif options.splits == "own":
        raise ValueError(f"{folder} has no folders train, valid, test: use --splits hash")
    else:
        found = [(entry, None) for entry in entries]
    chosen = [(entry, split) for entry, split in found if not entry.name.startswith(".") and wanted(entry)]
    if not chosen:
        raise ValueError(f"{folder} holds no {kind}")
    return [_tree_span(kind, entry, entry.relative_to(folder).as_posix(), split) for entry, split in chosen]


def _tree_span(kind: str, path: Path, name: str, split: str | None) -> Span:
    """A span for a file, or for a folder with everything in it."""
    found = [path.stat()] if path.is_file() else []  # os.walk gives nothing for a file
    for folder, names, files in os.walk(path):
        names[:] = [name for name in names if name not in (".git", "__pycache__")]
        found += [Path(folder, name).stat() for name in files if Path(folder, name).is_file()]
    stamp = max((status.st_mtime_ns for status in found), default=0)
    return Span(kind, str(path), name, sum(status.st_size for status in found), split, stamp=stamp)


def _from_hub(recipe: str, options: SourceOptions) -> list[Span]:
    """Spans of the tables that the datasets library downloads and caches."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{recipe} from the hub needs the extra 'hub' (pip install 'gss-lm[hub]'); a local copy needs --from"
        ) from error
    name, revision, splits = _HUB[recipe]
    name, revision = options.hub_name or name, options.hub_revision or (None if options.hub_name else revision)
    try:
        tables = datasets.load_dataset(name, revision=revision)
    except Exception as error:  # the library raises its own, the network's and the file system's errors
        raise ValueError(
            f"could not load {name} from the hub ({type(error).__name__}: {error}); "
            f"give a local copy with --from, or another data set with --hub-name"
        ) from error
    spans: list[Span] = []
    for own_name, split in splits.items():
        if own_name not in tables:
            raise ValueError(f"{name} has no split {own_name!r} but {', '.join(tables)}")
        if options.field not in tables[own_name].column_names:
            columns = ", ".join(tables[own_name].column_names)
            raise ValueError(f"{name} has no column {options.field!r} but {columns}: name one with --field")
        for number, cached in enumerate(tables[own_name].cache_files):
            path = Path(cached["filename"])
            whole = _whole_file("arrow", path, f"{own_name}-{number}", split, options.field)
            rows = len(datasets.Dataset.from_file(str(path)))
            step = max(1, rows * options.span_bytes // max(1, whole.size))
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                spans.append(replace(whole, size=whole.size * (stop - start) // rows, start=start, stop=stop))
    return spans
