"""Parts: a process reads and tokenizes its spans into a part, a folder of token ids and a record of each chunk.

A part gets its final name only when it is complete, so a part that exists is finished. Parts are independent of each
other: `merging` makes a corpus of them.
"""

import json
import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gss.data.chunks import CHUNK, REASONS, Chunk, Skip, digest
from gss.data.formats import SourceDocument, Span, read_span
from gss.data.shards import SPLITS
from gss.data.tokenizer import Tokenizer
from gss.io.files import open_synced, written_folder

# One chunk. A document's chunks are consecutive records, from its first to its last, and may continue in the next part.
# A document is skipped if any of its chunks is.
RECORD = np.dtype(
    [
        ("tokens", "<u8"),
        ("bytes", "<u8"),
        ("words", "<u8"),
        ("digest", "<u8", (2,)),  # the document's if this is its only chunk, else the chunk's
        ("split", "u1"),  # 0: by hash; else 1 + the index of the split
        ("skip", "u1"),  # 0: good; else 1 + the index of the reason
        ("first", "?"),
        ("last", "?"),
    ]
)
_PACKED_RECORD = struct.Struct("<QQQ16sBB??")  # one RECORD
TOKENS, RECORDS, NAMES = "tokens.bin", "records.bin", "names.jsonl"  # a name for each document that ends in the part
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


def make_parts(spans: Iterable[Span], part_bytes: int) -> list[Part]:
    """Spans in order, grouped into parts of about `part_bytes`."""
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
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_part(part: Part, folder: Path, tokenizer: Tokenizer) -> None:
    """Read and tokenize a part into `folder`."""
    with written_folder(folder / part.name) as aside, ExitStack() as files:
        opened = [files.enter_context(open_synced(aside / name)) for name in (TOKENS, RECORDS, NAMES)]
        writer = _PartWriter(tokenizer, *opened)
        for span in part.spans:
            writer.write_span(span)
        writer.flush()


class _PartWriter:
    """Appends chunks of documents to a part's open files.

    Chunks are buffered and encoded together, because a call per short document would cost more than the encoding.
    The tokens of a document that turns out to be bad stay in the part; `merge_parts` leaves them out.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: BinaryIO, records: BinaryIO, names: BinaryIO) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._eos = np.asarray([tokenizer.eos_id], np.uint32)
        self._tokens, self._records, self._names = tokens, records, names
        self._buffer: list[tuple[str, tuple[Any, ...]]] = []  # the text of a chunk, and its record without tokens
        self._buffered_bytes = 0

    def write_span(self, span: Span) -> None:
        split = 0 if span.split is None else 1 + SPLITS.index(span.split)
        try:
            for document in read_span(span):
                self._write_document(document, split)
        except Skip as skip:  # the span itself is damaged from here on
            self._write_document(SourceDocument(span.name, reason=str(skip)), split)

    def _write_document(self, document: SourceDocument, split: int) -> None:
        first, reason, chunk = document.first, document.reason, Chunk(b"")
        try:
            for following in document.chunks:
                if chunk.data:
                    self._write_chunk(chunk, split, first, False)
                    first = False
                chunk = following
        except Skip as skip:
            reason = str(skip)
        self._write_chunk(chunk, split, first, document.last, reason)
        if document.last:
            # Bytes of a file's name that are not UTF-8 are written as backslash escapes.
            name = os.fsencode(document.name).decode("utf-8", errors="backslashreplace")
            self._names.write(_JSON.encode(name).encode() + b"\n")

    def _write_chunk(self, chunk: Chunk, split: int, first: bool, last: bool, reason: str | None = None) -> None:
        text, words = "", 0
        try:
            text = "" if reason else chunk.text()
            words = chunk.words(text)
        except Skip as skip:
            reason = str(skip)
        own = digest(chunk.data)
        record = (len(chunk.data), words, digest(own) if first and last else own, split, SKIP[reason], first, last)
        self._buffer.append((text, record))
        self._buffered_bytes += 64 + len(chunk.data)
        if self._buffered_bytes >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Encode and write the buffered chunks."""
        encoded = self._tokenizer.encode_many([text for text, _ in self._buffer])
        written = [np.zeros(0, np.uint32)]
        for ids, (_, record) in zip(encoded, self._buffer, strict=True):
            written += (ids, self._eos) if record[-1] else (ids,)
            self._records.write(_PACKED_RECORD.pack(len(ids) + record[-1], *record))
        ids = np.concatenate(written)
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(f"the vocabulary made id {ids.max()}, outside its own size {self._tokenizer.vocab_size}")
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self._buffer, self._buffered_bytes = [], 0
