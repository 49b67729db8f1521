"""Formats: from a span of a source to its documents, chunk by chunk.

A span is the unit that one process reads: a file, a range of one, or a folder that makes one document. Spans are plain
data, found by `sources`. Reading a bad document raises Skip. Independent of tokens.
"""

import codecs
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from gss.data import chunks, latex
from gss.data.chunks import CHUNK, Chunk, Skip, cut_chunks

MAX_ROW = 1 << 26  # a row is parsed whole, so its size bounds memory
COMPRESSIONS = (".gz", ".xz", ".zst")
BLOCK = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class Span:
    """A span of a source. `start` and `stop` count chunks (of a text), bytes (of a file of lines) or row groups."""

    kind: str  # one of READERS
    path: str  # or a URL
    name: str  # of its documents
    size: int  # bytes, for progress and for dividing the work
    split: str | None = None  # the corpus's own split; None: by hash
    start: int = 0
    stop: int | None = None
    field: str = "text"
    stamp: int = 0  # the file's modification time, so that a changed source is noticed
    begin: int = 0  # of a text: the byte at which the document begins
    length: int | None = None  # of a text: its bytes; None: to the end of the file


@dataclass
class SourceDocument:
    """A document as it is read, or the chunks of a long one that a span contains."""

    name: str
    chunks: Iterable[Chunk] = ()
    reason: str | None = None  # why it is left out, if that is known before it is read
    first: bool = True  # whether it begins in this span
    last: bool = True  # whether it ends in this span


def needs_formats(path: str) -> ValueError:
    """The error if the packages of the extra are missing."""
    return ValueError(f"reading {path} needs the extra 'formats': pip install 'gss-lm[formats]'")


def is_url(path: str) -> bool:
    """Whether a source is in object storage, on the web or on the hub instead of on a disk."""
    return "://" in path


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    try:
        import fsspec

        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except ImportError as error:
        extra = "hub" if url.startswith("hf://") else "remote"
        raise ValueError(f"{url} needs the extra '{extra}': pip install 'gss-lm[{extra}]' ({error})") from error


def open_file(path: str) -> BinaryIO:
    """A file's bytes as they are stored, from a disk or a URL."""
    if not is_url(path):
        return open(path, "rb")
    files, place = file_system(path)
    return cast(BinaryIO, files.open(place, "rb"))


@contextmanager
def open_binary(path: str) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed according to its extension; Skip if the compressed data is damaged."""
    ending = path.lower().rpartition(".")[2]
    with unreadable_is_skipped(), open_file(path) as stored:
        if ending == "gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stored))
        elif ending == "xz":
            yield cast(BinaryIO, lzma.LZMAFile(stored))  # noqa: SIM115  (`stored` is closed below)
        elif ending == "zst":
            try:
                import pyarrow
            except ImportError as error:
                raise needs_formats(path) from error
            yield cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd"), BLOCK))
        else:
            yield stored


@contextmanager
def unreadable_is_skipped() -> Iterator[None]:
    """Turn the errors of libraries about damaged files into a Skip. A failing disk or network remains an error."""
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise Skip(chunks.UNREADABLE) from error
    except (OSError, ValueError) as error:
        # pyarrow reports bad contents as a bare OSError without an errno, or as an ArrowInvalid.
        if (type(error) is OSError and error.errno is None) or type(error).__name__ == "ArrowInvalid":
            raise Skip(chunks.UNREADABLE) from error
        raise


def _read_text(span: Span) -> Iterator[SourceDocument]:
    def blocks() -> Iterator[bytes]:
        with open_binary(span.path) as stream:
            offset = chunks.read_offset(span.start)
            if span.begin + offset:
                stream.seek(span.begin + offset)
            left = sys.maxsize if span.length is None else span.length - offset
            while data := stream.read(min(BLOCK, left)):
                left -= len(data)
                yield data

    def found() -> Iterator[Chunk]:
        for number, chunk in enumerate(cut_chunks(blocks(), span.start, span.stop), span.begin + span.start):
            if b"\0" in chunk.data:
                raise Skip(chunks.BINARY)
            data = chunk.data if number else chunk.data.removeprefix(codecs.BOM_UTF8)
            yield replace(chunk, data=data.replace(b"\r\n", b"\n"))

    yield SourceDocument(span.name, found(), first=span.start == 0, last=span.stop is None)


def _row_document(name: str, text: object) -> SourceDocument:
    """A document from the text of a row, or its bytes."""
    if not isinstance(text, str | bytes):
        return SourceDocument(name, reason=chunks.NO_TEXT)
    try:
        data = text.encode("utf-8") if isinstance(text, str) else text
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can encode
        return SourceDocument(name, reason=chunks.INVALID_UTF8)
    if not data:
        return SourceDocument(name, reason=chunks.EMPTY)
    # Most rows are one chunk and need no cutting.
    return SourceDocument(name, (Chunk(data),) if len(data) <= CHUNK else cut_chunks([data]))


def _lines(span: Span) -> Iterator[tuple[str, bytes | None]]:
    """The lines that start within the span's bytes, with their names; None for a line that is too long."""
    with open_binary(span.path) as stream:
        position = span.start
        if position:
            stream.seek(position - 1)
            position += _read_line(stream)[1] - 1  # a line that begins before the span belongs to the previous span
        while span.stop is None or position < span.stop:
            line, length = _read_line(stream)
            if not length:
                return
            yield f"{span.name}@{position}", (line if length <= MAX_ROW else None)
            position += length


