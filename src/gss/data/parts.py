"""Parts: each process turns its share of the spans into a part, and `merge_parts` turns all parts into a corpus.

A part is a folder with token ids and a record of each chunk. It gets its final name only when it is complete, so a part
that exists is finished. Parts are independent: splits by hash, duplicates, and documents that extend over several parts
are resolved by `merge_parts`, which reads the parts in order, from disk or from URLs. It first decides which documents
are kept and in which split, then reads each token once and writes it to its split. Memory is bounded by the largest
part, whatever the number of documents, because duplicates are found in buckets of digests. The result depends only on
the contents of the parts.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from gss.data.chunks import CHUNK, DUPLICATE, EMPTY, REASONS, Chunk, Skip, digest
from gss.data.formats import SourceDocument, Span, open_file, read_span
from gss.data.shards import SPLITS, check_ids, unigram_entropy
from gss.data.tokenizer import Tokenizer
from gss.io.files import file_facts, written_folder

# A chunk of a document. Those of a document come one after another, from the first to the last, and may reach over
# parts. A document has the tokens, bytes and words of its chunks together, and is skipped where one of them is.
RECORD = np.dtype(
    [
        ("tokens", "<u8"),
        ("bytes", "<u8"),
        ("words", "<u8"),
        ("digest", "<u8", (2,)),  # the document's where this is all of it, else the chunk's
        ("split", "u1"),  # 0: by hash; else 1 + the number of the split
        ("skip", "u1"),  # 0: good; else 1 + the number of the reason
        ("first", "?"),
        ("last", "?"),
    ]
)
_PACKED_RECORD = struct.Struct("<QQQ16sBB??")  # the same, for one at a time
TOKENS, RECORDS, NAMES = "tokens.bin", "records.bin", "names.jsonl"  # a name for each record that is the last
SKIP: dict[str | None, int] = {None: 0, **{reason: 1 + number for number, reason in enumerate(REASONS)}}
_JSON = json.JSONEncoder()
ROWS = 1 << 16  # documents handled at once
BUCKET = 1 << 21  # documents whose digests are compared at once
COPY = 1 << 20  # tokens copied at once, but for what is left of a chunk
NAMED = 10  # documents named for each reason that left some out

Table = npt.NDArray[Any]  # of RECORD, a row for each document


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


@contextmanager
def open_synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that survives a crash once it is closed."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def make_parts(spans: Iterable[Span], part_bytes: int) -> list[Part]:
    """Spans in order, gathered until a part is about `part_bytes` large."""
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
    if vocab_size > 2**32:
        raise ValueError(f"a vocabulary of {vocab_size} ids does not fit 32 bits")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_part(part: Part, folder: Path, tokenizer: Tokenizer) -> None:
    """Read and tokenize a part into `folder`."""
    with written_folder(folder / part.name) as aside, ExitStack() as files:
        opened = [files.enter_context(open_synced(aside / name)) for name in (TOKENS, RECORDS, NAMES)]
        writer = _PartWriter(tokenizer, *opened)
        for span in part.spans:
            writer.write_span(span)
        writer.write_waiting()


class _PartWriter:
    """Appends chunks of documents to a part's open files.

    They wait until there are enough of them to be encoded at once; a call for each short document would cost more
    than the work itself. What is written of a document that turns out bad is left out by `merge_parts`.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: BinaryIO, records: BinaryIO, names: BinaryIO) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._eos = np.asarray([tokenizer.eos_id], np.uint32)
        self._tokens, self._records, self._names = tokens, records, names
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []  # the text of a chunk, and its record without tokens
        self._waiting_bytes = 0

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
            # A backslash stands before the bytes of a file's name that are not UTF-8.
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
        self._waiting.append((text, record))
        self._waiting_bytes += 64 + len(chunk.data)
        if self._waiting_bytes >= CHUNK:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write the chunks that wait."""
        encoded = self._tokenizer.encode_many([text for text, _ in self._waiting])
        written = [np.zeros(0, np.uint32)]
        for ids, (_, record) in zip(encoded, self._waiting, strict=True):
            written += (ids, self._eos) if record[-1] else (ids,)
            self._records.write(_PACKED_RECORD.pack(len(ids) + record[-1], *record))
        ids = np.concatenate(written)
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(f"the vocabulary made id {ids.max()}, outside its own size {self._tokenizer.vocab_size}")
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self._waiting, self._waiting_bytes = [], 0


def check_shares(valid: float, test: float) -> None:
    """Refuse shares of documents for the held-out splits that leave none for training."""
    if not (0 <= valid < 1 and 0 <= test < 1 and valid + test < 1):
        raise ValueError(f"the shares valid={valid} and test={test} must leave some for training")


def merge_parts(
    parts: list[str], table_path: Path, out: Path, vocab_size: int, valid: float, test: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write every good document to its split in `out`; returns the splits' facts, and what was left out and why.

    Documents without a split of their own are held out by these shares, by a hash of their contents.
    """
    dtype = token_dtype(vocab_size)
    count, by_hash = _write_table(parts, table_path, dtype.itemsize, valid, test)
    table = np.memmap(table_path, RECORD, "r+", shape=(count,)) if count else np.zeros(0, RECORD)
    _drop_duplicates(table)
    if by_hash:
        _fill_splits(table, {"train": 1.0 - valid - test, "valid": valid, "test": test})
    left_out: dict[str, Any] = {reason: {"documents": 0, "first": []} for reason in REASONS}
    begun = 0  # documents that begin in the parts so far
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
    """The rows of a table, or those that are good and of a split, a bounded number at a time."""
    for low in range(0, len(table), ROWS):
        rows = table[low : low + ROWS]
        yield rows if split is None else rows[(rows["split"] == SPLITS.index(split)) & (rows["skip"] == 0)]


