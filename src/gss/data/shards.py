"""Shards: a prepared corpus on disk, and its splits as documents of token ids, memory-mapped and checked.

For each split: `<split>.tokens`, every document's ids followed by the end-of-document id; `<split>.documents`, columns
of little-endian 64-bit numbers one after another (where each document's tokens end, its bytes, its words, its digest
in two halves); `<split>.names`, one JSON string per line. `manifest.json` counts and hashes all of it, and itself. It
contains no times or absolute paths, so the same corpus gives the same bytes. `parts` writes these files; everything
here except `write_manifest` only reads. Independent of batches.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gss.data.formats import is_url, open_file
from gss.data.tokenizer import Tokenizer, load_tokenizer, require_same
from gss.io.files import file_facts, read_whole, write_file

FORMAT, SHARE_FORMAT, VERSION = "gss-data", "gss-data-share", 1
MANIFEST, TOKENIZER_FOLDER = "manifest.json", "tokenizer"
SPLITS = ("train", "valid", "test")
DTYPES = ("uint16", "uint32")  # of tokens
COLUMNS = ("ends", "bytes", "words", "digest_low", "digest_high")


@dataclass(frozen=True)
class Manifest:
    """The description of a prepared corpus; run folders identify it by its `hash`."""

    content: dict[str, Any]
    hash: str

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """Facts of each split, by name."""
        return dict(self.content["splits"])

    @property
    def left_out(self) -> dict[str, dict[str, Any]]:
        """Documents that were not used: by reason, how many and the names of the first ones."""
        return dict(self.content["left_out"])

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Kind, size, end-of-document id, losses and hash of the vocabulary."""
        return dict(self.content["tokenizer"])


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(folder: Path, content: dict[str, Any]) -> Manifest:
    """Seal the content with its own hash and write it."""
    sealed = Manifest(content, _hash(content))
    text = json.dumps({**content, "hash": sealed.hash}, indent=2, ensure_ascii=False) + "\n"
    # A name that is not UTF-8 has lone surrogates, which backslash escapes spell as JSON does.
    write_file(folder / MANIFEST, text.encode("utf-8", errors="backslashreplace"))
    return sealed


def read_sealed(path: str, *forms: str) -> Manifest:
    """A manifest on disk or at a URL, of a corpus or of the given formats; ValueError if it is another, or altered."""
    try:
        if is_url(path):
            with open_file(path) as file:
                content = json.load(file)
        else:
            content = json.loads(read_whole(Path(path)))
        found, version, stated = content["format"], content["version"], content.pop("hash")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: this is not a folder that gss prepare made") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): prepare the corpus again, with --force") from error
    if found == SHARE_FORMAT and not forms:
        raise ValueError(f"{path} belongs to one part of a corpus: merge all parts with gss merge")
    if found == FORMAT and forms and FORMAT not in forms:
        raise ValueError(f"{path} belongs to a whole corpus, not to one part of it")
    if found not in (forms or (FORMAT,)) or version != VERSION:
        raise ValueError(f"{path}: gss cannot read format {found!r} version {version!r}")
    if _hash(content) != stated:
        raise ValueError(f"{path} was altered (its hash differs): prepare the corpus again, with --force")
    return Manifest(content, stated)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a prepared corpus; ValueError if it is anything else, incomplete or altered."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a prepared corpus: it has no {MANIFEST} (gss prepare makes one)")
    manifest = read_sealed(str(path))
    content = manifest.content
    if content.get("dtype") not in DTYPES:  # with an object dtype, the file's bytes would be used as addresses
        raise ValueError(f"{path}: tokens are {' or '.join(DTYPES)}, not {content.get('dtype')!r}")
    try:  # anyone can write a manifest
        splits, tokenizer, left_out = content["splits"], content["tokenizer"], content["left_out"].values()
        counts = [tokenizer["vocab_size"], tokenizer["eos_id"], *(entry["documents"] for entry in left_out)]
        texts = [tokenizer["kind"], tokenizer["hash"], *tokenizer["losses"]]
        texts += [name for entry in left_out for name in entry["first"]]
        rates: list[Any] = []
        for split in splits.values():
            counts += [split[name] for name in ("documents", "tokens", "bytes", "words", "longest")]
            counts += [facts["size"] for facts in split["files"].values() if facts["sha256"]]
            rates += [split[name] for name in ("tokens_per_byte", "tokens_per_word", "unigram_entropy")]
        complete = splits and {*splits} <= {*SPLITS} and all(isinstance(text, str) for text in texts)
    except (KeyError, TypeError, AttributeError):
        complete = False
    if not (complete and all(type(n) is int and n >= 0 for n in counts) and all(type(n) is float for n in rates)):
        raise ValueError(f"{path} does not describe a corpus: prepare it again, with --force")
    if content["tokenizer"]["vocab_size"] > 2 ** (8 * np.dtype(content["dtype"]).itemsize):
        raise ValueError(f"{path}: {content['tokenizer']['vocab_size']} ids do not fit tokens of {content['dtype']}")
    return manifest


