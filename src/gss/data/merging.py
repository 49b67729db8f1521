"""Merging: parts, from disk or from URLs, become the files of a corpus.

`merge_parts` first makes a table with a row per document and decides which documents are kept and in which split. It
then reads each token once and writes it to its split. The result depends only on the contents of the parts, in order.
Memory is bounded by the largest part, whatever the number of documents: the table is memory-mapped, and duplicates are
found in buckets of digests.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gss.data.chunks import DUPLICATE, EMPTY, REASONS, digest
from gss.data.formats import open_file
from gss.data.parts import NAMES, RECORD, RECORDS, SKIP, TOKENS, token_dtype
from gss.data.shards import SPLITS, check_ids
from gss.io.files import file_facts, open_synced

ROWS = 1 << 16  # documents handled at once
BUCKET = 1 << 21  # documents whose digests are compared at once
COPY = 1 << 20  # tokens copied at once, rounded to whole chunks
NAMED = 10  # documents named for each reason to leave some out

Table = npt.NDArray[Any]  # of RECORD, a row per document


def merge_parts(
    parts: list[str], table_path: Path, out: Path, vocab_size: int, valid: float, test: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write every good document to its split in `out`; returns the splits' facts, and what was left out and why.

    For documents without a split of their own, a hash of their contents decides, with the shares `valid` and `test`.
    """
    dtype = token_dtype(vocab_size)
    count, by_hash = _write_table(parts, table_path, dtype.itemsize, valid, test)
    table = np.memmap(table_path, RECORD, "r+", shape=(count,)) if count else np.zeros(0, RECORD)
    _drop_duplicates(table)
    if by_hash:
        _fill_splits(table, {"train": 1.0 - valid - test, "valid": valid, "test": test})
    left_out: dict[str, Any] = {reason: {"documents": 0, "first": []} for reason in REASONS}
    begun = 0  # documents that begin in the parts read so far
    with ExitStack() as files:
        splits = [_SplitWriter(out, split, vocab_size, files) for split in SPLITS]
        for part in parts:
            chunks = _records(part, dtype.itemsize)
            document = begun - 1 + np.cumsum(chunks["first"])
            begun += int(chunks["first"].sum())
            skip, split = table["skip"][document], table["split"][document]
            counts, goes_to = chunks["tokens"].astype(np.int64), np.where(skip == 0, split, len(SPLITS))
            cuts = np.flatnonzero(np.diff(np.cumsum(counts) // COPY)) + 1
            with open_file(f"{part}/{TOKENS}") as file:
                for sizes, places in zip(np.split(counts, cuts), np.split(goes_to, cuts), strict=True):
                    ids = np.frombuffer(file.read(int(sizes.sum()) * dtype.itemsize), dtype)
                    for number, writer in enumerate(splits):
                        writer.add(ids[np.repeat(places, sizes) == number])
            with open_file(f"{part}/{NAMES}") as file:
                for line, reason, number in zip_longest(file, skip[chunks["last"]], split[chunks["last"]]):
                    if line is None or reason is None or not line.endswith(b"\n"):
                        raise _altered(part, NAMES)
                    if not reason:
                        splits[number].names.write(line)
                        continue
                    entry = left_out[REASONS[reason - 1]]
                    entry["documents"] += 1
                    if len(entry["first"]) < NAMED:
                        entry["first"].append(json.loads(line))
    facts = {split: found for split, writer in zip(SPLITS, splits, strict=True) if (found := writer.finish(table))}
    return facts, {reason: entry for reason, entry in left_out.items() if entry["documents"]}


def _batches(table: Table, split: str | None = None) -> Iterator[Table]:
    """The rows of a table, or the good ones of a split, a bounded number at a time."""
    for low in range(0, len(table), ROWS):
        rows = table[low : low + ROWS]
        yield rows if split is None else rows[(rows["split"] == SPLITS.index(split)) & (rows["skip"] == 0)]


def _write_table(parts: list[str], path: Path, itemsize: int, valid: float, test: float) -> tuple[int, bool]:
    """Write a row per document of all parts; returns the number of rows, and whether a hash chose any split."""
    count, by_hash, begun = 0, False, np.zeros(0, RECORD)  # chunks of a document that continues in the next part
    with open(path, "wb") as table:
        for part in parts:
            chunks = np.concatenate([begun, _records(part, itemsize)])
            # A document begins exactly where the one before ends.
            if (chunks["first"] != np.append(True, chunks["last"])[:-1]).any():
                raise _altered(part, RECORDS)
            complete = int(np.flatnonzero(np.append(True, chunks["last"]))[-1])
            chunks, begun = chunks[:complete], chunks[complete:]
            firsts = np.flatnonzero(chunks["first"])
            rows = chunks[firsts]
            if len(rows):
                for field in ("tokens", "bytes", "words"):
                    rows[field] = np.add.reduceat(chunks[field], firsts)
                rows["skip"] = np.maximum.reduceat(chunks["skip"], firsts)
            rows["skip"][(rows["skip"] == 0) & (rows["words"] == 0)] = SKIP[EMPTY]
            ends = np.append(firsts[1:], len(chunks))
            for i in np.flatnonzero(~rows["last"]).tolist():
                own = chunks["digest"][firsts[i] : ends[i]].tobytes()
                rows["digest"][i] = np.frombuffer(digest(own), "<u8")
            places = rows["digest"][:, 0] / 2.0**64
            held_out = np.where(places < valid, SPLITS.index("valid"), SPLITS.index("train"))
            held_out[(places >= valid) & (places < valid + test)] = SPLITS.index("test")
            by_hash |= bool((rows["split"] == 0).any())
            rows["split"] = np.where(rows["split"] == 0, held_out, rows["split"] - 1)
            table.write(rows.tobytes())
            count += len(rows)
    if len(begun):
        raise _altered(parts[-1], RECORDS)
    return count, by_hash


def _records(part: str, itemsize: int) -> Table:
    """A part's records, checked against the size of its tokens: the part may come from another machine."""
    with open_file(f"{part}/{RECORDS}") as file:
        data = file.read()
    found = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    if found.nbytes != len(data) or (found["skip"] > len(REASONS)).any() or (found["split"] > len(SPLITS)).any():
        raise _altered(part, RECORDS)
    with open_file(f"{part}/{TOKENS}") as file:
        if file.seek(0, 2) != itemsize * int(found["tokens"].sum()):
            raise _altered(part, TOKENS)
    return found


def _altered(part: str, name: str) -> ValueError:
    return ValueError(f"{part}/{name} has been altered: copy this part again")


def _drop_duplicates(table: Table) -> None:
    """Mark all but one of the documents with equal contents; a copy in test is kept before one in valid or train."""
    buckets = max(1, -(-len(table) // BUCKET))
    rank = np.asarray([("test", "valid", "train").index(split) for split in SPLITS])
    for bucket in range(buckets):
        found = [np.zeros(0, np.int64)]
        for number, rows in enumerate(_batches(table)):
            here = (rows["digest"][:, 1] % np.uint64(buckets) == bucket) & (rows["skip"] == 0)
            found.append(number * ROWS + np.flatnonzero(here))
        places = np.concatenate(found)
        digests = table["digest"][places]
        order = np.lexsort((places, rank[table["split"][places]], digests[:, 1], digests[:, 0]))
        ordered = digests[order]
        again = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1)) + 1
        table["skip"][places[order[again]]] = SKIP[DUPLICATE]


def _fill_splits(table: Table, shares: dict[str, float]) -> None:
    """Give a split that has a share but no document the one whose length is nearest to that share."""
    good = table["skip"] == 0
    counts = np.bincount(table["split"][good], minlength=len(SPLITS))
    for split, share in shares.items():
        number = SPLITS.index(split)
        # A held-out split never takes the last document of another one; training comes first and does.
        spare = np.flatnonzero(good & (counts > (split != "train"))[table["split"]])
        if share and not counts[number] and len(spare):
            tokens = table["tokens"][spare].astype(np.float64)
            chosen = spare[np.abs(np.log(tokens / (share * table["tokens"][good].sum()))).argmin()]
            counts[table["split"][chosen]] -= 1
            counts[number] += 1
            table["split"][chosen] = number


class _SplitWriter:
    def __init__(self, out: Path, split: str, vocab_size: int, files: ExitStack) -> None:
        self._split = split
        self._paths = {name: out / f"{split}.{name}" for name in ("tokens", "documents", "names")}
        self._tokens: BinaryIO = files.enter_context(open_synced(self._paths["tokens"]))
        self.names: BinaryIO = files.enter_context(open_synced(self._paths["names"]))
        self._hashed, self._unigrams = hashlib.sha256(), np.zeros(vocab_size, np.int64)

    def add(self, ids: npt.NDArray[Any]) -> None:
        if len(ids):
            check_ids(ids, len(self._unigrams), self._paths["tokens"].name)
            self._tokens.write(ids.data)
            self._hashed.update(ids.data)
            self._unigrams += np.bincount(ids, minlength=len(self._unigrams))

    def finish(self, table: Table) -> dict[str, Any] | None:
        """Write the index; returns the split's facts, or None, and no files, if it has no documents."""
        count = longest = 0
        totals = dict.fromkeys(("tokens", "bytes", "words"), 0)
        with open_synced(self._paths["documents"]) as file:
            for rows in _batches(table, self._split):
                file.write((np.uint64(totals["tokens"]) + np.cumsum(rows["tokens"])).astype("<u8").tobytes())
                count += len(rows)
                longest = max(longest, int(rows["tokens"].max(initial=0)))
                for field in totals:
                    totals[field] += int(rows[field].sum())
            for field, half in (("bytes", ...), ("words", ...), ("digest", (..., 0)), ("digest", (..., 1))):
                for rows in _batches(table, self._split):
                    file.write(rows[field][half].tobytes())
        if not count:
            for path in self._paths.values():
                path.unlink()
            return None
        text_tokens = totals["tokens"] - count
        shares = self._unigrams[self._unigrams > 0] / totals["tokens"]
        return {
            "documents": count,
            **totals,
            "longest": longest,
            "tokens_per_byte": text_tokens / totals["bytes"],
            "tokens_per_word": text_tokens / totals["words"],
            "unigram_entropy": float(-(shares * np.log(shares)).sum()),
            "files": {
                path.name: file_facts(path, self._hashed.hexdigest() if name == "tokens" else None)
                for name, path in self._paths.items()
            },
        }
