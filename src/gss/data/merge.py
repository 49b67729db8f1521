"""Merge: from finished parts to the final token files, one per split, with duplicates dropped.

Reads the parts in order as one long row of tokens and documents. Memory is bounded whatever their number: documents
are handled in chunks, duplicates found in buckets of digests. The result depends on the parts' contents alone.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gss.data import blocks
from gss.data.blocks import REASONS, document_digest
from gss.data.manifest import SplitWriter
from gss.data.parts import DIGESTS, NAMES, RECORD, RECORDS, TOKENS
from gss.data.sources import SPLITS

DOCUMENT = np.dtype(
    [
        ("start", "<u8"),  # in the row of all parts' tokens
        ("tokens", "<u8"),
        ("bytes", "<u8"),
        ("words", "<u8"),
        ("digest", "<u8", (2,)),
        ("split", "u1"),  # the number of the split
        ("skip", "u1"),  # 0: good; else 1 + the number of the reason
    ]
)
CHUNK = 1 << 16  # documents handled at once
BUCKET = 1 << 21  # documents whose digests are compared at once
COPY = 1 << 22  # tokens copied at once
NAMED = 10  # documents named for each reason that left some out
_DUPLICATE = 1 + REASONS.index(blocks.DUPLICATE)
_EMPTY = 1 + REASONS.index(blocks.EMPTY)


@dataclass(frozen=True)
class SplitShares:
    """The shares of documents that the hash sends to the held-out splits."""

    valid: float
    test: float

    def __post_init__(self) -> None:
        if not (0 <= self.valid < 1 and 0 <= self.test < 1 and self.valid + self.test < 1):
            raise ValueError(f"the shares valid={self.valid} and test={self.test} must leave some for train")

    def assign(self, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        """The number of each document's split, by its contents alone."""
        place = digests / 2.0**64
        valid, test, train = (SPLITS.index(split) for split in ("valid", "test", "train"))
        return np.where(place < self.valid, valid, np.where(place < self.valid + self.test, test, train)).astype(
            np.uint8
        )


def merge_parts(
    parts: list[Path], table_path: Path, writers: dict[str, SplitWriter], dtype: np.dtype[Any], shares: SplitShares
) -> dict[str, Any]:
    """Write every good document to its split; returns what was left out, counted and named."""
    count = _write_table(parts, table_path, shares)
    table = np.memmap(table_path, DOCUMENT, "r+", shape=(count,)) if count else np.zeros(0, DOCUMENT)
    _drop_duplicates(table)
    left_out: dict[str, Any] = {}
    tokens = _TokenRow(parts, dtype)
    names = _document_names(parts)
    for low in range(0, count, CHUNK):
        rows = np.array(table[low : low + CHUNK])
        chunk_names = [next(names) for _ in range(len(rows))]
        for number, split in enumerate(SPLITS):
            chosen = np.flatnonzero((rows["split"] == number) & (rows["skip"] == 0))
            if chosen.size:
                writers[split].add_documents(rows[chosen], [chunk_names[i] for i in chosen])
                for start, stop in _runs(rows[chosen]):
                    for ids in tokens.read(start, stop):
                        writers[split].add_tokens(ids)
        for i in np.flatnonzero(rows["skip"]):
            entry = left_out.setdefault(REASONS[rows["skip"][i] - 1], {"documents": 0, "first": []})
            entry["documents"] += 1
            if len(entry["first"]) < NAMED:
                entry["first"].append(json.loads(chunk_names[i]))
    return {reason: left_out[reason] for reason in REASONS if reason in left_out}


def _write_table(parts: list[Path], path: Path, shares: SplitShares) -> int:
    """A row for each document of all parts, fragments of long ones joined; returns how many."""
    count = position = 0
    joined: npt.NDArray[Any] | None = None  # the long document whose fragments are being read
    digests = b""
    with open(path, "wb") as table:
        for part in parts:
            records = np.fromfile(part / RECORDS, RECORD)
            fragment_digests = json.loads((part / DIGESTS).read_text())
            rows = np.zeros(len(records), DOCUMENT)
            for field in ("tokens", "bytes", "words", "digest", "skip"):
                rows[field] = records[field]
            rows["start"] = position + np.cumsum(records["tokens"]) - records["tokens"]
            position += int(records["tokens"].sum())
            rows["split"] = records["split"]
            keep = np.ones(len(records), bool)
            for i in map(int, fragment_digests):
                if records["first"][i]:
                    joined, digests = rows[i : i + 1].copy(), b""
                else:
                    assert joined is not None
                    for field in ("tokens", "bytes", "words"):
                        joined[field] += rows[field][i]
                    joined["skip"] = np.maximum(joined["skip"], rows["skip"][i])
                digests += bytes.fromhex(fragment_digests[str(i)])
                keep[i] = bool(records["last"][i])
                if keep[i]:
                    if not joined["words"][0]:
                        joined["skip"] = np.maximum(joined["skip"], _EMPTY)
                    joined["digest"] = np.frombuffer(document_digest(digests), "<u8")
                    rows[i] = joined[0]
            rows = rows[keep]
            by_hash = rows["split"] == 0
            rows["split"] -= 1
            rows["split"][by_hash] = shares.assign(rows["digest"][by_hash, 0])
            table.write(rows.tobytes())
            count += len(rows)
    return count


def _drop_duplicates(table: npt.NDArray[Any]) -> None:
    """Mark all but one of the documents with equal contents; a held-out split keeps its own."""
    buckets = max(1, -(-len(table) // BUCKET))
    # test before valid before train: what a corpus holds out stays held out, whole.
    rank = np.asarray([{"test": 0, "valid": 1, "train": 2}[split] for split in SPLITS])
    for bucket in range(buckets):
        found = []
        for low in range(0, len(table), CHUNK):
            rows = table[low : low + CHUNK]
            here = (rows["digest"][:, 1] % np.uint64(buckets) == bucket) & (rows["skip"] == 0)
            found.append(low + np.flatnonzero(here))
        places = np.concatenate(found) if found else np.zeros(0, np.int64)
        digests = table["digest"][places]
        order = np.lexsort((places, rank[table["split"][places]], digests[:, 1], digests[:, 0]))
        ordered = digests[order]
        again = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1)) + 1
        table["skip"][places[order[again]]] = _DUPLICATE


def _document_names(parts: list[Path]) -> Iterator[str]:
    """The documents' names in order, each still a line of JSON."""
    for part in parts:
        last = np.fromfile(part / RECORDS, RECORD)["last"]
        with open(part / NAMES, encoding="utf-8") as lines:
            for is_last, line in zip(last, lines, strict=True):
                if is_last:
                    yield line


def _runs(rows: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Stretches of tokens that lie one after another, joined."""
    starts, stops = rows["start"], rows["start"] + rows["tokens"]
    breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
    firsts, lasts = np.concatenate([[0], breaks]), np.concatenate([breaks - 1, [len(rows) - 1]])
    for first, last in zip(firsts, lasts, strict=True):
        yield int(starts[first]), int(stops[last])


class _TokenRow:
    """The tokens of all parts as if they lay in one file."""

    def __init__(self, parts: list[Path], dtype: np.dtype[Any]) -> None:
        self._parts, self._dtype = parts, dtype
        sizes = [(part / TOKENS).stat().st_size // dtype.itemsize for part in parts]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def read(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            begin = int(self._ends[number - 1]) if number else 0
            count = min(stop, int(self._ends[number]), start + COPY) - start
            offset = (start - begin) * self._dtype.itemsize
            yield np.fromfile(self._parts[number] / TOKENS, self._dtype, count, offset=offset)
            start += count
