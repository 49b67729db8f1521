"""Sources: from the paths, URLs or recipe that the user names to the spans to read, in a fixed order.

Recipes are the paper's corpora and the standard library of this Python. `pg19` and `lm1b` are read from a copy in their
published formats or from the hub, `arxiv` and `github` from a local folder, because neither was ever released. Only
names and sizes are looked at here; `formats` reads the contents. Independent of tokens.
"""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from gss.data.chunks import CHUNK, Skip, chunk_count
from gss.data.formats import COMPRESSIONS, Span, file_system, is_url, needs_formats, open_file, unreadable_is_skipped
from gss.data.latex import ARCHIVES

SPLIT_RULES = ("auto", "own", "hash")

_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    "test": "test",
}
_LEADING_NAME = re.compile(r"^([a-z]+)(?=[-_.0-9]|$)")

# Plain tables of each corpus on the hub (a loading script would be code that we won't run).
_HUB = {
    "pg19": "hf://datasets/emozilla/pg19",
    "lm1b": "hf://datasets/billion-word-benchmark/lm1b@refs/convert/parquet",
}
_LM1B_FILE = re.compile(
    r"(?:^|/)((training|heldout)-monolingual\.tokenized\.shuffled/news\.en(\.heldout)?-\d{5}-of-\d{5})$"
)
_CUTS = (re.compile(rb"\n"), re.compile(rb" "), re.compile(rb"(?=[\0-\x7f\xc0-\xff])"))  # the last: before a character
_NOT_PACKAGES = ("test", "site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__")
_READ = ".txt, .jsonl, .parquet (plain, .gz, .xz, .zst)"


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How a source is read. `local` is the folder or URL of a recipe's corpus; None: the hub."""

    local: str | None = None
    suffixes: tuple[str, ...] = ()  # further extensions of plain text files
    field: str = "text"
    splits: str = "auto"
    span_bytes: int = 1 << 24  # longer plain files are read in spans of this size, so that several processes share them

    def __post_init__(self) -> None:
        if self.splits not in SPLIT_RULES:
            raise ValueError(f"splits must be one of {', '.join(SPLIT_RULES)}, not {self.splits!r}")
        if self.span_bytes < 1:
            raise ValueError(f"a span has at least 1 byte, not {self.span_bytes}")


def find_spans(sources: Sequence[str], options: SourceOptions, held_out: dict[str, float] | None = None) -> list[Span]:
    """Every span of the named sources, in an order that depends only on names.

    `held_out` are the shares of the held-out splits. They matter here only if the corpus is a single plain text file,
    whose end is held out; otherwise documents go to the splits whole.
    """
    if not sources:
        raise ValueError(f"name a source: a file, a folder, a URL, or one of {', '.join(RECIPES)}")
    recipes = [source for source in sources if source in RECIPES]
    if recipes:
        if len(sources) > 1:
            raise ValueError(f"the recipe {recipes[0]!r} cannot be combined: prepare other sources separately")
        return RECIPES[recipes[0]](options)
    if options.local is not None:
        raise ValueError(f"--from is for recipes ({', '.join(RECIPES)}): give paths as sources")
    files = [file for source in sources for file in _source_files(source, options)]
    sections = _sections(files[0], options, held_out or {}) if len(files) == 1 else []
    return sections or _spans_of_files(files, options, rule=options.splits)


def list_files(source: str, options: SourceOptions) -> list[Span]:
    """The named file, or every file in the named folder, each as a span; empty if there is no such file or folder.

    They are ordered by name, a folder's own files before those of its subfolders. Hidden files and folders are left
    out. A file that is not text has an empty kind.
    """

    def whole(path: str, name: str, size: int, stamp: int) -> Span:
        return Span(file_kind(name, options.suffixes), path, name, size, field=options.field, stamp=stamp)

    if is_url(source):
        found = [whole(*file) for file in _list_url(source)]
    else:
        root = Path(source)
        paths = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
        found = []
        for path in [root] if root.is_file() else filter(Path.is_file, paths):
            inside = path.relative_to(root).as_posix()
            name = root.name if path == root else f"{root.resolve().name}/{inside}"
            found.append(whole(str(path), name, path.stat().st_size, path.stat().st_mtime_ns))

    def place(file: Span) -> list[tuple[bool, str]]:
        *folders, own = file.name.split("/")
        return [*((True, folder) for folder in folders), (False, own)]

    return sorted((file for file in found if "/." not in file.name), key=place)


