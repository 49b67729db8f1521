"""Parts: what each process makes of its share of the spans, a folder with token ids and a record of each chunk.

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
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gss.data.chunks import CHUNK, REASONS, Chunk, Skip, digest
from gss.data.formats import SourceDocument, Span, read_span
from gss.data.shards import SPLITS
from gss.data.tokenizer import Tokenizer

# A chunk of a document. Those of a document come one after another, from the first to the last, and may reach over
# parts. A document has the tokens, bytes and words of its chunks together, and is skipped where one of them is.
RECORD = np.dtype(
    [
        ("tokens", "<u8"),
        ("bytes", "<u8"),
        ("words", "<u8"),
        ("digest", "<u8", (2,)),  # the document's where this is all of it, else the chunk's
        ("split", "u1"),  # 0: by hash; else 1 + the number of the split
        ("skip", "u1"),  # 0: good; else 1 + the number of the reason
        ("first", "?"),
        ("last", "?"),
    ]
)
_PACKED_RECORD = struct.Struct("<QQQ16sBB??")  # the same, for one at a time
TOKENS, RECORDS, NAMES = "tokens.bin", "records.bin", "names.jsonl"  # a name for each record that is the last
SKIP: dict[str | None, int] = {None: 0, **{reason: 1 + number for number, reason in enumerate(REASONS)}}
_JSON = json.JSONEncoder()


class Part(NamedTuple):
    """The work of one process: consecutive spans, tokenized into a folder of this name."""

    number: int
    spans: list[Span]

    @property
    def name(self) -> str:
        return f"part-{self.number:06d}"

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


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
        if not parts or size > part_bytes or len(parts[-1].spans) >= 4096:
            parts.append(Part(len(parts), []))
            size = span.size
        parts[-1].spans.append(span)
    return parts


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary."""
    if vocab_size > 2**32:
        raise ValueError(f"a vocabulary of {vocab_size} ids does not fit 32 bits")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_part(part: Part, folder: Path, tokenizer: Tokenizer) -> None:
    """Read and tokenize a part into `folder`, unless it is there already."""
    final = folder / part.name
    if final.is_dir():
        return
    aside = folder / f"{final.name}.{os.getpid()}.tmp"
    try:
        aside.mkdir()
        with ExitStack() as files:
            opened = [files.enter_context(open_synced(aside / name)) for name in (TOKENS, RECORDS, NAMES)]
            writer = _PartWriter(tokenizer, *opened)
            for span in part.spans:
                writer.write_span(span)
            writer.write_waiting()
        os.rename(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class _PartWriter:
    """Appends chunks of documents to a part's open files.

    They wait until there are enough of them to be encoded at once; a call for each short document would cost more
    than the work itself. What is written of a document that turns out bad is left out by `merge`.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: BinaryIO, records: BinaryIO, names: BinaryIO) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._eos = np.asarray([tokenizer.eos_id], np.uint32)
        self._tokens, self._records, self._names = tokens, records, names
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []  # the text of a chunk, and its record without tokens
        self._waiting_bytes = 0

    def write_span(self, span: Span) -> None:
        split = 0 if span.split is None else 1 + SPLITS.index(span.split)
        try:
            for document in read_span(span):
                self._write_document(document, split)
        except Skip as skip:  # the span itself is damaged from here on
            self._write_document(SourceDocument(span.name, reason=skip.reason), split)

    def _write_document(self, document: SourceDocument, split: int) -> None:
        first, reason, chunk = document.first, document.reason, Chunk(b"")
        try:
            for following in document.chunks:
                if chunk.data:
                    self._write_chunk(chunk, split, first, False)
                    first = False
                chunk = following
        except Skip as skip:
            reason = skip.reason
        self._write_chunk(chunk, split, first, document.last, reason)
        if document.last:
            # A backslash stands before the bytes of a file's name that are not UTF-8.
            name = os.fsencode(document.name).decode("utf-8", errors="backslashreplace")
            self._names.write(_JSON.encode(name).encode() + b"\n")

    def _write_chunk(self, chunk: Chunk, split: int, first: bool, last: bool, reason: str | None = None) -> None:
        text, words = "", 0
        try:
            text = "" if reason else chunk.text()
            words = chunk.words(text)
        except Skip as skip:
            reason = skip.reason
        own = digest(chunk.data)
        record = (len(chunk.data), words, digest(own) if first and last else own, split, SKIP[reason], first, last)
        self._waiting.append((text, record))
        self._waiting_bytes += 64 + len(chunk.data)
        if self._waiting_bytes >= CHUNK:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write the chunks that wait."""
        encoded = self._tokenizer.encode_many([text for text, _ in self._waiting])
        written = [np.zeros(0, np.uint32)]
        for ids, (_, record) in zip(encoded, self._waiting, strict=True):
            written += (ids, self._eos) if record[-1] else (ids,)
            self._records.write(_PACKED_RECORD.pack(len(ids) + record[-1], *record))
        ids = np.concatenate(written)
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(f"the vocabulary made id {ids.max()}, outside its own size {self._tokenizer.vocab_size}")
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self._waiting, self._waiting_bytes = [], 0
