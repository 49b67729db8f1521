"""Parts: what one process makes of one unit of work, a folder with token ids and a record a document.

A part appears under its final name only when it is complete, so that a part that exists is a part that is done. Knows
nothing of other parts: splits by hash, duplicates and long documents that span parts are settled by `merge`.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import numpy.typing as npt

from gss.data import blocks
from gss.data.blocks import REASONS, Skip, document_digest
from gss.data.readers import Fragment, Piece, read_piece
from gss.data.tokenizer import Tokenizer

# A record a fragment. `digest` is the document's for a whole one; a fragment's block digests are in digests.json.
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
TOKENS, RECORDS, NAMES, DIGESTS = "tokens.bin", "records.bin", "names.jsonl", "digests.json"


@dataclass(frozen=True)
class Unit:
    """Consecutive pieces that one process turns into one part."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes to read, for progress."""
        return sum(piece.size for piece in self.pieces)

    @property
    def part_name(self) -> str:
        """The part's folder."""
        return f"part-{self.number:06d}"


def make_units(pieces: Iterable[Piece], unit_bytes: int) -> list[Unit]:
    """Pieces in order, gathered until a unit is about `unit_bytes` large."""
    units: list[Unit] = []
    gathered: list[Piece] = []
    size = 0
    for piece in pieces:
        if gathered and (size + piece.size > unit_bytes or len(gathered) >= 4096):
            units.append(Unit(len(units), tuple(gathered)))
            gathered, size = [], 0
        gathered.append(piece)
        size += piece.size
    if gathered:
        units.append(Unit(len(units), tuple(gathered)))
    return units


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary."""
    if vocab_size > 2**32:
        raise ValueError(f"a vocabulary of {vocab_size} ids does not fit 32 bits")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_part(unit: Unit, folder: Path, tokenizer: Tokenizer, splits: tuple[str, ...]) -> None:
    """Read and tokenise a unit into `folder`, unless its part is there already."""
    final = folder / unit.part_name
    if final.is_dir():
        return
    aside = folder / f"{unit.part_name}.{os.getpid()}.tmp"
    try:
        aside.mkdir()
        with (
            open(aside / TOKENS, "wb") as tokens,
            open(aside / RECORDS, "wb") as records,
            open(aside / NAMES, "w", encoding="utf-8", newline="\n") as names,
        ):
            writer = _PartWriter(tokenizer, tokens, records, names)
            for piece in unit.pieces:
                writer.write_piece(piece, 0 if piece.split is None else 1 + splits.index(piece.split))
            for file in (tokens, records, names):
                file.flush()
                os.fsync(file.fileno())
        write_synced(aside / DIGESTS, json.dumps(writer.fragment_digests).encode())
        os.rename(aside, final)
    except OSError as error:
        explain_full_disk(error, folder)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file so that it survives a crash once this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def explain_full_disk(error: OSError, folder: Path) -> None:
    """Raise an error that says what to do, where this one says that there is no room."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(
            error.errno,
            f"no room left to write in {folder} ({error.strerror}): free some and run the same command again; "
            "finished parts are kept and it continues after them",
        ) from error


class _PartWriter:
    """Appends documents to a part's open files; a document that turns out bad is taken back."""

    def __init__(self, tokenizer: Tokenizer, tokens: BinaryIO, records: BinaryIO, names: TextIO) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._tokens, self._records, self._names = tokens, records, names
        self.fragment_digests: dict[int, str] = {}  # by the number of the record
        self._count = 0

    def write_piece(self, piece: Piece, split: int) -> None:
        try:
            for fragment in read_piece(piece):
                self._write_fragment(fragment, split)
        except Skip as skip:  # the piece itself is damaged from here on
            self._write_record(Fragment(piece.name), split, skip=1 + REASONS.index(skip.reason))

    def _write_fragment(self, fragment: Fragment, split: int) -> None:
        start = self._tokens.tell()
        tokens = size = words = 0
        digests = bytearray()
        try:
            for block in fragment.blocks:
                tokens += self._write_ids(self._tokenizer.encode(block.text()), fragment.name)
                size += len(block.data)
                words += block.words()
                digests += block.digest()
            if fragment.first and fragment.last and not words:
                raise Skip(blocks.EMPTY)
            if fragment.last:
                tokens += self._write_ids(np.asarray([self._tokenizer.eos_id]), fragment.name)
        except Skip as skip:
            self._tokens.seek(start)
            self._tokens.truncate()
            self._write_record(fragment, split, skip=1 + REASONS.index(skip.reason))
            return
        self._write_record(fragment, split, tokens=tokens, bytes=size, words=words, digests=bytes(digests))

    def _write_ids(self, ids: npt.NDArray[Any], name: str) -> int:
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"{name}: the vocabulary made id {int(ids.max())}, outside its own size {self._tokenizer.vocab_size}"
            )
        self._tokens.write(ids.astype(self._dtype).tobytes())
        return int(ids.size)

    def _write_record(self, fragment: Fragment, split: int, skip: int = 0, digests: bytes = b"", **counts: int) -> None:
        record = np.zeros(1, RECORD)
        for field, value in counts.items():
            record[field] = value
        record["split"], record["skip"] = split, skip
        record["first"], record["last"] = fragment.first, fragment.last
        if fragment.first and fragment.last:
            record["digest"] = np.frombuffer(document_digest(digests), "<u8")
        else:
            self.fragment_digests[self._count] = digests.hex()
        self._records.write(record.tobytes())
        self._names.write(json.dumps(fragment.name) + "\n")
        self._count += 1
