"""Recipes: the corpora of the paper by their names, and the standard library of the Python at hand.

`pg19` and `lm1b` come from a local copy in their published formats or from the hub; `arxiv` and `github` from a local
folder, as neither was ever released. Only finds pieces; `readers` reads them.
"""

import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from gss.data.latex import ARCHIVES
from gss.data.readers import Piece
from gss.data.sources import SourceOptions, file_pieces, pieces_of_files, split_of_name, stretches, walk_files

# Where the hub keeps each corpus as plain tables (a loading script would be code that we won't run).
HUB = {"pg19": ("emozilla/pg19", None), "lm1b": ("billion-word-benchmark/lm1b", "refs/convert/parquet")}
# LM1B has one held-out set; training watches it, so that it is `valid` here.
HUB_SPLITS = {
    "pg19": {"train": "train", "validation": "valid", "test": "test"},
    "lm1b": {"train": "train", "test": "valid"},
}
_LM1B_FOLDERS = {
    "training-monolingual.tokenized.shuffled": "train",
    "heldout-monolingual.tokenized.shuffled": "valid",
}
_LM1B_FILE = re.compile(r"^news\.en(\.heldout)?-\d{5}-of-\d{5}$")
_NOT_PACKAGES = ("test", "site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__")


def _pg19(options: SourceOptions) -> list[Piece]:
    """Folders train, validation, test of `<id>.txt`, or the hub's tables."""
    folder = _local(options)
    if folder is None:
        return _from_hub("pg19", options)
    files = [(path, name) for path, name in walk_files(folder, options.suffixes) if split_of_name(name)]
    if not files:
        raise ValueError(f"{folder} is not PG-19: it has no folders train, validation, test of .txt files")
    return pieces_of_files(files, options, rule="own")


def _lm1b(options: SourceOptions) -> list[Piece]:
    """The published folders of files with a sentence a line, or tables."""
    folder = _local(options)
    if folder is None:
        return _from_hub("lm1b", options)
    pieces: list[Piece] = []
    for own_name, split in _LM1B_FOLDERS.items():
        for path in sorted(folder.rglob(f"{own_name}/*")):
            if _LM1B_FILE.match(path.name):
                pieces += stretches("lines", path, f"{own_name}/{path.name}", split, options)
    if pieces:
        return pieces
    files = [(path, name) for path, name in walk_files(folder, options.suffixes) if split_of_name(name)]
    if not files:
        raise ValueError(f"{folder} is not LM1B: it has neither {' nor '.join(_LM1B_FOLDERS)}, nor tables of splits")
    for path, name in files:
        pieces += file_pieces(path, name, "train" if split_of_name(name) == "train" else "valid", options)
    return pieces


def _arxiv(options: SourceOptions) -> list[Piece]:
    """A folder of articles, each a directory or an archive; splits by folders of that name, else by hash."""
    return _entries("arxiv", "article", options, lambda path: path.is_dir() or path.name.lower().endswith(ARCHIVES))


def _github(options: SourceOptions) -> list[Piece]:
    """A folder of repositories; splits by folders of that name, else by hash."""
    return _entries("github", "repository", options, Path.is_dir)


def _stdlib(options: SourceOptions) -> list[Piece]:
    """The top-level packages and modules of this Python's standard library, without its tests."""
    if options.local is not None:
        raise ValueError("the recipe stdlib reads the Python at hand: leave --from out")
    folder = Path(sysconfig.get_path("stdlib"))
    pieces = []
    for path in sorted(folder.iterdir()):
        module = path.is_file() and path.suffix == ".py"
        package = path.is_dir() and (path / "__init__.py").is_file()
        if (module or package) and path.name not in _NOT_PACKAGES and not path.name.startswith("_sysconfigdata"):
            pieces.append(_tree_piece("package", path, path.stem, None))
    if not pieces:
        raise ValueError(f"no Python source under {folder}: this Python ships its standard library without source")
    return pieces