@dataclass(frozen=True)
class Document:
    """A document of a split, for evaluation and display."""

    number: int
    name: str
    tokens: npt.NDArray[Any]  # its ids, the end-of-document id last
    bytes: int  # of its text in UTF-8
    words: int  # between whitespace


@dataclass(eq=False)
class Dataset:
    """A split: `tokens` are the ids of all documents, one after another, and `ends` where each document ends."""

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    document_bytes: npt.NDArray[np.int64]
    document_words: npt.NDArray[np.int64]
    _: KW_ONLY
    vocab_size: int
    eos_id: int
    split: str
    folder: Path
    manifest: Manifest

    def __len__(self) -> int:
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
    def hash(self) -> str:
        """The manifest's hash, which identifies the data."""
        return self.manifest.hash

    @property
    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows only how often each id occurs, which every model must beat."""
        return float(self.manifest.splits[self.split]["unigram_entropy"])

    def names(self) -> Iterator[str]:
        """The documents' names in order, read lazily."""
        path, count = self.folder / f"{self.split}.names", 0
        try:
            with open(path, encoding="utf-8") as lines:
                for line in lines:
                    yield str(json.loads(line))
                    count += 1
        except (ValueError, RecursionError):
            raise ValueError(f"{path} does not hold the documents' names: prepare the corpus again") from None
        if count != len(self):
            raise ValueError(f"{path} names {count} documents instead of {len(self)}: prepare the corpus again")

    def documents(self) -> Iterator[Document]:
        for number, (name, begin, end) in enumerate(zip(self.names(), self.starts, self.ends, strict=True)):
            self.check_file()
            size, words = int(self.document_bytes[number]), int(self.document_words[number])
            yield Document(number, name, self.tokens[begin:end], size, words)

    def check_file(self) -> None:
        """Refuse a token file that was truncated: reading beyond its end would kill the process."""
        path = self.folder / f"{self.split}.tokens"
        if path.exists() and path.stat().st_size < self.tokens.nbytes:
            raise ValueError(f"{path} was truncated while it was in use: prepare the corpus again")

    def tokenizer(self) -> Tokenizer:
        """The vocabulary that travels with the data."""
        tokenizer = load_tokenizer(self.folder / TOKENIZER_FOLDER)
        require_same(tokenizer, self.manifest.tokenizer["hash"], f"the data in {self.folder}")
        return tokenizer


def open_dataset(folder: str | os.PathLike[str], split: str = "train", *, verify: bool = True) -> Dataset:
    """Open a split of a prepared corpus. `verify` checks the hashes of all files; sizes are always checked."""
    root = Path(folder)
    manifest = read_manifest(root)
    if split not in manifest.splits:
        hint = f": prepare it with a larger share for that (--{split})" if split in ("valid", "test") else ""
        raise ValueError(f"{root} has no split {split!r}, only {', '.join(manifest.splits)}{hint}")
    facts = manifest.splits[split]
    for name, stated in facts["files"].items():
        path = root / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: prepare the corpus again")
        if (size := path.stat().st_size) != stated["size"]:
            raise ValueError(f"{path} has {size} bytes instead of {stated['size']}: prepare the corpus again")
        if verify and file_facts(path)["sha256"] != stated["sha256"]:
            raise ValueError(f"{path} was altered (its SHA-256 differs from the manifest): prepare the corpus again")
    dtype = np.dtype(manifest.content["dtype"]).newbyteorder("<")
    # As plain arrays: indexing np.memmap itself costs microseconds per row.
    tokens = np.asarray(np.memmap(root / f"{split}.tokens", dtype, "r", shape=(facts["tokens"],)))
    index = np.asarray(np.memmap(root / f"{split}.documents", "<i8", "r", shape=(len(COLUMNS), facts["documents"])))
    ends, sizes, words = index[:3]
    orderly = len(ends) and ends[0] >= 1 and ends[-1] == len(tokens) and bool((ends[1:] > ends[:-1]).all())
    if not orderly or (index[1:3] < 0).any():
        raise ValueError(f"{root / f'{split}.documents'} does not match its tokens: prepare the corpus again")
    if verify:
        for low in range(0, len(tokens), 1 << 24):
            check_ids(tokens[low : low + (1 << 24)], manifest.tokenizer["vocab_size"], root)
    ids = {name: manifest.tokenizer[name] for name in ("vocab_size", "eos_id")}
    return Dataset(tokens, ends, sizes, words, **ids, split=split, folder=root, manifest=manifest)


def check_ids(ids: npt.NDArray[Any], vocab_size: int, where: object) -> None:
    """Refuse token ids beyond the vocabulary."""
    if ids.size and int(ids.max()) >= vocab_size:
        raise ValueError(f"{where}: token id {ids.max()} is outside the vocabulary of {vocab_size}: prepare it again")
