"""Parts: what each process makes of its share of the spans, a folder with token ids and a record of each document.

A part appears under its final name only when it is complete, so that a part that exists is a part that is done. It
knows nothing of other parts: splits by hash, duplicates and documents that reach over parts are settled by `merge`.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gss.data.chunks import CHUNK, EMPTY, REASONS, Chunk, Skip, digest
from gss.data.formats import SourceDocument, Span, read_span
from gss.data.shards import SPLITS
from gss.data.tokenizer import Tokenizer

# A document, or what a part has of it. `digest` is a whole document's; the digests of the chunks of one that reaches
# over parts are in digests.json, by the number of the record.
RECORD = np.dtype(
    [
        ("tokens", "<u8"),
        ("bytes", "<u8"),
        ("words", "<u8"),
        ("digest", "<u8", (2,)),
        ("split", "u1"),  # 0: by hash; else 1 + the number of the split
        ("skip", "u1"),  # 0: good; else 1 + the number of the reason
        ("first", "?"),
        ("last", "?"),
    ]
)
_PACKED_RECORD = struct.Struct("<QQQ16sBB??")  # the same, for one at a time
TOKENS, RECORDS, NAMES, DIGESTS = "tokens.bin", "records.bin", "names.jsonl", "digests.json"
SKIP: dict[str | None, int] = {None: 0, **{reason: 1 + number for number, reason in enumerate(REASONS)}}
_JSON = json.JSONEncoder()


Part = tuple[int, list[Span]]  # its number, and the consecutive spans that one process tokenizes


def part_name(number: int) -> str:
    """The folder of a part."""
    return f"part-{number:06d}"


def part_size(part: Part) -> int:
    """Bytes to read, for progress."""
    return sum(span.size for span in part[1])


@contextmanager
def open_synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that survives a crash once it is closed."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def make_parts(spans: Iterable[Span], part_bytes: int) -> list[Part]:
    """Spans in order, gathered until a part is about `part_bytes` large."""
    parts: list[Part] = []
    size = 0
    for span in spans:
        size += span.size
        if not parts or size > part_bytes or len(parts[-1][1]) >= 4096:
            parts.append((len(parts), []))
            size = span.size
        parts[-1][1].append(span)
    return parts


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary."""
    if vocab_size > 2**32:
        raise ValueError(f"a vocabulary of {vocab_size} ids does not fit 32 bits")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_part(part: Part, folder: Path, tokenizer: Tokenizer) -> None:
    """Read and tokenize a part into `folder`, unless it is there already."""
    final = folder / part_name(part[0])
    if final.is_dir():
        return
    aside = folder / f"{final.name}.{os.getpid()}.tmp"
    try:
        aside.mkdir()
        with ExitStack() as files:
            opened = [files.enter_context(open_synced(aside / name)) for name in (TOKENS, RECORDS, NAMES)]
            writer = _PartWriter(tokenizer, *opened)
            for span in part[1]:
                writer.write_span(span)
            writer.write_waiting()
        with open_synced(aside / DIGESTS) as file:
            file.write(json.dumps(writer.chunk_digests).encode())
        os.rename(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class _PartWriter:
    """Appends documents to a part's open files; the tokens of one that turns out bad are taken back.

    Short documents wait until there are enough of them to be encoded at once; a call for each would cost more than
    the work itself.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: BinaryIO, records: BinaryIO, names: BinaryIO) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._eos = np.asarray([tokenizer.eos_id], np.uint32)
        self._tokens, self._records, self._names = tokens, records, names
        self.chunk_digests: dict[int, str] = {}  # by the number of the record
        self._count = 0
        self._waiting: list[tuple[SourceDocument, int]] = []  # each of one chunk in memory, or none; with its split
        self._waiting_bytes = 0

    def write_span(self, span: Span) -> None:
        split = 0 if span.split is None else 1 + SPLITS.index(span.split)
        try:
            for document in read_span(span):
                if not isinstance(document.chunks, tuple):
                    self.write_waiting()
                    self._write_long(document, split)
                    continue
                self._waiting.append((document, split))
                self._waiting_bytes += 64 + sum(len(chunk.data) for chunk in document.chunks)
                if self._waiting_bytes >= CHUNK:
                    self.write_waiting()
        except Skip as skip:  # the span itself is damaged from here on
            self._waiting.append((SourceDocument(span.name, reason=skip.reason), split))

    def write_waiting(self) -> None:
        """Write the short documents that wait."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        texts = [_good_text(document) for document, _ in waiting]
        encoded = iter(self._tokenizer.encode_many([text for text in texts if text is not None]))
        written = [np.zeros(0, np.uint32)]
        for (document, split), text in zip(waiting, texts, strict=True):
            if text is None:
                self._record(document, split)
                continue
            (chunk,) = document.chunks
            written += next(encoded), self._eos
            self._record(document, split, len(written[-2]) + 1, len(chunk.data), len(text.split()), digest(chunk.data))
        self._write_ids(np.concatenate(written), waiting[0][0].name if waiting else "")

    def _write_long(self, document: SourceDocument, split: int) -> None:
        start = self._tokens.tell()
        tokens = size = words = 0
        digests = bytearray()
        try:
            for chunk in document.chunks:
                tokens += self._write_ids(self._tokenizer.encode(chunk.text()), document.name)
                size += len(chunk.data)
                words += chunk.words()
                digests += digest(chunk.data)
            if document.first and document.last and not words:
                raise Skip(EMPTY)
            if document.last:
                tokens += self._write_ids(self._eos, document.name)
        except Skip as skip:
            self._tokens.seek(start)
            self._tokens.truncate()
            document.reason, tokens, size, words, digests = skip.reason, 0, 0, 0, bytearray()
        self._record(document, split, tokens, size, words, bytes(digests))

    def _write_ids(self, ids: npt.NDArray[Any], name: str) -> int:
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"{name}: the vocabulary made id {int(ids.max())}, outside its own size {self._tokenizer.vocab_size}"
            )
        self._tokens.write(ids.astype(self._dtype).tobytes())
        return int(ids.size)

    def _record(
        self, document: SourceDocument, split: int, tokens: int = 0, size: int = 0, words: int = 0, digests: bytes = b""
    ) -> None:
        whole = bytes(16) if document.reason else digest(digests)
        if not (document.first and document.last):
            self.chunk_digests[self._count] = digests.hex()
            whole = bytes(16)
        skip = SKIP[document.reason]
        self._records.write(_PACKED_RECORD.pack(tokens, size, words, whole, split, skip, document.first, document.last))
        self._names.write(_JSON.encode(_printable(document.name)).encode() + b"\n")
        self._count += 1


def _good_text(document: SourceDocument) -> str | None:
    """The text of a document in memory; None, with the reason noted, where it cannot be used."""
    try:
        text = "".join(map(Chunk.text, document.chunks))
    except Skip as skip:
        document.reason = skip.reason
        return None
    if not text.strip():
        document.reason = document.reason or EMPTY
        return None
    return text


def _printable(name: str) -> str:
    """A name as it is, with a backslash before the bytes of a file's name that are not UTF-8."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", errors="backslashreplace")
