"""Vocabularies: bytes, a `tokenizer.json` of the tokenizers library, or a SentencePiece `.model`.

Every tokenizer turns text into ids and back, knows its end-of-document id, its hash and what it loses, and
saves itself to a folder that travels with prepared data and checkpoints. It knows nothing of documents' sources
or of token files. Special tokens are never added: the end-of-document id is put there by whoever writes documents.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gss.io.files import read_whole, write_file

Ids = npt.NDArray[np.uint32]

DESCRIPTION = "vocabulary.json"
FILES = {"bytes": None, "tokenizer.json": "tokenizer.json", "sentencepiece": "tokenizer.model"}  # by kind
MAX_VOCABULARY = 1 << 24  # ids; what counts them has a number for each, and no vocabulary has half as many
SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character

# Ends of documents by the names that published vocabularies give them, the most specific first.
END_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")

# What a vocabulary may lose: a sentence for people, and texts that come back changed when it does.
PROBES = (
    ("newlines", ("a\nb", "a\n\nb")),
    ("runs of spaces", ("a  b", "a    b")),
    ("tabs", ("a\tb",)),
    ("spaces at the start or end", (" a", "a ")),
    ("characters outside its vocabulary", ("a\U0001f702b", "\ua9c1")),
    ("compatibility forms of characters", ("\ufb01", "\uff21", "\u2460", "e\u0301")),
)


def _array(ids: list[int]) -> Ids:
    return np.frombuffer(array("I", ids), np.uint32)  # three times as fast as np.asarray on a list


def _hash(kind: str, vocab_size: int, eos_id: int, content: bytes) -> str:
    """The identity of a vocabulary: what its ids mean, and which one ends a document."""
    return hashlib.sha256(f"{kind}\n{vocab_size}\n{eos_id}\n".encode() + content).hexdigest()


class Tokenizer:
    """A vocabulary: what all kinds share, and what the rest of the library asks of one."""

    kind: str
    vocab_size: int
    eos: str | None  # the name of the end-of-document token, where the kind has names
    eos_id: int
    content: bytes  # of its file
    hash: str
    losses: tuple[str, ...]  # what does not survive encode and decode, in words; empty when lossless

    def _finish(self) -> None:
        """Find the hash, and by trying, the losses."""
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"a vocabulary of {self.vocab_size} ids is larger than {MAX_VOCABULARY}, the most we take")
        if not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(f"end-of-document id {self.eos_id} is outside the vocabulary of {self.vocab_size} ids")
        self.hash = _hash(self.kind, self.vocab_size, self.eos_id, self.content)
        self.losses = tuple(
            what for what, texts in PROBES if any(self.decode(self.encode(text)) != text for text in texts)
        )

    def encode(self, text: str) -> Ids:
        """The ids of a text, without any special token."""
        raise NotImplementedError

    def encode_many(self, texts: list[str]) -> list[Ids]:
        """`encode` of each text; quicker than one by one for short ones."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of ids; end-of-document ids are left out."""
        raise NotImplementedError

    @property
    def file_name(self) -> str | None:
        """The vocabulary's own file inside its folder."""
        return FILES[self.kind]

    @property
    def lossless(self) -> bool:
        """Whether decode(encode(text)) == text for every text."""
        return not self.losses

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the vocabulary and its description to a folder, from which `load_tokenizer` makes it again."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        description = {name: getattr(self, name) for name in ("kind", "vocab_size", "eos", "eos_id", "hash")}
        description = {"kind": self.kind, "file": self.file_name, **description}
        if self.file_name is not None:
            write_file(target / self.file_name, self.content)
        write_file(target / DESCRIPTION, json.dumps(description, indent=2) + "\n")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255 and 256 for the end of a document: lossless for every text."""

    def __init__(self) -> None:
        self.kind, self.content = "bytes", b""
        self.vocab_size, self.eos, self.eos_id = 257, None, 256
        self._finish()

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        values = np.asarray(ids, dtype=np.int64)
        # A model may emit bytes that are not UTF-8: they show as U+FFFD instead of failing.
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json` as the tokenizers library writes it."""

    def __init__(self, content: bytes, eos: str | None = None, where: str = "tokenizer.json") -> None:
        import tokenizers

        self.kind, self.content = "tokenizer.json", content
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{where} is not a tokenizer.json that the tokenizers library reads: {error}") from error
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # it would give the same text other ids each time
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "</s>" inside a document is text, as far as the file allows
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        name = eos or next((name for name in END_NAMES if name in vocabulary), None)
        if name is None or name not in vocabulary:
            raise ValueError(
                f"{where} has no token {name!r} to end a document with; name one of its tokens with --eos"
                if name
                else f"{where} has no end-of-document token among {', '.join(END_NAMES)}; name one with --eos"
            )
        self.eos, self.eos_id = name, vocabulary[name]
        self._finish()

    def encode(self, text: str) -> Ids:
        return self.encode_many([text])[0]

    def encode_many(self, texts: list[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [_array(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        wanted = [int(i) for i in ids if i != self.eos_id]
        return str(self._tokenizer.decode(wanted, skip_special_tokens=False))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`: T5's, or one of ours."""

    def __init__(self, content: bytes, eos: str | None = None, where: str = "the .model file") -> None:
        import sentencepiece

        self.kind, self.content = "sentencepiece", content
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size = int(self._processor.vocab_size())
        except Exception as error:  # the library raises RuntimeError or OSError by version
            raise ValueError(f"{where} is not a SentencePiece model: {error}") from error
        self.eos_id = int(self._processor.piece_to_id(eos) if eos else self._processor.eos_id())
        if self.eos_id < 0 or (eos and self._processor.id_to_piece(self.eos_id) != eos):
            raise ValueError(f"{where} has no end-of-document piece {eos or '(eos)'!r}; name one with --eos")
        self.eos = str(self._processor.id_to_piece(self.eos_id))
        self._mark_bytes = self._bytes_of_the_mark()
        self._finish()

    def _bytes_of_the_mark(self) -> list[int] | None:
        """The byte pieces that spell the space mark itself, where the vocabulary has byte fallback."""
        names = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
        ids = [int(self._processor.piece_to_id(name)) for name in names]
        known = all(self._processor.id_to_piece(i) == name for i, name in zip(ids, names, strict=True))
        return ids if known and all(self._processor.is_byte(i) for i in ids) else None

    def encode(self, text: str) -> Ids:
        if self._mark_bytes is None or SPACE_MARK not in text:
            return _array(self._processor.encode(text))
        # The library reads a literal space mark as a space; spelled in bytes it survives the round trip.
        ids: list[int] = []
        for number, part in enumerate(text.split(SPACE_MARK)):
            if number:
                ids += self._mark_bytes
            ids += self._processor.encode(part)
        return _array(ids)

    def encode_many(self, texts: list[str]) -> list[Ids]:
        if self._mark_bytes is not None and any(SPACE_MARK in text for text in texts):
            return [self.encode(text) for text in texts]
        return [_array(ids) for ids in self._processor.encode(texts, num_threads=1)]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        # A model may have more ids than its vocabulary, and the library knows none beyond.
        return str(self._processor.decode([int(i) for i in ids if i < self.vocab_size and i != self.eos_id]))


def load_tokenizer(spec: str | os.PathLike[str], eos: str | None = None) -> Tokenizer:
    """A tokenizer from `bytes`, a `tokenizer.json`, a `.model`, or a folder that `save` wrote (hash checked).

    `eos` names the token that ends a document, where the vocabulary leaves a choice.
    """
    if str(spec) in ("bytes", "byte"):
        _require_end(eos, None, "the vocabulary of bytes")
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        return _load_folder(path, eos)
    if not path.is_file():
        raise ValueError(
            f"no vocabulary at {path}: give 'bytes', a tokenizer.json, a SentencePiece .model or a folder made by gss"
        )
    if path.suffix == ".json":
        return JsonTokenizer(read_whole(path), eos, str(path))
    if path.suffix == ".model":
        return SentencePieceTokenizer(read_whole(path), eos, str(path))
    raise ValueError(f"{path}: a vocabulary file ends in .json (tokenizers) or .model (SentencePiece)")


def _require_end(wanted: str | None, found: str | None, whose: str) -> None:
    if wanted is not None and wanted != found:
        end = "an id of its own" if found is None else repr(found)
        raise ValueError(f"{whose} ends documents with {end}, not {wanted!r}: leave --eos out")


def _load_folder(folder: Path, wanted_eos: str | None) -> Tokenizer:
    description_path = folder / DESCRIPTION
    if not description_path.is_file():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (folder / name).is_file():
                return load_tokenizer(folder / name, wanted_eos)
        raise ValueError(f"{folder} holds no vocabulary: neither {DESCRIPTION}, tokenizer.json nor tokenizer.model")
    try:
        description = json.loads(read_whole(description_path))
        kind, file_name, eos = description["kind"], description["file"], description["eos"]
        stated = str(description["hash"])
        if FILES.get(kind, "") != file_name or (file_name and not (folder / file_name).is_file()):
            raise ValueError(f"{description_path} names a file that is not the vocabulary's own: restore it")
        content = read_whole(folder / file_name) if file_name else b""
        found = _hash(kind, description["vocab_size"], description["eos_id"], content)
    except (KeyError, TypeError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{description_path} does not describe a vocabulary ({error}): restore it") from error
    if found != stated:
        raise ValueError(
            f"the vocabulary in {folder} is not the one its description names "
            f"(hash {found[:12]} instead of {stated[:12]}): restore the files or prepare anew"
        )
    _require_end(wanted_eos, eos, f"the vocabulary in {folder}")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "tokenizer.json":
        return JsonTokenizer(content, eos, str(folder / file_name))
    if kind == "sentencepiece":
        return SentencePieceTokenizer(content, eos, str(folder / file_name))
    raise ValueError(f"{description_path}: unknown kind of vocabulary {kind!r}")


def require_same(tokenizer: Tokenizer, expected_hash: str, whose: str) -> None:
    """Refuse a vocabulary that is not the expected one: ids of another vocabulary mean other words."""
    if tokenizer.hash != expected_hash:
        raise ValueError(
            f"the vocabulary does not match {whose}: hash {tokenizer.hash[:12]} ({tokenizer.kind}, "
            f"{tokenizer.vocab_size} ids) instead of {expected_hash[:12]}; use data prepared with that vocabulary"
        )
