"""Merge: from finished parts to the files of a corpus, one set per split, with duplicates dropped.

Reads the parts in order as one long row of tokens and documents. Which tokens lie where in which file is known only
when every part is there, which is why they are copied. Memory is bounded whatever the number of documents: they are
handled in batches of rows, duplicates found in buckets of digests. The result depends on the parts' contents alone.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gss.data import chunks
from gss.data.chunks import REASONS, digest
from gss.data.parts import DIGESTS, NAMES, RECORD, RECORDS, SKIP, TOKENS, open_synced, token_dtype
from gss.data.shards import SPLITS, file_hash, unigram_entropy

# A document of the table of all. `start` counts the tokens of all parts, one after another.
DOCUMENT = np.dtype(
    [("start", "<u8"), *((name, RECORD[name]) for name in ("tokens", "bytes", "words", "digest", "split", "skip"))]
)
ROWS = 1 << 16  # documents handled at once
BUCKET = 1 << 21  # documents whose digests are compared at once
COPY = 1 << 22  # tokens copied at once
NAMED = 10  # documents named for each reason that left some out


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
        held_out = np.where(place < self.valid, valid, np.where(place < self.valid + self.test, test, train))
        return held_out.astype(np.uint8)


def merge_parts(
    parts: list[Path], table_path: Path, out: Path, vocab_size: int, shares: SplitShares
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write every good document to its split in `out`; returns the splits' facts, and what was left out and why."""
    count = _write_table(parts, table_path, shares)
    table = np.memmap(table_path, DOCUMENT, "r+", shape=(count,)) if count else np.zeros(0, DOCUMENT)
    _drop_duplicates(table)
    left_out = _write_names(table, parts, out)
    tokens = _PartTokens(parts, token_dtype(vocab_size))
    facts = {split: _write_split(table, split, tokens, out, vocab_size) for split in SPLITS}
    return {split: found for split, found in facts.items() if found}, left_out


def _write_table(parts: list[Path], path: Path, shares: SplitShares) -> int:
    """A row for each document of all parts, those that reach over parts joined; returns how many."""
    count = position = 0
    joined: npt.NDArray[Any] | None = None  # the document whose parts are being read
    digests = b""
    with open(path, "wb") as table:
        for part in parts:
            records = np.fromfile(part / RECORDS, RECORD)
            chunk_digests = json.loads((part / DIGESTS).read_text())
            rows = np.zeros(len(records), DOCUMENT)
            for field in RECORD.names[:6]:  # type: ignore[index]
                rows[field] = records[field]
            rows["start"] = position + np.cumsum(records["tokens"]) - records["tokens"]
            position += int(records["tokens"].sum())
            keep = np.ones(len(records), bool)
            for i in map(int, chunk_digests):
                if records["first"][i]:
                    joined, digests = rows[i : i + 1].copy(), b""
                else:
                    assert joined is not None
                    for field in ("tokens", "bytes", "words"):
                        joined[field] += rows[field][i]
                    joined["skip"] = np.maximum(joined["skip"], rows["skip"][i])
                digests += bytes.fromhex(chunk_digests[str(i)])
                keep[i] = bool(records["last"][i])
                if keep[i]:
                    if not joined["words"][0]:
                        joined["skip"] = np.maximum(joined["skip"], SKIP[chunks.EMPTY])
                    joined["digest"] = np.frombuffer(digest(digests), "<u8")
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
    rank = np.asarray([("test", "valid", "train").index(split) for split in SPLITS])
    for bucket in range(buckets):
        found = [np.zeros(0, np.int64)]
        for low in range(0, len(table), ROWS):
            rows = table[low : low + ROWS]
            here = (rows["digest"][:, 1] % np.uint64(buckets) == bucket) & (rows["skip"] == 0)
            found.append(low + np.flatnonzero(here))
        places = np.concatenate(found)
        digests = table["digest"][places]
        order = np.lexsort((places, rank[table["split"][places]], digests[:, 1], digests[:, 0]))
        ordered = digests[order]
        again = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1)) + 1
        table["skip"][places[order[again]]] = SKIP[chunks.DUPLICATE]


