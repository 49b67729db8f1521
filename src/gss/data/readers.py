"""Reading: from a piece of a corpus on disk to its documents, block by block.

A piece is what one process reads at a stretch: a file, a range of one, or a folder that makes one document. Pieces
are plain data, found by `sources`. Bad documents raise Skip while they are read. Nothing here knows of tokens.
"""

import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from gss.data import blocks
from gss.data.blocks import BLOCK, Block, ByteStream, ChunkStream, Skip, cut_blocks

MAX_ROW = 1 << 26  # a row is parsed whole, so its size is what bounds memory
COMPRESSIONS = (".gz", ".xz", ".zst")


@dataclass(frozen=True)
class Piece:
    """A stretch of a corpus. `start` and `stop` count blocks of a text, bytes of lines, row groups, rows."""

    kind: str  # one of READERS
    path: str
    name: str  # what its documents are called
    size: int  # bytes, for progress and for sharing out
    split: str | None = None  # the corpus's own split; None: by hash
    start: int = 0
    stop: int | None = None
    field: str = "text"
    stamp: int = 0  # the file's modification time, so that a changed source is noticed


@dataclass
class Fragment:
    """A document, or consecutive blocks of a long one."""

    name: str
    blocks: Iterable[Block] = field(default=())
    first: bool = True
    last: bool = True


def read_piece(piece: Piece) -> Iterator[Fragment]:
    """The documents of a piece in order."""
    return READERS[piece.kind](piece)


@contextmanager
def open_binary(path: str) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed by the ending of its name; Skip where the compression is damaged."""
    openers: dict[str, Callable[[str], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zstandard}
    opener = next((opener for ending, opener in openers.items() if path.lower().endswith(ending)), _open_plain)
    try:
        with opener(path) as stream:
            yield cast(BinaryIO, stream)
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise Skip(blocks.UNREADABLE) from error


def _open_plain(path: str) -> BinaryIO:
    return open(path, "rb")


def _open_zstandard(path: str) -> BinaryIO:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(f"reading {path} needs the extra 'formats': pip install 'gss-lm[formats]'") from error

    class Reader(io.RawIOBase):
        """The file's frames one after another; the library's errors and a truncated frame become a Skip."""

        def __init__(self) -> None:
            self._file = open(path, "rb")  # noqa: SIM115  (closed in close)
            self._frame: Any = None  # the frame being read; None between frames
            self._compressed = self._ready = b""

        def readable(self) -> bool:
            return True

        def readinto(self, target: Any) -> int:
            while not self._ready:
                # Little at a time: what it expands to is held, and may be thousands of times as much.
                self._compressed = self._compressed or self._file.read(1 << 13)
                if not self._compressed:
                    if self._frame is not None:
                        raise Skip(blocks.UNREADABLE)
                    return 0
                self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    self._ready = self._frame.decompress(self._compressed)
                except zstandard.ZstdError as error:
                    raise Skip(blocks.UNREADABLE) from error
                self._compressed = self._frame.unused_data
                if self._frame.eof:
                    self._frame = None
            count = min(len(target), len(self._ready))
            target[:count] = self._ready[:count]
            self._ready = self._ready[count:]
            return count

        def close(self) -> None:
            self._file.close()
            super().close()

    return cast(BinaryIO, io.BufferedReader(Reader(), 1 << 17))


def _without_nul(found: Iterable[Block]) -> Iterator[Block]:
    for block in found:
        if b"\0" in block.data:
            raise Skip(blocks.BINARY)
        yield block


def _read_text(piece: Piece) -> Iterator[Fragment]:
    def found() -> Iterator[Block]:
        with open_binary(piece.path) as stream:
            if piece.start:
                stream.seek(blocks.read_offset(piece.start))
            yield from _without_nul(cut_blocks(stream, piece.start, piece.stop))

    yield Fragment(piece.name, found(), first=piece.start == 0, last=piece.stop is None)


def row_document(name: str, text: object) -> Fragment:
    """A document from the text of a row."""
    if not isinstance(text, str):
        return _skipped(name, blocks.NO_TEXT)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return _skipped(name, blocks.INVALID_UTF8)
    return bytes_document(name, data)


def bytes_document(name: str, data: bytes) -> Fragment:
    """A document that is in memory already."""
    if len(data) <= BLOCK:  # the usual row: one block, without the machinery that finds out
        return Fragment(name, (Block(data, inside_word=False),) if data else ())
    return Fragment(name, cut_blocks(io.BytesIO(data)))


def _skipped(name: str, reason: str) -> Fragment:
    def found() -> Iterator[Block]:
        raise Skip(reason)
        yield  # makes this a generator, which raises when it is read

    return Fragment(name, found())


def _lines(piece: Piece) -> Iterator[tuple[str, bytes | None]]:
    """The lines that start within the piece's bytes, each with its name; None for one that is too long."""
    with open_binary(piece.path) as stream:
        position = piece.start
        if position:
            stream.seek(position - 1)
            position += _read_line(stream)[1] - 1  # the line that began before belongs to the piece before
        while piece.stop is None or position < piece.stop:
            line, length = _read_line(stream)
            if not length:
                return
            yield f"{piece.name}@{position}", (line if length <= MAX_ROW else None)
            position += length


