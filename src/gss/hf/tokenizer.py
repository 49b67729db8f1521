"""Our vocabularies as tokenizers of `transformers` with identical ids, and back.

Byte and `tokenizer.json` vocabularies become fast tokenizers, a plain `tokenizer.json` that loads anywhere. A
SentencePiece model keeps its format, in a class of ours, since no fast tokenizer gives its ids for every text. All of
them put the end-of-document id in front of a text, as in training, and treat names of special tokens as plain text.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gss.data import Tokenizer, load_tokenizer
from gss.data.tokenizer import DESCRIPTION, ByteTokenizer, JsonTokenizer, SentencePieceTokenizer
from gss.io.files import read_json

MODULE = "modeling_gss"  # the file in an exported folder that imports our classes
BYTE_EOS = "<|endoftext|>"  # the name of id 256 of the byte vocabulary, which has none of its own
VOCABULARY = "vocabulary"  # the folder in an exported model with the vocabulary in our own format, which keeps its hash
_INPUTS = ["input_ids", "attention_mask"]


def convert_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """One of our tokenizers for `transformers`: the same ids for every text, after the end-of-document id."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        auto = {"AutoTokenizer": [f"{MODULE}.GSSSentencePieceTokenizer", None]}
        return GSSSentencePieceTokenizer(content=tokenizer.content, eos_token=tokenizer.eos, auto_map=auto)
    if isinstance(tokenizer, ByteTokenizer):
        fast, eos = byte_level(), BYTE_EOS
    elif isinstance(tokenizer, JsonTokenizer):
        assert tokenizer.eos is not None
        fast, eos = tokenizers.Tokenizer.from_str(tokenizer.content.decode("utf-8")), tokenizer.eos
        fast.no_truncation()
        fast.no_padding()
    else:
        raise ValueError(f"a vocabulary of kind {tokenizer.kind!r} has no counterpart in transformers")
    # Replaces the file's own post-processor: training saw the end-of-document id and nothing else.
    fast.post_processor = TemplateProcessing(
        single=f"{eos} $A", pair=f"{eos} $A $B:1", special_tokens=[(eos, tokenizer.eos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=eos,
        eos_token=eos,
        pad_token=eos,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=_INPUTS,
    )


def byte_level() -> tokenizers.Tokenizer:
    """UTF-8 bytes as ids 0 … 255 for the tokenizers library: byte-level BPE without merges."""
    vocabulary = {character: byte for byte, character in sorted(bytes_to_unicode().items())}
    fast = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = ByteLevelDecoder()
    fast.add_special_tokens([BYTE_EOS])
    return fast


class GSSSentencePieceTokenizer(PreTrainedTokenizer):
    """A SentencePiece model, read by the same code as in training."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012  the base class declares a plain mapping
    model_input_names = _INPUTS

    def __init__(
        self, vocab_file: str | None = None, content: bytes | None = None, eos_token: Any = None, **kwargs: Any
    ) -> None:
        if content is None:
            if vocab_file is None:
                raise ValueError("a SentencePiece vocabulary needs its tokenizer.model: give vocab_file")
            content = Path(vocab_file).read_bytes()
        eos = None if eos_token is None else str(eos_token)
        self.pieces = SentencePieceTokenizer(content, eos, vocab_file or "the .model file")
        kwargs |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), self.pieces.eos)
        kwargs |= {"split_special_tokens": True, "special_tokens_pattern": "bos", "clean_up_tokenization_spaces": False}
        super().__init__(**{"padding_side": "left", **kwargs})

    @property
    def vocab_size(self) -> int:
        return self.pieces.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {self._convert_id_to_token(index): index for index in range(self.vocab_size)} | self.get_added_vocab()

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._convert_id_to_token(int(index)) for index in self.pieces.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.pieces.processor.piece_to_id(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.pieces.processor.id_to_piece(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces; an end of a document appears as its name."""
        documents: list[list[int]] = [[]]
        for index in map(self._convert_token_to_id_with_added_voc, tokens):
            if index == self.pieces.eos_id:
                documents.append([])
            else:
                documents[-1].append(index)
        return str(self.pieces.eos).join(map(self.pieces.decode, documents))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}tokenizer.model"
        path.write_bytes(self.pieces.content)
        return (str(path),)


def read_vocabulary(folder: Path) -> Tokenizer:
    """The vocabulary of a folder that `transformers` reads, as one of our tokenizers.

    An exported folder contains the original, with the hash of the training data's; one that `save_pretrained` wrote has
    only the tokenizer's own files.
    """
    if (folder / VOCABULARY / DESCRIPTION).is_file():
        return load_tokenizer(folder / VOCABULARY)
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(eos, str | None):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: eos_token must be a text, not {eos!r:.40}")
    ours, found = json.loads(byte_level().to_str()), read_json(folder / "tokenizer.json")
    if all(found.get(part) == ours[part] for part in ("model", "pre_tokenizer", "normalizer", "added_tokens")):
        return ByteTokenizer()  # its exported form
    pieces = folder / "tokenizer.model"
    return load_tokenizer(pieces if pieces.is_file() else folder, eos)
