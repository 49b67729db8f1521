"""Long documents in chunks: where UTF-8 bytes may be cut, and the record of each chunk.

A document of up to CHUNK bytes is one chunk. A longer one is cut near every multiple of CHUNK, at the end of a line if
there is one nearby. Memory is therefore bounded, and any process can read any range of chunks on its own with the same
result. The cuts depend only on the document's bytes. Independent of tokens.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

CHUNK = 1 << 18
REACH = 1 << 13  # how far past a multiple of CHUNK to look for a cut

# Cuts from best to worst: between two full lines; before a line that starts with text; before a space. The usual
# vocabularies split there anyway, so cutting changes no token. The number is how many bytes before the multiple a match
# may begin, so that it ends at the multiple or after.
_CUTS = ((re.compile(rb"\S\n(?=\S)"), 2), (re.compile(rb"\n(?=\S)"), 1), (re.compile(rb"\S(?= )"), 1))
_BEFORE = 2


class Skip(Exception):  # noqa: N818  (not an error: the document is left out and counted)
    """A document that cannot be used; the argument is one of REASONS."""


EMPTY, BINARY, INVALID_UTF8 = "empty", "binary", "invalid UTF-8"
INVALID_ROW, NO_TEXT, ROW_TOO_LONG = "invalid JSON", "no text field", "row too long"
UNREADABLE, NO_SOURCE, DUPLICATE = "unreadable", "no source file", "duplicate"
REASONS = (EMPTY, BINARY, INVALID_UTF8, INVALID_ROW, NO_TEXT, ROW_TOO_LONG, UNREADABLE, NO_SOURCE, DUPLICATE)


@dataclass(frozen=True)
class Chunk:
    """Part of a document: whole characters, and whole words unless there was no space within reach."""

    data: bytes
    inside_word: bool = False  # the document's previous chunk ended in the middle of a word

    def text(self) -> str:
        """The chunk as text; Skip if it is not UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            raise Skip(INVALID_UTF8) from None

    def words(self, text: str) -> int:
        """The number of words, as by str.split(), that start in this chunk; `text` is its text."""
        return len(text.split()) - (self.inside_word and bool(text) and not text[0].isspace())


def digest(data: bytes) -> bytes:
    """A 16-byte digest. A document is identified by the digest of its chunks' digests."""
    return hashlib.blake2b(data, digest_size=16).digest()


def chunk_count(size: int) -> int:
    """The largest number of chunks that a document of this size can have."""
    return max(1, -(-size // CHUNK))


def read_offset(first: int) -> int:
    """Where in the document to start reading for the chunks from `first` on."""
    return max(0, first * CHUNK - _BEFORE)


def cut_chunks(blocks: Iterable[bytes], first: int = 0, last: int | None = None) -> Iterator[Chunk]:
    """The chunks [first, last) of a document, from its bytes in blocks of any size from `read_offset(first)` on."""
    unread = iter(blocks)
    offset, held = read_offset(first), bytearray()  # the document's bytes from `offset` on that have not been yielded
    start, inside_word = 0, False
    for index in count(first):
        target = index * CHUNK - offset
        while len(held) < target + REACH + 4 and (block := next(unread, None)) is not None:
            held += block
        end, ends_inside_word = _cut(held, target) if index else (0, False)
        if index > first:
            if end > start:
                yield Chunk(bytes(held[start:end]), inside_word)
            if index == last or end == len(held):  # bytes held beyond a cut belong to the next chunk
                return
        drop = max(0, end - _BEFORE)
        del held[:drop]
        offset, start, inside_word = offset + drop, end - drop, ends_inside_word


def _cut(held: bytearray, target: int) -> tuple[int, bool]:
    """Where to cut at `target` or soon after (or the end, if it is near), and whether that is inside a word."""
    if len(held) <= target:
        return len(held), False
    high = target + REACH
    for pattern, before in _CUTS:
        if found := pattern.search(held, target - before, high):
            return found.end(), False
    if len(held) <= high:
        return len(held), False
    while high < target + REACH + 3 and high < len(held) and held[high] & 0xC0 == 0x80:
        high += 1  # inside a UTF-8 character
    return high, True
