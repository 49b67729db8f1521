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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gss.data import chunks
from gss.data.chunks import CHUNK, REASONS, Chunk, Skip, digest
from gss.data.formats import SourceDocument, Span, read_span
from gss.data.shards import SPLITS
from gss.data.tokenizer import Tokenizer

# A document, or what a part has of it. `digest` is a whole document's; the digests of the chunks of one that reaches
# over parts are in digests.json.
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

SKIP = {reason: 1 + number for number, reason in enumerate(REASONS)}  # as records have it
_JSON = json.JSONEncoder()


@dataclass(frozen=True)
class CorpusPart:
    """Consecutive spans that one process tokenizes."""

    number: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes to read, for progress."""
        return sum(span.size for span in self.spans)

    @property
    def name(self) -> str:
        """The part's folder."""
        return f"part-{self.number:06d}"


@contextmanager
def open_synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that survives a crash once it is closed."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def make_parts(spans: Iterable[Span], part_bytes: int) -> list[CorpusPart]:
    """Spans in order, gathered until a part is about `part_bytes` large."""
    gathered: list[list[Span]] = []
    size = 0
    for span in spans:
        if not gathered or size + span.size > part_bytes or len(gathered[-1]) >= 4096:
            gathered.append([])
            size = 0
        gathered[-1].append(span)
        size += span.size
    return [CorpusPart(number, tuple(spans)) for number, spans in enumerate(gathered)]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary."""
    if vocab_size > 2**32:
        raise ValueError(f"a vocabulary of {vocab_size} ids does not fit 32 bits")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_part(part: CorpusPart, folder: Path, tokenizer: Tokenizer) -> None:
    """Read and tokenize a part into `folder`, unless it is there already."""
    final = folder / part.name
    if final.is_dir():
        return
    aside = folder / f"{part.name}.{os.getpid()}.tmp"
    try:
        aside.mkdir()
        with ExitStack() as files:
            opened = [files.enter_context(open_synced(aside / name)) for name in (TOKENS, RECORDS, NAMES)]
            writer = _PartWriter(tokenizer, *opened)
            for span in part.spans:
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
        self._waiting: list[tuple[SourceDocument, Chunk, int]] = []  # each with its only chunk, and its split
        self._waiting_bytes = 0

    def write_span(self, span: Span) -> None:
        split = 0 if span.split is None else 1 + SPLITS.index(span.split)
        try:
            for document in read_span(span):
                if isinstance(document.chunks, tuple) and document.chunks:  # whole, and in memory
                    self._waiting.append((document, document.chunks[0], split))
                    self._waiting_bytes += len(document.chunks[0].data)
                    if self._waiting_bytes >= CHUNK:
                        self.write_waiting()
                else:
                    self.write_waiting()
                    self._write_document(document, split)
        except Skip as skip:  # the span itself is damaged from here on
            self.write_waiting()
            self._record(SourceDocument(span.name), split, skip=SKIP[skip.reason])

    def write_waiting(self) -> None:
        """Write the short documents that wait."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        texts = [_text_or_skip(chunk) for _, chunk, _ in waiting]
        encoded = iter(self._tokenizer.encode_many([text for text in texts if isinstance(text, str)]))
        written = [np.zeros(0, np.uint32)]
        for (document, chunk, split), text in zip(waiting, texts, strict=True):
            if isinstance(text, Skip):
                self._record(document, split, skip=SKIP[text.reason])
                continue
            ids = next(encoded)
            written += ids, self._eos
            size, words = len(chunk.data), len(text.split())
            self._record(document, split, len(ids) + 1, size, words, chunk.digest())
        self._write_ids(np.concatenate(written), waiting[0][0].name if waiting else "")

    def _write_document(self, document: SourceDocument, split: int) -> None:
        start = self._tokens.tell()
        tokens = size = words = 0
        digests = bytearray()
        try:
            for chunk in document.chunks:
                tokens += self._write_ids(self._tokenizer.encode(chunk.text()), document.name)
                size += len(chunk.data)
                words += chunk.words()
                digests += chunk.digest()
            if document.first and document.last and not words:
                raise Skip(chunks.EMPTY)
            if document.last:
                tokens += self._write_ids(self._eos, document.name)
        except Skip as skip:
            self._tokens.seek(start)
            self._tokens.truncate()
            self._record(document, split, skip=SKIP[skip.reason])
        else:
            self._record(document, split, tokens, size, words, bytes(digests))

    def _write_ids(self, ids: npt.NDArray[Any], name: str) -> int:
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"{name}: the vocabulary made id {int(ids.max())}, outside its own size {self._tokenizer.vocab_size}"
            )
        self._tokens.write(ids.astype(self._dtype).tobytes())
        return int(ids.size)

    def _record(
        self,
        document: SourceDocument,
        split: int,
        tokens: int = 0,
        size: int = 0,
        words: int = 0,
        digests: bytes = b"",
        skip: int = 0,
    ) -> None:
        whole = bytes(16) if skip else digest(digests)
        if not (document.first and document.last):
            self.chunk_digests[self._count] = digests.hex()
            whole = bytes(16)
        record = _PACKED_RECORD.pack(tokens, size, words, whole, split, skip, document.first, document.last)
        self._records.write(record)
        self._names.write(_JSON.encode(_printable(document.name)).encode() + b"\n")
        self._count += 1


def _text_or_skip(chunk: Chunk) -> str | Skip:
    try:
        text = chunk.text()
    except Skip as skip:
        return skip
    return text if text.strip() else Skip(chunks.EMPTY)


def _printable(name: str) -> str:
    """A name as it is, with a backslash before the bytes of a file's name that are not UTF-8."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", errors="backslashreplace")
