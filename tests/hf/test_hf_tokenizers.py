"""Our vocabularies in `transformers`: the same ids for every text, and the way back."""

from pathlib import Path

import pytest
import tokenizers

from gss.data import Tokenizer, load_tokenizer
from gss.data.tokenizer_training import train_tokenizer
from tests.hf.conftest import TEXTS

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("gss.hf")

KINDS = ("bytes", "tokenizer.json", "unigram", "bpe", "lossy")


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n".join(TEXTS).replace("\x00", "") * 20, encoding="utf-8")
    made = {"bytes": load_tokenizer("bytes")}
    for model in ("unigram", "bpe"):
        made[model] = train_tokenizer([str(folder / "text")], folder / model, vocab_size=400, model=model, threads=1)
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(TEXTS, trainer)
    # What a published file may come with, and training never uses.
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    fast.enable_truncation(4)
    fast.save(str(folder / "tokenizer.json"))
    made["tokenizer.json"] = load_tokenizer(folder / "tokenizer.json")
    made["lossy"] = _lossy(folder)
    return made


def _lossy(folder: Path) -> Tokenizer:
    """SentencePiece as others train it: normalised, with a dummy prefix and unknown characters."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if text and "\x00" not in text] * 20),
        model_prefix=str(folder / "lossy"),
        vocab_size=120,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
    )
    return load_tokenizer(folder / "lossy.model")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_agree(kind: str, vocabularies: dict[str, Tokenizer], tmp_path: Path) -> None:
    ours = vocabularies[kind]
    theirs = hf.convert_tokenizer(ours)
    theirs.save_pretrained(tmp_path)
    hf.GSSConfig.of(hf.GSSConfig().model_config()).save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded).__name__ == type(theirs).__name__ or loaded.is_fast
    for tokenizer in (theirs, loaded):
        assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == ours.eos_id
        assert len(tokenizer) == ours.vocab_size
        for text in TEXTS:
            expected = ours.encode(text).tolist()
            assert tokenizer(text)["input_ids"] == [ours.eos_id, *expected], repr(text)
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
            decoded = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
            assert decoded == ours.decode(expected), repr(text)
    batch = loaded(["a", "abc"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][0][0] == 0  # on the left
    assert loaded.decode([ours.eos_id, *ours.encode("a").tolist()]).startswith(loaded.eos_token)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_agree_on_random_text(kind: str, vocabularies: dict[str, Tokenizer]) -> None:
    import random

    draw = random.Random(0)
    alphabet = [*"ab 12\n\t▁<|/>s.éß世界🙂", "\u0301", "\u200d", "  ", "\n\n", "</s>"]
    ours = vocabularies[kind]
    theirs = hf.convert_tokenizer(ours)
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randint(1, 30)))
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist(), repr(text)


@pytest.mark.parametrize("kind", KINDS)
def test_back_from_what_transformers_saved(kind: str, vocabularies: dict[str, Tokenizer], tmp_path: Path) -> None:
    ours = vocabularies[kind]
    hf.convert_tokenizer(ours).save_pretrained(tmp_path)
    back = hf.tokenizer.read_vocabulary(tmp_path)
    assert (back.kind, back.vocab_size, back.eos_id) == (ours.kind, ours.vocab_size, ours.eos_id)
    assert all(back.encode(text).tolist() == ours.encode(text).tolist() for text in TEXTS)
    if kind != "tokenizer.json":  # that file is written anew, with another hash
        assert back.hash == ours.hash


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no vocabulary"):
        hf.tokenizer.read_vocabulary(tmp_path)
    with pytest.raises(ValueError, match=r"needs its tokenizer\.model"):
        hf.GSSSentencePieceTokenizer()


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, '{"eos_token": 3}', '{"eos_token": ["x"]}'])
def test_a_tokenizer_config_that_is_none(content: str, vocabularies: dict[str, Tokenizer], tmp_path: Path) -> None:
    hf.convert_tokenizer(vocabularies["tokenizer.json"]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json|eos|end-of-document"):
        hf.tokenizer.read_vocabulary(tmp_path)
