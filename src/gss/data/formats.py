"""Formats: from a span of a source on disk to its documents, chunk by chunk.

A span is what one process reads in one go: a file, a range of one, or a folder that makes one document. Spans are plain
data, found by `sources`. Bad documents raise Skip while they are read. Nothing here knows of tokens.
"""

import codecs
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from gss.data import chunks, latex
from gss.data.chunks import CHUNK, Chunk, Skip, cut_chunks, stream_of

MAX_ROW = 1 << 26  # a row is parsed whole, so its size is what bounds memory
COMPRESSIONS = (".gz", ".xz", ".zst")


@dataclass(frozen=True)
class Span:
    """A span of a source. `start` and `stop` count chunks of a text, bytes of lines, row groups or rows."""

    kind: str  # one of READERS
    path: str
    name: str  # what its documents are called
    size: int  # bytes, for progress and for sharing out
    split: str | None = None  # the corpus's own split; None: by hash
    start: int = 0
    stop: int | None = None
    field: str = "text"
    stamp: int = 0  # the file's modification time, so that a changed source is noticed
    begin: int = 0  # of a text: the byte at which the document begins,
    length: int | None = None  # and its bytes; None: to the end of the file


@dataclass
class SourceDocument:
    """A document as it is read, or those chunks of a long one that lie in a span."""

    name: str
    chunks: Iterable[Chunk] = ()
    first: bool = True  # whether it begins in this span
    last: bool = True  # whether it ends in this span


def read_span(span: Span) -> Iterator[SourceDocument]:
    """The documents of a span in order."""
    return READERS[span.kind](span)


@contextmanager
def open_binary(path: str) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed by the ending of its name; Skip where the compression is damaged."""
    openers: dict[str, Callable[[str], Any]] = {
        ".gz": gzip.open,
        ".xz": lzma.open,
        ".zst": lambda path: stream_of(_decompress_zstandard(path)),
    }
    opener = next((opener for ending, opener in openers.items() if path.lower().endswith(ending)), None)
    try:
        with opener(path) if opener else open(path, "rb") as stream:
            yield cast(BinaryIO, stream)
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise Skip(chunks.UNREADABLE) from error


def _decompress_zstandard(path: str) -> Iterator[bytes]:
    """The file's frames one after another; the library's errors and a truncated frame become a Skip."""
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(f"reading {path} needs the extra 'formats': pip install 'gss-lm[formats]'") from error
    frame: Any = None  # the frame being read; None between frames
    with open(path, "rb") as file:
        while compressed := file.read(1 << 13):  # little at a time: it may expand to thousands of times as much
            while compressed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise Skip(chunks.UNREADABLE) from error
                compressed = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise Skip(chunks.UNREADABLE)


def _read_text(span: Span) -> Iterator[SourceDocument]:
    def found() -> Iterator[Chunk]:
        with open_binary(span.path) as stream:
            offset = chunks.read_offset(span.start)
            if span.begin + offset:
                stream.seek(span.begin + offset)
            if span.length is not None:
                stream = stream_of(_first_bytes(stream, span.length - offset))
            for chunk in cut_chunks(stream, span.start, span.stop):
                if b"\0" in chunk.data:
                    raise Skip(chunks.BINARY)
                yield chunk

    yield SourceDocument(span.name, found(), first=span.start == 0, last=span.stop is None)


def _first_bytes(stream: BinaryIO, count: int) -> Iterator[bytes]:
    while count > 0 and (data := stream.read(min(count, 1 << 17))):
        count -= len(data)
        yield data


def row_document(name: str, text: object) -> SourceDocument:
    """A document from the text of a row."""
    if not isinstance(text, str):
        return _skipped(name, chunks.NO_TEXT)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return _skipped(name, chunks.INVALID_UTF8)
    return _bytes_document(name, data)


def _bytes_document(name: str, data: bytes) -> SourceDocument:
    if len(data) <= CHUNK:  # the usual row: one chunk, without the machinery that finds out
        return SourceDocument(name, (Chunk(data),) if data else ())
    return SourceDocument(name, cut_chunks(io.BytesIO(data)))


def _skipped(name: str, reason: str) -> SourceDocument:
    def found() -> Iterator[Chunk]:
        raise Skip(reason)
        yield  # makes this a generator, which raises when it is read

    return SourceDocument(name, found())


def _lines(span: Span) -> Iterator[tuple[str, bytes | None]]:
    """The lines that start within the span's bytes, each with its name; None for one that is too long."""
    with open_binary(span.path) as stream:
        position = span.start
        if position:
            stream.seek(position - 1)
            position += _read_line(stream)[1] - 1  # the line that began before belongs to the span before
        while span.stop is None or position < span.stop:
            line, length = _read_line(stream)
            if not length:
                return
            yield f"{span.name}@{position}", (line if length <= MAX_ROW else None)
            position += length


def _read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """A line with its end, and its length; a line that is too long is read past, not held."""
    line = last = stream.readline(MAX_ROW + 1)
    length = len(line)
    while last and not last.endswith(b"\n") and length > MAX_ROW:
        last = stream.readline(MAX_ROW)
        length += len(last)
    return line, length


