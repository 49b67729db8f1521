"""Shards: a prepared split, memory-mapped and checked, as documents of token ids.

Everything here is read-only. Also makes a split from plain arrays, for tests and synthetic tasks. Knows nothing of how
documents become batches.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gss.data.manifest import COLUMNS, TOKENIZER_FOLDER, Manifest, read_manifest, unigram_entropy, verify_files
from gss.data.tokenizer import Tokenizer, load_tokenizer, require_same


@dataclass(frozen=True)
class Document:
    """One document of a split, for evaluation and display."""

    number: int
    name: str
    tokens: npt.NDArray[Any]  # its ids, the end-of-document id last
    bytes: int  # of its text in UTF-8
    words: int  # between whitespace


class Dataset:
    """A split: `tokens` is every document's ids one after another, `ends` where each document's end."""

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        ends: npt.NDArray[np.int64],
        document_bytes: npt.NDArray[np.int64],
        document_words: npt.NDArray[np.int64],
        *,
        vocab_size: int,
        eos_id: int,
        split: str,
        folder: Path | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.tokens, self.ends = tokens, ends
        self.document_bytes, self.document_words = document_bytes, document_words
        self.vocab_size, self.eos_id, self.split = vocab_size, eos_id, split
        self.folder, self.manifest = folder, manifest

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.ends)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each document's tokens start."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Each document's number of tokens, its end-of-document id included."""
        return self.ends - self.starts

    @property
    def hash(self) -> str | None:
        """The manifest's hash: names the data in a run folder; None for a split made from arrays."""
        return self.manifest.hash if self.manifest else None

    @cached_property
    def unigram_entropy(self) -> float:
        """Nats a token of a model that knows only how often each id occurs."""
        if self.manifest:
            return float(self.manifest.splits[self.split]["unigram_entropy"])
        return unigram_entropy(np.bincount(self.tokens.astype(np.int64), minlength=self.vocab_size))

    def names(self) -> Iterator[str]:
        """The documents' names in order, read as they are asked for."""
        if self.folder is None:
            yield from map(str, range(len(self)))
            return
        with open(self.folder / f"{self.split}.names", encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def document(self, number: int) -> Document:
        """A document by its number."""
        if not 0 <= number < len(self):
            raise ValueError(f"no document {number}: the split {self.split} has {len(self)}")
        return self._document(number, next(islice(self.names(), number, None)))

    def documents(self) -> Iterator[Document]:
        """All documents in order."""
        return map(self._document, range(len(self)), self.names())

    def _document(self, number: int, name: str) -> Document:
        ids = self.tokens[self.starts[number] : self.ends[number]]
        return Document(number, name, ids, int(self.document_bytes[number]), int(self.document_words[number]))

    def tokenizer(self) -> Tokenizer:
        """The vocabulary that travels with the data."""
        if self.folder is None or self.manifest is None:
            raise ValueError("a split made from arrays has no vocabulary")
        tokenizer = load_tokenizer(self.folder / TOKENIZER_FOLDER)
        require_same(tokenizer, self.manifest.tokenizer["hash"], f"the data in {self.folder}")
        return tokenizer


def open_dataset(folder: str | os.PathLike[str], split: str = "train", *, verify: bool = True) -> Dataset:
    """Open a split of a prepared corpus. `verify` reads all of it against its hashes; sizes are always checked."""
    root = Path(folder)
    manifest = read_manifest(root)
    if split not in manifest.splits:
        raise ValueError(f"{root} has no split {split!r} but {', '.join(manifest.splits)}")
    facts = manifest.splits[split]
    verify_files(root, facts["files"], contents=verify)
    dtype = np.dtype(manifest.content["dtype"]).newbyteorder("<")
    # Plain arrays over the maps: indexing np.memmap itself costs microseconds a row.
    tokens = np.asarray(np.memmap(root / f"{split}.tokens", dtype, "r", shape=(facts["tokens"],)))
    index = np.asarray(np.memmap(root / f"{split}.documents", "<i8", "r", shape=(len(COLUMNS), facts["documents"])))
    columns = dict(zip(COLUMNS, index, strict=True))
    if int(columns["ends"][-1]) != facts["tokens"]:
        raise ValueError(f"{root / f'{split}.documents'} does not fit its tokens: prepare the corpus anew")
    return Dataset(
        tokens,
        columns["ends"],
        columns["bytes"],
        columns["words"],
        vocab_size=manifest.tokenizer["vocab_size"],
        eos_id=manifest.tokenizer["eos_id"],
        split=split,
        folder=root,
        manifest=manifest,
    )


def dataset_from_arrays(documents: Sequence[Sequence[int]], *, vocab_size: int, eos_id: int) -> Dataset:
    """A split in memory from each document's ids, without the end-of-document id, which is added here."""
    if not documents:
        raise ValueError("a data set has at least one document")
    whole = [np.asarray([*document, eos_id], np.int64) for document in documents]
    tokens = np.concatenate(whole)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"ids must lie in 0..{vocab_size - 1}; found {tokens.min()}..{tokens.max()}")
    ends = np.cumsum([len(document) for document in whole])
    unknown = np.zeros(len(whole), np.int64)
    return Dataset(tokens, ends, unknown, unknown, vocab_size=vocab_size, eos_id=eos_id, split="train")
