"""Long documents in chunks: where a stream of UTF-8 bytes may be cut, and what is known of each chunk.

A document of up to CHUNK bytes is one chunk. A longer one is cut near every multiple of CHUNK, at the end of a line if
one is within reach, so that memory is bounded and any range of chunks can be read on its own, by any process, with the
same result. The cuts depend on the document's bytes alone. Knows nothing of tokens.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

CHUNK = 1 << 18
REACH = 1 << 13  # how far past a multiple of CHUNK a cut is looked for

# Cuts from best to worst: between two full lines; before any line that starts with text; before a space. Vocabularies
# split words there anyway, so that cutting changes no token for the usual ones. Each comes with the number of bytes
# before the multiple at which its match may begin, so that it ends at the multiple or after.
_CUTS = ((re.compile(rb"\S\n(?=\S)"), 2), (re.compile(rb"\n(?=\S)"), 1), (re.compile(rb"\S(?= )"), 1))
_BEFORE = 2


class Skip(Exception):  # noqa: N818  (not an error: a document that is left out, and counted)
    """A document that cannot be used; the reason is one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


EMPTY, BINARY, INVALID_UTF8 = "empty", "binary", "invalid UTF-8"
INVALID_ROW, NO_TEXT, ROW_TOO_LONG = "invalid JSON", "no text field", "row too long"
UNREADABLE, NO_SOURCE, DUPLICATE = "unreadable", "no source file", "duplicate"
REASONS = (EMPTY, BINARY, INVALID_UTF8, INVALID_ROW, NO_TEXT, ROW_TOO_LONG, UNREADABLE, NO_SOURCE, DUPLICATE)


@dataclass(frozen=True)
class Chunk:
    """Part of a document: whole characters, and whole words except where no space was within reach."""

    data: bytes
    inside_word: bool = False  # the document's previous chunk ended in the middle of a word

    def text(self) -> str:
        """The chunk as text; Skip where it is not UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            raise Skip(INVALID_UTF8) from None

    def words(self) -> int:
        """The number of words that start in this chunk, as str.split() finds them."""
        text = self.text()
        count = len(text.split())
        return count - 1 if self.inside_word and not text[0].isspace() else count

    def digest(self) -> bytes:
        """The chunk's identity; a document's is the digest of its chunks' digests."""
        return digest(self.data)


def digest(data: bytes) -> bytes:
    """16 bytes that stand for these."""
    return hashlib.blake2b(data, digest_size=16).digest()


def chunk_count(size: int) -> int:
    """How many chunks a document of so many bytes has at most."""
    return max(1, -(-size // CHUNK))


def read_offset(first: int) -> int:
    """Where in the document to start reading for the chunks from `first` on."""
    return max(0, first * CHUNK - _BEFORE)


def cut_chunks(stream: BinaryIO, first: int = 0, last: int | None = None) -> Iterator[Chunk]:
    """The chunks [first, last) of a document, from a stream that stands at `read_offset(first)`."""
    window = _Window(stream, read_offset(first))
    start, inside_word = (0, False) if first == 0 else window.cut(first)
    index = first
    while True:
        index += 1
        end, ends_inside_word = window.cut(index)
        data = window.take(start, end)
        if data:
            yield Chunk(data, inside_word)
        if index == last or window.ended_at(end):
            return
        start, inside_word = end, ends_inside_word


class _Window:
    """The bytes between the last cut and the next, read as needed."""

    def __init__(self, stream: BinaryIO, offset: int) -> None:
        self._stream = stream
        self._offset = offset  # the document's position of the first byte held
        self._held = bytearray()
        self._ended = False

    def _fill(self, upto: int) -> None:
        while not self._ended and self._offset + len(self._held) < upto:
            read = self._stream.read(1 << 20)
            self._held += read
            self._ended = not read

    def cut(self, index: int) -> tuple[int, bool]:
        """Where chunk `index` starts, and whether that is inside a word; the document's end if it is near."""
        target = index * CHUNK
        self._fill(target + REACH + 4)
        end = self._offset + len(self._held)
        if end <= target:
            return end, False
        held_target, high = target - self._offset, target + REACH - self._offset
        for pattern, before in _CUTS:
            found = pattern.search(self._held, held_target - before, high)
            if found is not None:
                return self._offset + found.end(), False
        if end <= target + REACH:
            return end, False
        position = high
        while position < high + 3 and self._held[position : position + 1] and self._held[position] & 0xC0 == 0x80:
            position += 1  # the inside of a UTF-8 character
        return self._offset + position, True

    def take(self, start: int, end: int) -> bytes:
        data = bytes(self._held[start - self._offset : end - self._offset])
        keep = max(self._offset, end - _BEFORE)
        del self._held[: keep - self._offset]
        self._offset = keep
        return data

    def ended_at(self, position: int) -> bool:
        self._fill(position + 1)
        return self._ended and position >= self._offset + len(self._held)


def stream_of(contents: Iterable[bytes]) -> BinaryIO:
    """A stream over bytes that are made as they are read."""
    return cast(BinaryIO, io.BufferedReader(_Joined(contents), 1 << 17))


class _Joined(io.RawIOBase):
    def __init__(self, contents: Iterable[bytes]) -> None:
        self._contents = iter(contents)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._rest:
            content = next(self._contents, None)
            if content is None:
                return 0
            self._rest = memoryview(content)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