def _read_lines(span: Span) -> Iterator[SourceDocument]:
    """One document per line, as LM1B is published."""
    for name, line in _lines(span):
        if line is None:
            yield _skipped(name, chunks.ROW_TOO_LONG)
        elif b"\0" in line:
            yield _skipped(name, chunks.BINARY)
        else:
            yield _bytes_document(name, line.rstrip(b"\r\n"))


def _read_jsonl(span: Span) -> Iterator[SourceDocument]:
    for name, line in _lines(span):
        if line is None:
            yield _skipped(name, chunks.ROW_TOO_LONG)
            continue
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            yield _skipped(name, chunks.INVALID_UTF8)
        except (ValueError, RecursionError):  # a number of thousands of digits is a plain ValueError
            yield _skipped(name, chunks.INVALID_ROW)
        else:
            yield row_document(name, row.get(span.field) if isinstance(row, dict) else row)


def _read_parquet(span: Span) -> Iterator[SourceDocument]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(span.path, pre_buffer=False, buffer_size=1 << 20) as file:
            for group in range(span.start, span.stop if span.stop is not None else file.num_row_groups):
                number = 0
                for batch in file.iter_batches(16, row_groups=[group], columns=[span.field], use_threads=False):
                    for value in batch.column(0):
                        yield row_document(f"{span.name}@{group}.{number}", value.as_py())
                        number += 1
    except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise Skip(chunks.UNREADABLE) from error


def _read_arrow(span: Span) -> Iterator[SourceDocument]:
    """Rows of an Arrow file as the datasets library caches them."""
    import datasets

    table = datasets.Dataset.from_file(span.path).select_columns([span.field])
    stop = span.stop if span.stop is not None else len(table)
    for start in range(span.start, stop, 16):
        for number, text in enumerate(table[start : min(start + 16, stop)][span.field]):
            yield row_document(f"{span.name}@{start + number}", text)


def _read_unreadable(span: Span) -> Iterator[SourceDocument]:
    """A file that could not even be opened when the corpus was looked through."""
    yield _skipped(span.name, chunks.UNREADABLE)


def _read_article(span: Span) -> Iterator[SourceDocument]:
    def found() -> Iterator[Chunk]:
        yield from cut_chunks(io.BytesIO(latex.article_text(Path(span.path)).encode("utf-8")))

    yield SourceDocument(span.name, found())


def _read_repository(span: Span) -> Iterator[SourceDocument]:
    yield SourceDocument(span.name, _concatenated(_repository_files(Path(span.path))))


def _read_package(span: Span) -> Iterator[SourceDocument]:
    yield SourceDocument(span.name, _concatenated(_package_files(Path(span.path))))


def _concatenated(files: Iterable[bytes]) -> Iterator[Chunk]:
    """Files one after another as one document, each ending its last line."""
    return cut_chunks(stream_of(content if content.endswith(b"\n") else content + b"\n" for content in files))


READERS: dict[str, Callable[[Span], Iterator[SourceDocument]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "article": _read_article,
    "repository": _read_repository,
    "package": _read_package,
    "unreadable": _read_unreadable,
}

# Of a repository: C, C++, Java, Python, Go and TypeScript, without what others wrote (vendored), what programs wrote
# (generated, minified) and what is not text.
_CODE = (
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".c++", ".hh", ".hpp", ".hxx", ".h++", ".inl"),
    *(".java", ".py", ".pyi", ".go", ".ts", ".tsx"),
)
_VENDORED = (
    *("vendor", "vendored", "_vendor", "third_party", "third-party", "thirdparty", "3rdparty", "node_modules"),
    *("bower_components", "external", "externals", "extern", "deps", "site-packages", "dist-packages", "dist"),
    *("build", "out", "target", "generated", "gen", "__pycache__", "venv", "env"),
)
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
_MARK_WITHIN = 1500  # bytes at a file's head in which generators sign
_LONGEST_MEAN_LINE = 300  # characters; people write shorter lines


def _repository_files(repository: Path) -> Iterator[bytes]:
    """The contents of a repository's own source files, in the order of their paths."""
    for path in _walk(repository, _VENDORED):
        if path.suffix.lower() in _CODE and not _GENERATED_NAME.search(path.name):
            content = _code(path)
            if content is not None and not _looks_generated(content):
                yield content


def _package_files(path: Path) -> Iterator[bytes]:
    """The Python files of one top-level package or module of the standard library, without its tests."""
    for file in [path] if path.is_file() else _walk(path, ("__pycache__", "test", "tests", "idle_test")):
        content = _code(file) if file.suffix == ".py" else None
        if content is not None:
            yield content


def _walk(root: Path, without: tuple[str, ...]) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n.lower() not in without and not n.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _code(path: Path) -> bytes | None:
    """A file's bytes if it is text of a size that people write."""
    if path.stat().st_size > _MAX_CODE:
        return None
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return content if content.strip() and b"\0" not in content else None


def _looks_generated(content: bytes) -> bool:
    mean_line = len(content) / (content.count(b"\n") + 1)
    return mean_line > _LONGEST_MEAN_LINE or _GENERATED_MARK.search(content[:_MARK_WITHIN]) is not None