def _write_table(parts: list[str], path: Path, itemsize: int, valid: float, test: float) -> tuple[int, bool]:
    """A row for each document of all parts, its chunks joined; returns how many, and whether a hash chose splits."""
    count, by_hash, begun = 0, False, np.zeros(0, RECORD)  # the chunks of a document whose last is in another part
    with open(path, "wb") as table:
        for part in parts:
            chunks = np.concatenate([begun, _records(part, itemsize)])
            # A document begins where the one before has ended, and nowhere else.
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
    """A part's records, which may have come from another machine, held against the size of its tokens."""
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
    """Mark all but one of the documents with equal contents; a held-out split keeps its own."""
    buckets = max(1, -(-len(table) // BUCKET))
    # test before valid before train: what a corpus holds out stays held out, whole.
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
    """Of few documents, the hash may put none into a split: it gets the one whose length is nearest to its share."""
    good = table["skip"] == 0
    counts = np.bincount(table["split"][good], minlength=len(SPLITS))
    for split, share in shares.items():
        number = SPLITS.index(split)
        # Training comes first, and gets even the only document.
        spare = np.flatnonzero(good & (counts > (split != "train"))[table["split"]])
        if share and not counts[number] and len(spare):
            tokens = table["tokens"][spare].astype(np.float64)
            chosen = spare[np.abs(np.log(tokens / (share * table["tokens"][good].sum()))).argmin()]
            counts[table["split"][chosen]] -= 1
            counts[number] += 1
            table["split"][chosen] = number


class _SplitWriter:
    """The files of a split as they are written."""

    def __init__(self, out: Path, split: str, vocab_size: int, files: ExitStack) -> None:
        self._split = split
        self._paths = {name: out / f"{split}.{name}" for name in ("tokens", "documents", "names")}
        self._tokens: BinaryIO = files.enter_context(open_synced(self._paths["tokens"]))
        self.names: BinaryIO = files.enter_context(open_synced(self._paths["names"]))
        self._hashed, self._unigrams = hashlib.sha256(), np.zeros(vocab_size, np.int64)

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Append tokens."""
        if len(ids):
            check_ids(ids, len(self._unigrams), self._paths["tokens"].name)
            self._tokens.write(ids.data)
            self._hashed.update(ids.data)
            self._unigrams += np.bincount(ids, minlength=len(self._unigrams))

    def finish(self, table: Table) -> dict[str, Any] | None:
        """Write the index; returns the split's facts, or None where it has no documents and leaves no files."""
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
        return {
            "documents": count,
            **totals,
            "longest": longest,
            "tokens_per_byte": text_tokens / totals["bytes"],
            "tokens_per_word": text_tokens / totals["words"],
            "unigram_entropy": unigram_entropy(self._unigrams),
            "files": {
                path.name: file_facts(path, self._hashed.hexdigest() if name == "tokens" else None)
                for name, path in self._paths.items()
            },
        }