def _read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """A line with its line end, and its length; of a line that is too long, only the beginning is kept."""
    line = last = stream.readline(MAX_ROW + 1)
    length = len(line)
    while last and not last.endswith(b"\n") and length > MAX_ROW:
        last = stream.readline(MAX_ROW)
        length += len(last)
    return line, length


def _read_lines(span: Span) -> Iterator[SourceDocument]:
    """One document per line: a row of JSON, or the line itself, as LM1B is published."""
    for name, line in _lines(span):
        if line is None:
            yield SourceDocument(name, reason=chunks.ROW_TOO_LONG)
        elif span.kind == "lines":
            binary = b"\0" in line
            yield SourceDocument(name, reason=chunks.BINARY) if binary else _row_document(name, line.rstrip(b"\r\n"))
        elif (row := line.removeprefix(codecs.BOM_UTF8)).strip():
            try:
                value = json.loads(row.decode("utf-8"))
            except UnicodeDecodeError:
                yield SourceDocument(name, reason=chunks.INVALID_UTF8)
            except (ValueError, RecursionError):  # a number with thousands of digits raises a plain ValueError
                yield SourceDocument(name, reason=chunks.INVALID_ROW)
            else:
                yield _row_document(name, value.get(span.field) if isinstance(value, dict) else value)


def _read_parquet(span: Span) -> Iterator[SourceDocument]:
    import pyarrow.parquet

    with unreadable_is_skipped(), open_file(span.path) as stored:
        file = pyarrow.parquet.ParquetFile(stored, pre_buffer=False, buffer_size=BLOCK)
        for group in range(span.start, file.num_row_groups if span.stop is None else span.stop):
            number = 0
            for batch in file.iter_batches(16, row_groups=[group], columns=[span.field], use_threads=False):
                for value in batch.column(0):
                    name = f"{span.name}@{group}.{number}"
                    number += 1
                    try:
                        yield _row_document(name, value.as_py())
                    except UnicodeDecodeError:
                        yield SourceDocument(name, reason=chunks.INVALID_UTF8)


def _read_article(span: Span) -> Iterator[SourceDocument]:
    def found() -> Iterator[Chunk]:
        with unreadable_is_skipped():
            yield from cut_chunks([latex.article_text(Path(span.path)).encode("utf-8")])

    yield SourceDocument(span.name, found())


def _read_code(span: Span) -> Iterator[SourceDocument]:
    """A repository's own source files, or the Python files of one package of the standard library without its tests."""
    repository = span.kind == "repository"

    def written() -> Iterator[bytes]:
        for path in walk(Path(span.path), _VENDORED if repository else _TESTS):
            wanted = path.suffix.lower() in _CODE and not _GENERATED_NAME.search(path.name)
            if (wanted if repository else path.suffix == ".py") and path.stat().st_size <= _MAX_CODE:
                content = path.read_bytes()
                if _is_code(content, repository):
                    yield content if content.endswith(b"\n") else content + b"\n"

    yield SourceDocument(span.name, cut_chunks(written()))


READERS: dict[str, Callable[[Span], Iterator[SourceDocument]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "jsonl": _read_lines,
    "parquet": _read_parquet,
    "article": _read_article,
    "repository": _read_code,
    "package": _read_code,
}


def read_span(span: Span) -> Iterator[SourceDocument]:
    """The documents of a span in order."""
    return READERS[span.kind](span)


# Repositories: C, C++, Java, Python, Go and TypeScript, without vendored, generated and minified files.
_CODE = (
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".c++", ".hh", ".hpp", ".hxx", ".h++", ".inl"),
    *(".java", ".py", ".pyi", ".go", ".ts", ".tsx"),
)
_VENDORED = (
    *("vendor", "vendored", "_vendor", "third_party", "third-party", "thirdparty", "3rdparty", "node_modules"),
    *("bower_components", "external", "externals", "extern", "deps", "site-packages", "dist-packages", "dist"),
    *("build", "out", "target", "generated", "gen", "__pycache__", "venv", "env"),
)
_TESTS = ("__pycache__", "test", "tests", "idle_test")
_MAX_CODE = 1 << 20  # a larger source file is data or generated
_GENERATED_NAME = re.compile(
    r"(_pb2(_grpc)?\.pyi?|\.pb(\.gw)?\.(go|cc|h)|\.pb-c\.[ch]|_generated\.\w+|\.generated\.\w+|_gen\.go|\.gen\.\w+"
    r"|\.min\.ts|\.d\.ts|^moc_.*|^ui_.*\.h|^zz_generated.*|_string\.go|\.tab\.[ch]|^lex\.yy\.c)$"
)
_GENERATED_MARK = re.compile(
    rb"code generated .{0,80}do not edit|@generated|auto-?generated|automatically generated|"
    rb"generated by the protocol buffer compiler|this file (is|was) generated|do not edit (this file|by hand)",
    re.IGNORECASE,
)
_MARK_WITHIN = 1500  # bytes at the start of a file in which generators leave their mark
_LONGEST_MEAN_LINE = 300  # characters; people write shorter lines


def walk(root: Path, without: tuple[str, ...] = ()) -> Iterator[Path]:
    """A file, or the files of a folder ordered by name, its own before those of its subfolders."""
    if root.is_file():
        yield root
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name.lower() not in without and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _is_code(content: bytes, repository: bool) -> bool:
    """Whether a file is text and, in a repository, written by people."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    short_lines = len(content) <= _LONGEST_MEAN_LINE * (content.count(b"\n") + 1)
    written = not repository or (short_lines and not _GENERATED_MARK.search(content[:_MARK_WITHIN]))
    return written and b"\0" not in content and bool(content.strip())
