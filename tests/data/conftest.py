"""Small corpora and vocabularies that the tests make themselves."""

import io
from pathlib import Path

import pytest
from data_corpora import make_text

from gss.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from gss.data.tokenizer_training import train_tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Sixty documents, all different."""
    return [make_text(seed, 30 + 5 * seed) for seed in range(60)]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> dict[str, SentencePieceTokenizer]:
    """A vocabulary of ours of each model."""
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "corpus.txt").write_text("\n".join(texts), encoding="utf-8")
    return {
        model: train_tokenizer([str(folder / "corpus.txt")], folder / model, vocab_size=size, model=model)
        for model, size in (("unigram", 500), ("bpe", 400))
    }


@pytest.fixture(scope="session")
def t5_like(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A SentencePiece model that normalises as T5's does: it drops newlines and runs of spaces."""
    import sentencepiece

    model = io.BytesIO()
    lines = [line.strip() for text in texts for line in text.replace("\t", " ").split("\n") if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("t5") / "t5_like.model"
    path.write_bytes(model.getvalue())
    assert load_tokenizer(path).vocab_size > 50
    return path


@pytest.fixture(scope="session")
def word_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of whole words, made with the tokenizers library."""
    import tokenizers

    vocabulary = {"<unk>": 0, "</s>": 1, **{f"w{i}": 2 + i for i in range(50)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory, trained: dict[str, SentencePieceTokenizer]) -> Path:
    """One of ours as a folder, which other processes can load."""
    folder = tmp_path_factory.mktemp("saved") / "vocabulary"
    trained["unigram"].save(folder)
    return folder