def _list_url(url: str) -> Iterator[tuple[str, str, int, int]]:
    """The URL, name, size and modification time of each file at a URL."""
    files, root = file_system(url)
    try:
        found = {root: files.info(root)} if files.isfile(root) else files.find(root, detail=True)
    except Exception as error:  # every kind of storage raises errors of its own
        raise ValueError(f"could not list {url} ({type(error).__name__}: {error})") from error
    base = root.rstrip("/").rpartition("/")[2]
    for path, about in found.items():
        name = f"{base}/{path.removeprefix(root).strip('/')}".removesuffix("/")
        times = (about.get(key) for key in ("mtime", "LastModified", "last_modified", "updated", "created"))
        time = next(filter(None, times), 0)
        seconds = time.timestamp() if hasattr(time, "timestamp") else time
        stamp = int(seconds * 1e9) if isinstance(seconds, int | float) else 0
        yield files.unstrip_protocol(path), name, int(about.get("size") or 0), stamp


def _spans_of_files(files: list[Span], options: SourceOptions, rule: str) -> list[Span]:
    """Spans of files; by the rule `auto`, the splits in their names count if every file has one."""
    splits = [split_of_name(file.name) for file in files]
    if rule == "own" and None in splits:
        name = files[splits.index(None)].name
        raise ValueError(f"{name} is in no split: name it or its folder train, valid or test, or use --splits hash")
    own = rule == "own" or (rule == "auto" and None not in splits)
    pairs = zip(files, splits, strict=True)
    return [span for file, split in pairs for span in _file_spans(file, split if own else None, options.span_bytes)]


def _sections(file: Span, options: SourceOptions, held_out: dict[str, float]) -> list[Span]:
    """The spans of a text file cut into one document per split, at ends of lines or else at spaces.

    Empty if the file is not plain text, has a split of its own, or nothing is to be held out.
    """
    has_own = options.splits == "own" or (options.splits == "auto" and split_of_name(file.name) is not None)
    plain_text = file.kind == "text" and not file.name.lower().endswith(COMPRESSIONS)
    held_out = {split: share for split, share in held_out.items() if share}
    if has_own or not plain_text or not held_out:
        return []
    bounds, share = [0], 1.0 - sum(held_out.values())
    with open_file(file.path) as stream:
        for part in held_out.values():
            stream.seek(place := int(share * file.size))
            after = stream.read(1 << 20)
            bounds.append(place + next((found.end() for cut in _CUTS if (found := cut.search(after))), 0))
            share += part
    sections = []
    for split, (begin, end) in zip(("train", *held_out), pairwise([*bounds, file.size]), strict=True):
        name, size = file.name if split == "train" else f"{file.name}@{split}", end - begin
        if size:
            sections.append(replace(file, name=name, size=size, split=split, begin=begin, length=size))
    return [span for section in sections for span in _ranges(section, options.span_bytes)] if len(sections) > 1 else []


def split_of_name(name: str) -> str | None:
    """The split that is named by a file's folder or by the file itself."""
    *folders, own = name.lower().split("/")
    for folder in folders:
        if folder in _SPLIT_NAMES:
            return _SPLIT_NAMES[folder]
    leading = _LEADING_NAME.match(own)
    return _SPLIT_NAMES.get(leading.group(1)) if leading else None


def file_kind(name: str, suffixes: tuple[str, ...]) -> str:
    """How a file is read, by its extension; empty if it is not text."""
    plain = name.lower()
    compressed = plain.endswith(COMPRESSIONS)
    if compressed:
        plain = plain.rsplit(".", 1)[0]
    if plain.endswith((".txt", *map(str.lower, suffixes))):
        return "text"
    if plain.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    return "parquet" if plain.endswith(".parquet") and not compressed else ""


def _source_files(source: str, options: SourceOptions) -> list[Span]:
    found = list_files(source, options)
    if readable := [file for file in found if file.kind]:
        return readable
    if len(found) == 1 and "/" not in found[0].name:
        raise ValueError(f"{source} is not one of {_READ}: if it is text, add --suffix {Path(source).suffix or source}")
    if not found and not is_url(source) and not Path(source).is_dir():
        raise ValueError(f"no source {source}: it is not a file, a folder or one of {', '.join(RECIPES)}")
    raise ValueError(f"{source} has no {_READ} file; name other text file extensions with --suffix")


def unread_endings(sources: Sequence[str], options: SourceOptions) -> dict[str, int]:
    """The number of files in the sources that are not read, by extension."""
    files = [file for source in sources if source not in RECIPES for file in list_files(source, options)]
    unread = [Path(file.name) for file in files if not file.kind]
    return dict(Counter(path.suffix or path.name for path in unread).most_common())


def _file_spans(file: Span, split: str | None, span_bytes: int) -> Iterator[Span]:
    return (_row_groups if file.kind == "parquet" else _ranges)(replace(file, split=split), span_bytes)


