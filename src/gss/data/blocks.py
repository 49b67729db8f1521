"""Long documents in blocks: where a stream of UTF-8 bytes may be cut, and what is known of each block.

A document up to BLOCK bytes is one block. A longer one is cut near every multiple of BLOCK, at a line's end if one
is within reach, so that memory is bounded and any range of blocks can be read on its own, by any process, with the
same result. The cut depends on the document's bytes alone. Knows nothing of tokens.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK = 1 << 18
REACH = 1 << 13  # how far past a multiple of BLOCK a cut is looked for
DIGEST = 16

# Cuts from best to worst: between two full lines; before any line that starts with text; before a space.
# Vocabularies split words there anyway, so that cutting changes no token for the usual ones. Each comes with the
# bytes before the multiple at which its match may begin, so that it ends at the multiple or after.
_CUTS = ((re.compile(rb"\S\n(?=\S)"), 2), (re.compile(rb"\n(?=\S)"), 1), (re.compile(rb"\S(?= )"), 1))
_BEFORE = 2


# What str.split() takes for whitespace: these bytes, and these characters in UTF-8.
_ASCII_SPACES = np.isin(np.arange(256), list(b"\t\n\v\f\r\x1c\x1d\x1e\x1f "))
_WIDE_SPACES = re.compile(
    rb"[\xc2\xe1\xe2\xe3](?:(?<=\xc2)[\x85\xa0]|(?<=\xe1)\x9a\x80|(?<=\xe2)\x80[\x80-\x8a\xa8\xa9\xaf]"
    rb"|(?<=\xe2)\x81\x9f|(?<=\xe3)\x80\x80)"
)


class Skip(Exception):  # noqa: N818  (not an error: a document that is left out, and counted)
    """A document that cannot be used; the reason is one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


EMPTY, BINARY, INVALID_UTF8 = "empty", "binary", "invalid UTF-8"
INVALID_ROW, NO_TEXT, ROW_TOO_LONG = "invalid JSON", "no text field", "row too long"
UNREADABLE, NO_SOURCE, DUPLICATE = "unreadable", "no source file", "duplicate"
REASONS = (
    EMPTY,
    BINARY,
    INVALID_UTF8,
    INVALID_ROW,
    NO_TEXT,
    ROW_TOO_LONG,
    UNREADABLE,
    NO_SOURCE,
    DUPLICATE,
)


class ByteStream(Protocol):
    """The part of a binary file that cutting needs."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; empty at the end."""
        ...


class ChunkStream:
    """A stream over chunks of bytes that are made as they are read."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._rest = chunk
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


@dataclass(frozen=True)
class Block:
    """A piece of a document: whole characters, and whole words except where no space was within reach."""

    data: bytes
    inside_word: bool  # the document's previous block ended in the middle of a word

    def text(self) -> str:
        """The block as text; Skip where it is not UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            raise Skip(INVALID_UTF8) from None

    def words(self) -> int:
        """Words that start in this block, as str.split() finds them."""
        if not self.data.isascii() and _WIDE_SPACES.search(self.data):
            first_is_space = self.text()[0].isspace()
            count = len(self.text().split())
        else:  # only ASCII whitespace: counting bytes is fifty times as fast
            spaces = _ASCII_SPACES[np.frombuffer(self.data, np.uint8)]
            first_is_space = bool(spaces[0])
            count = int(np.count_nonzero(spaces[:-1] > spaces[1:])) + (not first_is_space)
        return count - 1 if self.inside_word and not first_is_space else count

    def digest(self) -> bytes:
        """The block's identity; a document's is the digest of its blocks' digests."""
        return hashlib.blake2b(self.data, digest_size=DIGEST).digest()


def document_digest(block_digests: bytes) -> bytes:
    """A document's identity from its blocks' digests, one after another."""
    return hashlib.blake2b(block_digests, digest_size=DIGEST).digest()


def block_count(size: int) -> int:
    """How many blocks a document of so many bytes has at most."""
    return max(1, -(-size // BLOCK))


def read_offset(first: int) -> int:
    """Where in the document to start reading for the blocks from `first` on."""
    return max(0, first * BLOCK - _BEFORE)


def cut_blocks(stream: ByteStream, first: int = 0, last: int | None = None) -> Iterator[Block]:
    """The blocks [first, last) of a document, from a stream that stands at `read_offset(first)`."""
    window = _Window(stream, read_offset(first))
    start, inside_word = (0, False) if first == 0 else window.cut(first)
    index = first
    while True:
        index += 1
        end, ends_inside_word = window.cut(index)
        data = window.take(start, end)
        if data:
            yield Block(data, inside_word)
        if index == last or window.ended_at(end):
            return
        start, inside_word = end, ends_inside_word


class _Window:
    """The bytes between the last cut and the next, read as needed."""

    def __init__(self, stream: ByteStream, offset: int) -> None:
        self._stream = stream
        self._offset = offset  # the document's position of the first byte held
        self._held = bytearray()
        self._ended = False

    def _fill(self, upto: int) -> None:
        while not self._ended and self._offset + len(self._held) < upto:
            chunk = self._stream.read(1 << 20)
            self._held += chunk
            self._ended = not chunk

    def cut(self, index: int) -> tuple[int, bool]:
        """Where block `index` starts, and whether that is inside a word; the document's end if it is near."""
        target = index * BLOCK
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
