"""The format on disk: token files, a document index and a JSON manifest, written by `merge` and read by `shards`.

For each split: `<split>.tokens`, every document's ids followed by the end-of-document id; `<split>.documents`, columns
of little-endian 64-bit numbers one after another (where each document's tokens end, its bytes, its words, its digest
in two halves); `<split>.names`, a JSON string a line. `manifest.json` counts and hashes all of it, and itself. It
holds no times or absolute places, so that the same corpus gives the same bytes.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT, VERSION = "gss-data", 1
MANIFEST, TOKENIZER_FOLDER = "manifest.json", "tokenizer"
DTYPES = ("uint16", "uint32")  # of tokens
COLUMNS = ("ends", "bytes", "words", "digest_low", "digest_high")


@dataclass(frozen=True)
class Manifest:
    """What a prepared corpus says of itself; `hash` names it in run folders."""

    content: dict[str, Any]
    hash: str

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """Facts of each split, by name."""
        return dict(self.content["splits"])

    @property
    def left_out(self) -> dict[str, dict[str, Any]]:
        """Documents that were not used: for each reason how many, and the names of the first."""
        return dict(self.content["left_out"])

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Kind, size, end-of-document id, losses and hash of the vocabulary."""
        return dict(self.content["tokenizer"])


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def write_manifest(folder: Path, content: dict[str, Any]) -> Manifest:
    """Seal the content with its own hash and write it."""
    sealed = Manifest(content, hashlib.sha256(_canonical(content)).hexdigest())
    text = json.dumps({**content, "hash": sealed.hash}, indent=2, ensure_ascii=False) + "\n"
    # A name that is not UTF-8 holds lone surrogates: a backslash replacement is how JSON spells them.
    with open(folder / MANIFEST, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return sealed


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a prepared corpus; ValueError for anything that is not one, whole and unaltered."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a prepared corpus: it has no {MANIFEST} (gss prepare makes one)")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"{path}: format {content['format']!r} version {content['version']!r} is not ours")
        stated = content.pop("hash")
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): prepare the corpus anew, with --force") from error
    if hashlib.sha256(_canonical(content)).hexdigest() != stated:
        raise ValueError(
            f"{path} was altered after it was written (its hash differs): prepare the corpus anew, with --force"
        )
    if content.get("dtype") not in DTYPES:  # a type of objects would make addresses of the file's bytes
        raise ValueError(f"{path}: tokens are {' or '.join(DTYPES)}, not {content.get('dtype')!r}")
    if content["tokenizer"]["vocab_size"] > 2 ** (8 * np.dtype(content["dtype"]).itemsize):
        raise ValueError(f"{path}: {content['tokenizer']['vocab_size']} ids do not fit tokens of {content['dtype']}")
    return Manifest(content, stated)


def verify_files(folder: Path, files: dict[str, dict[str, Any]], contents: bool) -> None:
    """Refuse missing, truncated and (if contents are read) altered files."""
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: prepare the corpus anew")
        size = path.stat().st_size
        if size != facts["size"]:
            raise ValueError(f"{path} has {size} bytes instead of {facts['size']}: prepare the corpus anew")
        if contents:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != facts["sha256"]:
                raise ValueError(f"{path} was altered (its SHA-256 differs from the manifest): prepare the corpus anew")


class SplitWriter:
    """Writes one split's files, counting and hashing as it goes."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], vocab_size: int) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._tokens = open(folder / f"{split}.tokens", "wb")  # noqa: SIM115  (closed in close)
        self._names = open(folder / f"{split}.names", "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        self._columns = {c: open(folder / f"{split}.{c}.tmp", "wb") for c in COLUMNS}  # noqa: SIM115
        self._token_hash = hashlib.sha256()
        self._unigrams = np.zeros(vocab_size, np.int64)
        self._documents = self._end = self._bytes = self._words = self._longest = 0

    def add_documents(self, rows: npt.NDArray[Any], names: list[str]) -> None:
        """Index documents (rows of merge's table, names as lines) whose tokens come in the same order."""
        lengths = rows["tokens"].astype(np.int64)
        columns = {
            "ends": self._end + np.cumsum(lengths),
            "bytes": rows["bytes"],
            "words": rows["words"],
            "digest_low": rows["digest"][:, 0],
            "digest_high": rows["digest"][:, 1],
        }
        for column, values in columns.items():
            self._columns[column].write(values.astype("<u8").tobytes())
        self._names.writelines(names)
        self._documents += len(rows)
        self._end += int(lengths.sum())
        self._bytes += int(rows["bytes"].sum())
        self._words += int(rows["words"].sum())
        self._longest = max(self._longest, int(lengths.max()))

    def add_tokens(self, ids: npt.NDArray[Any]) -> None:
        """Append token ids."""
        data = ids.astype(self._dtype, copy=False).tobytes()
        self._tokens.write(data)
        self._token_hash.update(data)
        self._unigrams += np.bincount(ids, minlength=len(self._unigrams))

    def close(self) -> dict[str, Any] | None:
        """Finish the files and return their facts; a split without documents leaves nothing."""
        for file in (self._tokens, self._names, *self._columns.values()):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._join_columns()
        files = {name: self._folder / f"{self._split}.{name}" for name in ("tokens", "documents", "names")}
        if not self._documents:
            for path in files.values():
                path.unlink()
            return None
        text_tokens = self._end - self._documents
        return {
            "documents": self._documents,
            "tokens": self._end,
            "bytes": self._bytes,
            "words": self._words,
            "longest": self._longest,
            "tokens_per_byte": text_tokens / self._bytes,
            "tokens_per_word": text_tokens / self._words,
            "unigram_entropy": unigram_entropy(self._unigrams),
            "files": {path.name: self._file_facts(name, path) for name, path in files.items()},
        }

    def _file_facts(self, name: str, path: Path) -> dict[str, Any]:
        if name == "tokens":
            digest = self._token_hash.hexdigest()
        else:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": path.stat().st_size, "sha256": digest}

    def _join_columns(self) -> None:
        with open(self._folder / f"{self._split}.documents", "wb") as joined:
            for column in COLUMNS:
                path = self._folder / f"{self._split}.{column}.tmp"
                with open(path, "rb") as file:
                    shutil.copyfileobj(file, joined, 1 << 20)
                path.unlink()
            joined.flush()
            os.fsync(joined.fileno())


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Nats a token of a model that knows only how often each id occurs: what any model must beat."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
