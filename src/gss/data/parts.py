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
from gss.data.blocks import BLOCK, REASONS, Block, Skip, document_digest
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
_JSON = json.JSONEncoder()
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
            writer.write_waiting()
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
    """Appends documents to a part's open files; a document that turns out bad is taken back.

    Short documents wait until there are enough of them to be encoded at once; a call for each would cost more than
    the work itself.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: BinaryIO, records: BinaryIO, names: TextIO) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._eos = np.asarray([tokenizer.eos_id], np.uint32)
        self._tokens, self._records, self._names = tokens, records, names
        self.fragment_digests: dict[int, str] = {}  # by the number of the record
        self._count = 0
        self._waiting: list[tuple[str, Block, int]] = []  # name, text, split
        self._waiting_bytes = 0

    def write_piece(self, piece: Piece, split: int) -> None:
        try:
            for fragment in read_piece(piece):
                if fragment.first and fragment.last and isinstance(fragment.blocks, tuple) and fragment.blocks:
                    self._wait(fragment.name, fragment.blocks[0], split)
                else:
                    self._write_fragment(fragment, split)
        except Skip as skip:  # the piece itself is damaged from here on
            self._write_skip(Fragment(piece.name), split, skip)

    def _wait(self, name: str, block: Block, split: int) -> None:
        self._waiting.append((name, block, split))
        self._waiting_bytes += len(block.data)
        if self._waiting_bytes >= BLOCK:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write the short documents that wait."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        records = np.zeros(len(waiting), RECORD)
        records["first"] = records["last"] = True
        texts = []
        for number, (_, block, split) in enumerate(waiting):
            records["split"][number] = split
            try:
                text = block.text()
                if not text.strip():
                    raise Skip(blocks.EMPTY)
            except Skip as skip:
                records["skip"][number] = 1 + REASONS.index(skip.reason)
            else:
                texts.append(text)
        good = np.flatnonzero(records["skip"] == 0)
        chosen = [waiting[number] for number in good]
        encoded = self._tokenizer.encode_many(texts)
        records["tokens"][good] = [len(ids) + 1 for ids in encoded]
        records["bytes"][good] = [len(block.data) for _, block, _ in chosen]
        records["words"][good] = [len(text.split()) for text in texts]
        digests = b"".join(document_digest(block.digest()) for _, block, _ in chosen)
        records["digest"][good] = np.frombuffer(digests, "<u8").reshape(-1, 2)
        if encoded:
            ids = np.concatenate([part for ids in encoded for part in (ids, self._eos)])
            self._write_ids(ids, f"{chosen[0][0]} to {chosen[-1][0]}")
        self._append(records, [name for name, _, _ in waiting])

    def _write_fragment(self, fragment: Fragment, split: int) -> None:
        self.write_waiting()
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
                tokens += self._write_ids(self._eos, fragment.name)
        except Skip as skip:
            self._tokens.seek(start)
            self._tokens.truncate()
            self._write_skip(fragment, split, skip)
            return
        self._write_record(fragment, split, tokens=tokens, bytes=size, words=words, digests=bytes(digests))

    def _write_ids(self, ids: npt.NDArray[Any], name: str) -> int:
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"{name}: the vocabulary made id {int(ids.max())}, outside its own size {self._tokenizer.vocab_size}"
            )
        self._tokens.write(ids.astype(self._dtype).tobytes())
        return int(ids.size)

    def _write_skip(self, fragment: Fragment, split: int, skip: Skip) -> None:
        self.write_waiting()
        self._write_record(fragment, split, skip=1 + REASONS.index(skip.reason))

    def _write_record(self, fragment: Fragment, split: int, digests: bytes = b"", **values: int) -> None:
        record = np.zeros(1, RECORD)
        for field, value in {**values, "split": split, "first": fragment.first, "last": fragment.last}.items():
            record[field] = value
        if fragment.first and fragment.last:
            record["digest"] = np.frombuffer(document_digest(digests), "<u8")
        else:
            self.fragment_digests[self._count] = digests.hex()
        self._append(record, [fragment.name])

    def _append(self, records: npt.NDArray[Any], names: list[str]) -> None:
        self._records.write(records.tobytes())
        self._names.writelines(_JSON.encode(_printable(name)) + "\n" for name in names)
        self._count += len(records)


def _printable(name: str) -> str:
    """A name as it is, with a backslash before the bytes of a file's name that are not UTF-8."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", errors="backslashreplace")