RECIPES: dict[str, Callable[[SourceOptions], list[Piece]]] = {
    "stdlib": _stdlib,
    "pg19": _pg19,
    "lm1b": _lm1b,
    "arxiv": _arxiv,
    "github": _github,
}


def _local(options: SourceOptions) -> Path | None:
    if options.local is None:
        return None
    folder = Path(options.local)
    if not folder.is_dir():
        raise ValueError(f"--from {folder}: no such folder")
    return folder


def _entries(recipe: str, kind: str, options: SourceOptions, wanted: Callable[[Path], bool]) -> list[Piece]:
    folder = _local(options)
    if folder is None:
        raise ValueError(f"the recipe {recipe} needs a folder of yours: gss prepare {recipe} --from FOLDER")
    own = [path for path in sorted(folder.iterdir()) if path.is_dir() and split_of_name(f"{path.name}/")]
    if own and options.splits != "hash":
        found = [(entry, split_of_name(f"{path.name}/")) for path in own for entry in sorted(path.iterdir())]
    elif options.splits == "own":
        raise ValueError(f"{folder} has no folders train, valid, test: use --splits hash")
    else:
        found = [(entry, None) for entry in sorted(folder.iterdir())]
    chosen = [(entry, split) for entry, split in found if not entry.name.startswith(".") and wanted(entry)]
    if not chosen:
        raise ValueError(f"{folder} holds no {kind}")
    return [_tree_piece(kind, entry, entry.relative_to(folder).as_posix(), split) for entry, split in chosen]


def _tree_piece(kind: str, path: Path, name: str, split: str | None) -> Piece:
    """A piece for a file, or for a folder with everything in it."""
    sizes, stamps = [], []
    for file in _tree_files(path):
        status = file.stat()
        sizes.append(status.st_size)
        stamps.append(status.st_mtime_ns)
    return Piece(kind, str(path), name, sum(sizes), split, stamp=max(stamps, default=0))


def _tree_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, names, files in os.walk(path):
        names[:] = [name for name in names if name not in (".git", "__pycache__")]
        yield from (Path(folder, name) for name in files if Path(folder, name).is_file())


def _from_hub(recipe: str, options: SourceOptions) -> list[Piece]:
    """Pieces of the tables that the datasets library downloads and caches."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{recipe} from the hub needs the extra 'hub' (pip install 'gss-lm[hub]'); a local copy needs --from"
        ) from error
    name, revision = HUB[recipe]
    name, revision = options.hub_name or name, options.hub_revision or (None if options.hub_name else revision)
    try:
        tables = datasets.load_dataset(name, revision=revision)
    except Exception as error:  # the library raises its own, the network's and the file system's errors
        raise ValueError(
            f"could not load {name} from the hub ({type(error).__name__}: {error}); "
            f"give a local copy with --from, or another data set with --hub-name"
        ) from error
    pieces: list[Piece] = []
    for own_name, split in HUB_SPLITS[recipe].items():
        if own_name not in tables:
            raise ValueError(f"{name} has no split {own_name!r} but {', '.join(tables)}")
        if options.field not in tables[own_name].column_names:
            columns = ", ".join(tables[own_name].column_names)
            raise ValueError(f"{name} has no column {options.field!r} but {columns}: name one with --field")
        for number, cached in enumerate(tables[own_name].cache_files):
            pieces += _arrow_pieces(cached["filename"], f"{own_name}-{number}", split, options)
    return pieces


def _arrow_pieces(path: str, name: str, split: str, options: SourceOptions) -> Iterator[Piece]:
    import datasets

    rows = len(datasets.Dataset.from_file(path))
    status = os.stat(path)
    step = max(1, rows * options.piece_bytes // max(1, status.st_size))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        size = status.st_size * (stop - start) // rows
        yield Piece("arrow", path, name, size, split, start, stop, options.field, status.st_mtime_ns)
