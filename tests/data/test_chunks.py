"""Chunks: cutting loses nothing, needs only the bytes near the cut, and never cuts a character or a line in vain."""

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gss.data import chunks
from gss.data.chunks import CHUNK, REACH, Chunk, Skip, chunk_count, cut_chunks, read_offset


def make(kind: str, size: int) -> bytes:
    chooser = random.Random(size)
    if kind == "lines":
        return "".join("é" * chooser.randrange(1, 60) + "\n" for _ in range(size // 60)).encode()
    if kind == "words":
        return " ".join("ü" * chooser.randrange(1, 30) for _ in range(size // 30)).encode()
    return ("語" * (size // 3)).encode()  # nothing to cut at


@pytest.mark.parametrize("kind", ["lines", "words", "solid"])
@pytest.mark.parametrize("size", [100, CHUNK - 5, CHUNK + 7, 3 * CHUNK + REACH // 2, 5 * CHUNK])
def test_any_range_of_chunks_read_alone_is_the_same(kind: str, size: int) -> None:
    data = make(kind, size)
    whole = list(cut_chunks(io.BytesIO(data)))
    assert b"".join(chunk.data for chunk in whole) == data
    assert all(len(chunk.data) <= CHUNK + REACH + 3 for chunk in whole)
    for step in (1, 2):
        found = []
        for first in range(0, chunk_count(len(data)), step):
            stream = io.BytesIO(data)
            stream.seek(read_offset(first))
            last = first + step if first + step < chunk_count(len(data)) else None
            found += list(cut_chunks(stream, first, last))
        assert found == whole
    # However the stream hands its bytes out.
    odd = (data[i : i + 70_001] for i in range(0, len(data), 70_001))
    assert list(cut_chunks(odd)) == whole


@pytest.mark.parametrize("kind", ["lines", "words", "solid"])
def test_words_are_counted_as_in_the_whole_text(kind: str) -> None:
    data = make(kind, 4 * CHUNK)
    found = list(cut_chunks(io.BytesIO(data)))
    assert len(found) > 2
    assert sum(chunk.words(chunk.text()) for chunk in found) == len(data.decode().split())
    assert any(chunk.inside_word for chunk in found) == (kind == "solid")


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.text(min_size=1), st.text("ab \n\x1f\x1b\x85\xa0\u1680\u2003\u200b\u201c\u205f\u3000\u3001é", min_size=1)
    )
)
def test_words_are_those_of_split(text: str) -> None:
    assert Chunk(text.encode(), inside_word=False).words(text) == len(text.split())
    assert Chunk(text.encode(), inside_word=True).words(text) == len(("x" + text).split()) - 1


def test_cuts_fall_between_lines() -> None:
    found = list(cut_chunks(io.BytesIO(make("lines", 4 * CHUNK))))
    assert all(chunk.data.endswith(b"\n") for chunk in found)


def test_blank_lines_stay_together() -> None:
    data = b"x" * (CHUNK - 1) + b"\n\n\n\nyes\nno\n" + b"z" * 10
    found = list(cut_chunks(io.BytesIO(data)))
    assert found[1].data.startswith(b"no\n")


def test_invalid_utf8_is_a_skip() -> None:
    (chunk,) = cut_chunks(io.BytesIO(b"abc\xff"))
    with pytest.raises(Skip) as skip:
        chunk.text()
    assert str(skip.value) == chunks.INVALID_UTF8