def _write_names(table: npt.NDArray[Any], parts: list[Path], out: Path) -> dict[str, Any]:
    """Write each split's names of documents; returns what was left out, counted and named."""
    left_out: dict[str, Any] = {reason: {"documents": 0, "first": []} for reason in REASONS}
    names = _document_names(parts)
    with ExitStack() as files:
        opened = [files.enter_context(open_synced(out / f"{split}.names")) for split in SPLITS]
        for low in range(0, len(table), ROWS):
            rows = table[low : low + ROWS]
            for split, skip, name in zip(rows["split"].tolist(), rows["skip"].tolist(), names, strict=False):
                if not skip:
                    opened[split].write(name)
                    continue
                entry = left_out[REASONS[skip - 1]]
                entry["documents"] += 1
                if len(entry["first"]) < NAMED:
                    entry["first"].append(json.loads(name))
    return {reason: entry for reason, entry in left_out.items() if entry["documents"]}


def _document_names(parts: list[Path]) -> Iterator[bytes]:
    """The documents' names in order, each still a line of JSON."""
    for part in parts:
        last = np.fromfile(part / RECORDS, RECORD)["last"]
        with open(part / NAMES, "rb") as lines:
            yield from (line for is_last, line in zip(last, lines, strict=True) if is_last)


def _write_split(
    table: npt.NDArray[Any], split: str, tokens: "_PartTokens", out: Path, vocab_size: int
) -> dict[str, Any] | None:
    """Write a split's tokens and index; returns its facts, or None where it has no documents and leaves no files."""

    def documents() -> Iterator[npt.NDArray[Any]]:
        for low in range(0, len(table), ROWS):
            rows = np.array(table[low : low + ROWS])
            yield rows[(rows["split"] == SPLITS.index(split)) & (rows["skip"] == 0)]

    files = {name: out / f"{split}.{name}" for name in ("tokens", "documents", "names")}
    count = longest = 0
    totals = dict.fromkeys(("tokens", "bytes", "words"), 0)
    unigrams, hashed = np.zeros(vocab_size, np.int64), hashlib.sha256()
    with open_synced(files["tokens"]) as file:
        for rows in documents():
            for ids in tokens.read(rows):
                data = ids.tobytes()
                file.write(data)
                hashed.update(data)
                unigrams += np.bincount(ids, minlength=vocab_size)
            count += len(rows)
            longest = max(longest, int(rows["tokens"].max(initial=0)))
            for field in totals:
                totals[field] += int(rows[field].sum())
    if not count:
        files["tokens"].unlink()
        files["names"].unlink()
        return None
    with open_synced(files["documents"]) as file:
        end = np.uint64(0)
        for rows in documents():
            file.write((end + np.cumsum(rows["tokens"])).astype("<u8").tobytes())
            end += rows["tokens"].sum()
        for column in (("bytes",), ("words",), ("digest", 0), ("digest", 1)):
            for rows in documents():
                values = rows[column[0]] if len(column) == 1 else rows[column[0]][:, column[1]]
                file.write(values.tobytes())
    text_tokens = totals["tokens"] - count
    return {
        "documents": count,
        **totals,
        "longest": longest,
        "tokens_per_byte": text_tokens / totals["bytes"],
        "tokens_per_word": text_tokens / totals["words"],
        "unigram_entropy": unigram_entropy(unigrams),
        "files": {
            path.name: {
                "size": path.stat().st_size,
                "sha256": hashed.hexdigest() if name == "tokens" else file_hash(path),
            }
            for name, path in files.items()
        },
    }


class _PartTokens:
    """The tokens of all parts as if they lay in one file."""

    def __init__(self, parts: list[Path], dtype: np.dtype[Any]) -> None:
        self._parts, self._dtype = parts, dtype
        sizes = [(part / TOKENS).stat().st_size // dtype.itemsize for part in parts]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def read(self, rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """The tokens of documents in order, those that lie one after another together."""
        starts, stops = rows["start"].astype(np.int64), (rows["start"] + rows["tokens"]).astype(np.int64)
        breaks = starts[1:] != stops[:-1]
        firsts, lasts = starts[np.append(True, breaks)[: len(rows)]], stops[np.append(breaks, True)[: len(rows)]]
        for start, stop in zip(firsts.tolist(), lasts.tolist(), strict=True):
            while start < stop:
                number = int(np.searchsorted(self._ends, start, side="right"))
                begin = int(self._ends[number - 1]) if number else 0
                count = min(stop, int(self._ends[number]), start + COPY) - start
                offset = (start - begin) * self._dtype.itemsize
                yield np.fromfile(self._parts[number] / TOKENS, self._dtype, count, offset=offset)
                start += count
