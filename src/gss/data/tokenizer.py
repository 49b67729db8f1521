"""Vocabularies: bytes, a `tokenizer.json` of the tokenizers library, or a SentencePiece `.model`.

Every tokenizer turns text into ids and back, knows its end-of-document id, its hash and what it loses, and saves itself
to a folder that is stored with prepared data and checkpoints. Special tokens are never added: the code that writes
documents adds the end-of-document id. Independent of sources and token files.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gss.io.files import read_whole, write_file, write_json

Ids = npt.NDArray[np.uint32]

DESCRIPTION = "vocabulary.json"
_BELOW = ("tokenizer", "vocabulary", "tokenizer.json", "tokenizer.model")  # its places in runs and other folders
MAX_VOCABULARY = 1 << 24  # ids, since some memory is taken per id; no published vocabulary has half as many
SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character

# Names of end-of-document tokens in published vocabularies, the most specific first.
END_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")

# What a vocabulary may lose: in words, and texts that change if it does.
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
    """Identifies a vocabulary: what its ids mean, and which of them ends a document."""
    return hashlib.sha256(f"{kind}\n{vocab_size}\n{eos_id}\n".encode() + content).hexdigest()


class Tokenizer:
    """A vocabulary: the common part of all kinds, and their interface."""

    kind: str
    file_name: str | None = None  # of the vocabulary's own file inside its folder
    vocab_size: int
    eos: str | None = None  # the name of the end-of-document token, where the kind has names
    eos_id: int

    def __init__(self, content: bytes = b"", eos: str | None = None, where: str = "the vocabulary") -> None:
        """Open the content of a file. Computes the hash and finds, by trying, what encoding and decoding loses."""
        self.content = content
        self._open(eos, where)
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"a vocabulary of {self.vocab_size} ids is larger than {MAX_VOCABULARY}, the limit")
        if not 0 <= self.eos_id < self.vocab_size:
            raise ValueError(f"end-of-document id {self.eos_id} is outside the vocabulary of {self.vocab_size} ids")
        self.hash = _hash(self.kind, self.vocab_size, self.eos_id, content)
        changed = {text for _, texts in PROBES for text in texts if self.decode(self.encode(text)) != text}
        self.losses = tuple(what for what, texts in PROBES if changed.intersection(texts))

    def _open(self, eos: str | None, where: str) -> None:
        """Find the size and the end-of-document token."""
        raise NotImplementedError

    def encode(self, text: str) -> Ids:
        """The ids of a text, without any special token."""
        raise NotImplementedError

    def encode_many(self, texts: list[str]) -> list[Ids]:
        """`encode` for each text; faster than one by one if they are short."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of ids; end-of-document ids are left out."""
        raise NotImplementedError

    @property
    def lossless(self) -> bool:
        """Whether decode(encode(text)) == text for every text."""
        return not self.losses

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the vocabulary and its description to a folder, which `load_tokenizer` reads."""
        target = Path(folder)
        description = {name: getattr(self, name) for name in ("vocab_size", "eos", "eos_id", "hash")}
        if self.file_name is not None:
            write_file(target / self.file_name, self.content)
        write_json(target / DESCRIPTION, {"kind": self.kind, "file": self.file_name, **description})


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255 and 256 for the end of a document: lossless for every text."""

    kind, vocab_size, eos_id = "bytes", 257, 256

    def _open(self, eos: str | None, where: str) -> None:
        if eos is not None:
            raise ValueError(f"{where} has its own end-of-document id, not {eos!r}: leave out --eos")

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        values = np.asarray(ids, dtype=np.int64)
        # A model may produce bytes that are not UTF-8: they become U+FFFD.
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json` as the tokenizers library writes it."""

    kind = file_name = "tokenizer.json"

    def _open(self, eos: str | None, where: str) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self.content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{where} is not a tokenizer.json that the tokenizers library reads: {error}") from error
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # with dropout, the same text would get different ids each time
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "</s>" inside a document is text, as far as the file allows
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        name = eos or next((name for name in END_NAMES if name in vocabulary), None)
        if name not in vocabulary:
            names = eos or ", ".join(END_NAMES)
            raise ValueError(f"{where} has no end-of-document token among {names}; name one of its tokens with --eos")
        self.eos, self.eos_id = name, vocabulary[name]
        decoder = self._tokenizer.decoder
        spells = decoder is not None and decoder.decode(["<0x41>"]) == "A"
        self._bytes = {vocabulary.get(f"<0x{byte:02X}>"): byte for byte in range(256) if spells}

    def encode(self, text: str) -> Ids:
        return self.encode_many([text])[0]

    def encode_many(self, texts: list[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [_array(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        wanted = [int(i) for i in ids if i != self.eos_id]
        if self._bytes.keys().isdisjoint(wanted):
            return str(self._tokenizer.decode(wanted, skip_special_tokens=False))
        # The library replaces a whole run of bytes if one of them is wrong or the last character is incomplete. Here,
        # only the bytes that are not characters become replacement marks.
        tokens: list[str | None] = []
        for spelled, run in groupby(wanted, self._bytes.__contains__):
            if not spelled:
                tokens += map(self._tokenizer.id_to_token, run)
                continue
            for character in bytes(self._bytes[i] for i in run).decode("utf-8", errors="replace"):
                tokens += ["\ufffd"] if character == "\ufffd" else [f"<0x{byte:02X}>" for byte in character.encode()]
        return str(self._tokenizer.decoder.decode([token for token in tokens if token is not None]))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`: T5's, or one of ours."""

    kind, file_name = "sentencepiece", "tokenizer.model"

    def _open(self, eos: str | None, where: str) -> None:
        import sentencepiece

        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=self.content)
            self.vocab_size = int(self.processor.vocab_size())
        except Exception as error:  # the library raises RuntimeError or OSError by version
            raise ValueError(f"{where} is not a SentencePiece model: {error}") from error
        self.eos_id = int(self.processor.piece_to_id(eos) if eos else self.processor.eos_id())
        if self.eos_id < 0 or (eos and self.processor.id_to_piece(self.eos_id) != eos):
            raise ValueError(f"{where} has no end-of-document piece {eos or '(eos)'!r}; name one with --eos")
        self.eos = str(self.processor.id_to_piece(self.eos_id))
        # The byte pieces of the space mark itself, if the vocabulary has byte fallback.
        self._mark_bytes = [int(self.processor.piece_to_id(f"<0x{byte:02X}>")) for byte in SPACE_MARK.encode()]
        self._spells_mark = all(map(self.processor.is_byte, self._mark_bytes))

    def encode(self, text: str) -> Ids:
        if not self._spells_mark or SPACE_MARK not in text:
            return _array(self.processor.encode(text))
        # The library reads a literal space mark as a space; spelled in bytes it survives the round trip.
        first, *others = map(self.processor.encode, text.split(SPACE_MARK))
        return _array([*first, *(i for part in others for i in (*self._mark_bytes, *part))])

    def encode_many(self, texts: list[str]) -> list[Ids]:
        if any(SPACE_MARK in text for text in texts):
            return [self.encode(text) for text in texts]
        return [_array(ids) for ids in self.processor.encode(texts, num_threads=1)]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        # A model may have more ids than its vocabulary; the library refuses those.
        return str(self.processor.decode([int(i) for i in ids if i < self.vocab_size and i != self.eos_id]))


_KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (ByteTokenizer, JsonTokenizer, SentencePieceTokenizer)
}


def load_tokenizer(spec: str | os.PathLike[str], eos: str | None = None) -> Tokenizer:
    """A tokenizer from `bytes`, a `tokenizer.json`, a `.model`, or a folder that `save` wrote (hash checked), also
    inside a run folder or an exported one.

    `eos` names the token that ends a document, if the vocabulary does not determine it.
    """
    if str(spec) in ("bytes", "byte"):
        return ByteTokenizer(b"", eos, "the vocabulary of bytes")
    path = Path(spec)
    if path.is_dir():
        return _load_folder(path, eos)
    if not path.is_file():
        raise ValueError(f"no vocabulary at {path}: give 'bytes', a tokenizer.json, a .model, or a folder made by gss")
    kinds = {".json": JsonTokenizer, ".model": SentencePieceTokenizer}
    if path.suffix not in kinds:
        raise ValueError(f"{path}: a vocabulary file ends in .json (tokenizers) or .model (SentencePiece)")
    return kinds[path.suffix](read_whole(path), eos, str(path))


def _load_folder(folder: Path, wanted_eos: str | None) -> Tokenizer:
    path = folder / DESCRIPTION
    if not path.is_file():
        for below in _BELOW:
            if (folder / below).is_file() or (folder / below / DESCRIPTION).is_file():
                return load_tokenizer(folder / below, wanted_eos)
        raise ValueError(f"{folder} has no vocabulary: it holds no {DESCRIPTION}, tokenizer.json or tokenizer.model")
    try:
        description = json.loads(read_whole(path))
        kind, stated = _KINDS[description["kind"]], str(description["hash"])
        size, eos, eos_id, file_name = (description[key] for key in ("vocab_size", "eos", "eos_id", "file"))
        if not isinstance(eos, str | None) or not isinstance(size, int) or not isinstance(eos_id, int):
            raise TypeError(f"{eos!r:.40} of {size!r:.40} ids, {eos_id!r:.40}, names no token")
    except (KeyError, TypeError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} does not describe a vocabulary ({error}): restore it") from error
    if file_name != kind.file_name or (file_name and not (folder / file_name).is_file()):
        raise ValueError(f"{path} names a file that is not the vocabulary's own: restore it")
    content = read_whole(folder / file_name) if file_name else b""
    found = _hash(kind.kind, size, eos_id, content)
    if found != stated:
        hashes = f"hash {found[:12]} instead of {stated[:12]}"
        raise ValueError(f"the vocabulary in {folder} is not the one its description names ({hashes}): restore it")
    if wanted_eos not in (None, eos):
        end = "an id of its own" if eos is None else repr(eos)
        raise ValueError(f"the vocabulary in {folder} ends documents with {end}, not {wanted_eos!r}: leave out --eos")
    return kind(content, eos, str(folder / (file_name or "")))


def require_same(tokenizer: Tokenizer, expected_hash: str, whose: str) -> None:
    """Refuse a vocabulary other than the expected one, whose ids would have other meanings."""
    if tokenizer.hash != expected_hash:
        raise ValueError(
            f"the vocabulary does not match {whose}: hash {tokenizer.hash[:12]} ({tokenizer.kind}, "
            f"{tokenizer.vocab_size} ids) instead of {expected_hash[:12]}; use data prepared with that vocabulary"
        )