def _ranges(whole: Span, span_bytes: int) -> Iterator[Span]:
    """A plain file in ranges, of chunks for a text and of bytes for lines; a compressed file is a single span."""
    size = whole.size
    if size <= span_bytes or whole.name.lower().endswith(COMPRESSIONS):
        yield whole
        return
    unit, total = (CHUNK, chunk_count(size)) if whole.kind == "text" else (1, size)
    step = max(1, span_bytes // unit)
    for start in range(0, total, step):
        stop = start + step if start + step < total else None
        yield replace(whole, size=min((start + step) * unit, size) - start * unit, start=start, stop=stop)


def _row_groups(whole: Span, span_bytes: int) -> Iterator[Span]:
    """A span per row group of a parquet file."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise needs_formats(whole.path) from error
    try:
        with unreadable_is_skipped(), open_file(whole.path) as stored:
            metadata = pyarrow.parquet.read_metadata(stored)
    except Skip:
        yield whole  # the error is reported when it is read
        return
    columns = metadata.schema.to_arrow_schema().names
    if whole.field not in columns:
        raise ValueError(f"{whole.path} has no column {whole.field!r}, only {', '.join(columns)}: choose with --field")
    for group in range(metadata.num_row_groups):
        yield replace(whole, size=metadata.row_group(group).total_byte_size, start=group, stop=group + 1)


def _published(recipe: str, options: SourceOptions) -> list[Span]:
    """The files of a published corpus, on the hub or in the copy that the user names."""
    try:
        found = list_files(options.local or _HUB[recipe], options)
    except ValueError as error:
        raise ValueError(f"{error}; give a local copy with --from, or the URL of another") from error
    if options.local and not found:
        raise ValueError(f"--from {options.local}: no such folder, or nothing in it")
    return found


def _pg19(options: SourceOptions) -> list[Span]:
    """Folders train, validation, test of `<id>.txt`, or tables."""
    files = [file for file in _published("pg19", options) if file.kind and split_of_name(file.name)]
    if not files:
        raise ValueError(f"{options.local} is not PG-19: it has no folders train, validation, test of .txt files")
    return _spans_of_files(files, options, rule="own")


def _lm1b(options: SourceOptions) -> list[Span]:
    """The published folders of files with a sentence per line, or tables. The only held-out set becomes `valid`."""
    files = _published("lm1b", options)
    found = [(match, file) for file in files if (match := _LM1B_FILE.search(file.name))]
    lines = [(match[2] == "heldout", replace(file, kind="lines", name=match[1])) for match, file in found]
    tables = [(own != "train", file) for file in files if file.kind and (own := split_of_name(file.name))]
    chosen = sorted(lines, key=itemgetter(0)) or tables
    if not chosen:
        raise ValueError(f"{options.local} is not LM1B: it has neither the published folders nor tables of splits")
    splits = ("train", "valid")
    return [span for held_out, file in chosen for span in _file_spans(file, splits[held_out], options.span_bytes)]


def _stdlib(options: SourceOptions) -> list[Span]:
    """The top-level packages and modules of this Python's standard library, without its tests."""
    if options.local is not None:
        raise ValueError("the recipe stdlib reads the Python that runs gss: leave out --from")
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
    "arxiv": lambda options: _entries("arxiv", "article", options, ARCHIVES),
    "github": lambda options: _entries("github", "repository", options),
}


def _entries(recipe: str, kind: str, options: SourceOptions, archives: tuple[str, ...] = ()) -> list[Span]:
    """A folder of articles or repositories, each a document; splits by the names of subfolders, else by hash."""
    if options.local is None:
        raise ValueError(f"the recipe {recipe} needs your own folder: gss prepare {recipe} --from FOLDER")
    folder = Path(options.local)
    if not folder.is_dir():
        raise ValueError(f"--from {folder}: no such folder")
    entries = sorted(folder.iterdir())
    own = [path for path in entries if path.is_dir() and split_of_name(f"{path.name}/")]
    if own and options.splits != "hash":
        found = [(entry, split_of_name(f"{path.name}/")) for path in own for entry in sorted(path.iterdir())]
    elif options.splits == "own":
        raise ValueError(f"{folder} has no folders train, valid, test: use --splits hash")
    else:
        found = [(entry, None) for entry in entries]
    spans = [
        _tree_span(kind, entry, entry.relative_to(folder).as_posix(), split)
        for entry, split in found
        if not entry.name.startswith(".")
        and (entry.is_dir() or (entry.is_file() and entry.name.lower().endswith(archives)))
    ]
    if not spans:
        raise ValueError(f"{folder} holds no {kind}")
    return spans


def _tree_span(kind: str, path: Path, name: str, split: str | None) -> Span:
    """A span for a file, or for a whole folder."""
    found = [path.stat()] if path.is_file() else []  # for a file, os.walk yields nothing
    for folder, names, files in os.walk(path):
        names[:] = [name for name in names if name not in (".git", "__pycache__")]
        found += [Path(folder, name).stat() for name in files if Path(folder, name).is_file()]
    stamp = max((status.st_mtime_ns for status in found), default=0)
    return Span(kind, str(path), name, sum(status.st_size for status in found), split, stamp=stamp)