def _read_line(stream: BinaryIO) -> tuple[bytes, int]:
    """A line with its end, and its length; a line that is too long is read past, not held."""
    line = stream.readline(MAX_ROW + 1)
    length = len(line)
    last = line
    while last and not last.endswith(b"\n") and length > MAX_ROW:
        last = stream.readline(MAX_ROW)
        length += len(last)
    return line, length


def _read_lines(piece: Piece) -> Iterator[Fragment]:
    """One document a line, as LM1B is published."""
    for name, line in _lines(piece):
        if line is None:
            yield _skipped(name, blocks.ROW_TOO_LONG)
        elif b"\0" in line:
            yield _skipped(name, blocks.BINARY)
        else:
            yield bytes_document(name, line.rstrip(b"\r\n"))


def _read_jsonl(piece: Piece) -> Iterator[Fragment]:
    for name, line in _lines(piece):
        if line is None:
            yield _skipped(name, blocks.ROW_TOO_LONG)
            continue
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            yield _skipped(name, blocks.INVALID_UTF8)
        except (ValueError, RecursionError):  # a number of thousands of digits is a plain ValueError
            yield _skipped(name, blocks.INVALID_ROW)
        else:
            yield row_document(name, row.get(piece.field) if isinstance(row, dict) else row)


def _read_parquet(piece: Piece) -> Iterator[Fragment]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(piece.path, pre_buffer=False, buffer_size=1 << 20) as file:
            groups = range(piece.start, piece.stop if piece.stop is not None else file.num_row_groups)
            for group in groups:
                rows = file.iter_batches(16, row_groups=[group], columns=[piece.field], use_threads=False)
                number = 0
                for batch in rows:
                    for value in batch.column(0):
                        yield row_document(f"{piece.name}@{group}.{number}", value.as_py())
                        number += 1
    except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise Skip(blocks.UNREADABLE) from error


def _read_arrow(piece: Piece) -> Iterator[Fragment]:
    """Rows of an Arrow file as the datasets library caches them."""
    import datasets

    table = datasets.Dataset.from_file(piece.path).select_columns([piece.field])
    stop = piece.stop if piece.stop is not None else len(table)
    for start in range(piece.start, stop, 16):
        for number, text in enumerate(table[start : min(start + 16, stop)][piece.field]):
            yield row_document(f"{piece.name}@{start + number}", text)


def _read_unreadable(piece: Piece) -> Iterator[Fragment]:
    """A file that could not even be opened when the corpus was looked through."""
    yield _skipped(piece.name, blocks.UNREADABLE)


def _read_article(piece: Piece) -> Iterator[Fragment]:
    from gss.data.latex import article_text

    def found() -> Iterator[Block]:
        yield from cut_blocks(io.BytesIO(article_text(Path(piece.path)).encode("utf-8")))

    yield Fragment(piece.name, found())


def _read_repository(piece: Piece) -> Iterator[Fragment]:
    from gss.data.code import source_files

    yield Fragment(piece.name, _concatenated(source_files(Path(piece.path))))


def _read_package(piece: Piece) -> Iterator[Fragment]:
    from gss.data.code import package_files

    yield Fragment(piece.name, _concatenated(package_files(Path(piece.path))))


def _concatenated(texts: Iterable[bytes]) -> Iterator[Block]:
    """Files one after another as one document, each ending its last line."""
    stream: ByteStream = ChunkStream(text if text.endswith(b"\n") else text + b"\n" for text in texts)
    return cut_blocks(stream)


READERS = {
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
