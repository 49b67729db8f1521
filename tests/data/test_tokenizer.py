"""Vocabularies: exact round trips, losses named, saved and loaded by hash, bad files refused."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gss.data.sources import SourceOptions
from gss.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, load_tokenizer, require_same
from gss.data.tokenizer_training import MODELS, SMALLEST, _write_sample, train_tokenizer
from tests.conftest import posix

# Any Unicode text, and text rich in what vocabularies stumble over.
TEXTS = st.one_of(
    st.text(max_size=80), st.text(alphabet=" \n\t\r\u2581ab\0<>/s0xA\u2047\u2585\ufeff\u3000é\U0001f600", max_size=60)
)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.tolist() == list(text.encode())


@pytest.mark.parametrize("model", ["unigram", "bpe"])
def test_trained_vocabularies_round_trip(trained: dict[str, SentencePieceTokenizer], model: str) -> None:
    tokenizer = trained[model]
    assert tokenizer.lossless

    @settings(max_examples=400, deadline=None)
    @given(TEXTS)
    def round_trip(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
        assert tokenizer.eos_id not in ids

    round_trip()


def test_trained_vocabulary_has_pieces_for_words_and_whitespace(trained: dict[str, SentencePieceTokenizer]) -> None:
    tokenizer = trained["unigram"]
    text = "the model of the long range"
    assert len(tokenizer.encode(text)) < len(text) / 2
    assert len(tokenizer.encode("\n")) == len(tokenizer.encode("\n\n")) == len(tokenizer.encode("\t")) == 1


def test_training_reports_progress_and_refuses_nonsense(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one two three four five six seven\n" * 50)
    said: list[tuple[str, float]] = []
    tokenizer = train_tokenizer([str(corpus)], tmp_path / "v", vocab_size=30_000, progress=lambda *at: said.append(at))
    assert dict(said) == {"reading": 1.0, "training": 1.0}
    assert SMALLEST <= tokenizer.vocab_size < 400  # as many as the text has to give
    with pytest.raises(ValueError, match="not empty"):
        train_tokenizer([str(corpus)], tmp_path / "v", vocab_size=300)
    with pytest.raises(ValueError, match="at least"):
        train_tokenizer([str(corpus)], tmp_path / "w", vocab_size=100)
    with pytest.raises(ValueError, match=r"could not train this vocabulary: Vocabulary size too high \(5000\)"):
        train_tokenizer([str(corpus)], tmp_path / "w", vocab_size=5000, model="bpe")
    corpus.write_text("".join(map(chr, range(0x4E00, 0x4E80))) * 50)
    with pytest.raises(ValueError, match=r"the characters of this text take 3\d\d ids, so 300 are too few"):
        train_tokenizer([str(corpus)], tmp_path / "w", vocab_size=300)
    with pytest.raises(ValueError, match="one of unigram, bpe"):
        train_tokenizer([str(corpus)], tmp_path / "w", model="letters")
    (tmp_path / "valid").mkdir()
    corpus.rename(tmp_path / "valid" / "1.txt")
    with pytest.raises(ValueError, match=r"all text in .*valid is held out, as the names of its files or folders say"):
        train_tokenizer([str(tmp_path / "valid")], tmp_path / "w", vocab_size=300)
    assert not (tmp_path / "w").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


@pytest.mark.parametrize("model", MODELS)
def test_training_says_how_far_it_is(tmp_path: Path, model: str) -> None:
    words = random.Random(0).choices(Path(__file__).read_text().split(), k=4000)
    (tmp_path / "corpus.txt").write_text("\n".join(" ".join(words[start : start + 8]) for start in range(0, 4000, 8)))
    said: list[float] = []
    options = {
        "vocab_size": 600,
        "model": model,
        "progress": lambda stage, share: stage == "training" and said.append(share),
    }
    train_tokenizer([str(tmp_path / "corpus.txt")], tmp_path / "v", **options)
    assert said == sorted(said)
    assert (said[0], said[-1]) == (0.0, 1.0)
    assert any(0.1 < share < 1 for share in said)


def test_training_replaces_a_vocabulary_and_nothing_else(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("one two three four five six seven\n" * 50)
    with pytest.raises(ValueError, match="holds no vocabulary: choose another --out"):
        train_tokenizer([str(corpus)], corpus, vocab_size=300, force=True)
    with pytest.raises(ValueError, match="holds no vocabulary: choose another --out"):
        train_tokenizer([str(corpus)], next(corpus.glob("*.txt")), vocab_size=300, force=True)
    assert [path.name for path in corpus.iterdir()] == ["a.txt"]
    load_tokenizer("bytes").save(tmp_path / "v")
    trained = train_tokenizer([str(corpus)], tmp_path / "v", vocab_size=300, force=True)
    assert load_tokenizer(tmp_path / "v").hash == trained.hash


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_sample_is_taken_evenly_and_counted_in_bytes(tmp_path: Path, letter: str, ending: str) -> None:
    sources = []
    for number in range(4):
        text = "".join(f"{number} {letter * 50} {line:03d}\n" for line in range(500)).encode()
        sources.append(tmp_path / f"{number}.txt{ending}")
        sources[-1].write_bytes(gzip.compress(text) if ending else text)
    limit = 20_000
    for attempt in ("first", "second"):
        _write_sample([str(source) for source in sources], SourceOptions(), tmp_path / attempt, limit, lambda *_: None)
    sample = (tmp_path / "first").read_bytes()
    assert limit / 2 <= len(sample) <= limit
    assert sample == (tmp_path / "second").read_bytes()
    taken = [int(line.split()[0]) * 500 + int(line.split()[2]) for line in sample.decode().splitlines()]
    assert len(set(np.diff(taken))) == 1  # one line in so many, from the first source to the last
    assert {number // 500 for number in taken} == {0, 1, 2, 3}


def test_lossy_vocabulary_is_known_as_such(t5_like: Path) -> None:
    tokenizer = load_tokenizer(t5_like)
    assert not tokenizer.lossless
    assert {"newlines", "runs of spaces"} <= set(tokenizer.losses)


def test_json_adds_no_special_tokens(word_json: Path) -> None:
    tokenizer = load_tokenizer(word_json)
    assert tokenizer.encode("w0 w3 w1").tolist() == [2, 5, 3]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (52, 1)
    assert tokenizer.decode([2, 5, 1]) == "w0 w3"
    assert not tokenizer.lossless


def test_end_of_document_can_be_named(word_json: Path, tmp_path: Path) -> None:
    assert load_tokenizer(word_json, eos="w7").eos_id == 9
    with pytest.raises(ValueError, match="--eos"):
        load_tokenizer(word_json, eos="nothing")
    content = json.loads(word_json.read_text())
    content["model"]["vocab"]["end"] = content["model"]["vocab"].pop("</s>")
    content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no end-of-document token"):
        load_tokenizer(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json", eos="end").eos_id == 1


def test_the_end_of_document_of_a_folder(word_json: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_bytes(word_json.read_bytes())
    tokenizer = load_tokenizer(tmp_path / "plain", eos="w7")
    assert tokenizer.eos_id == 9
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved", eos="w7").eos_id == 9
    with pytest.raises(ValueError, match="ends documents with 'w7', not '</s>': leave out --eos"):
        load_tokenizer(tmp_path / "saved", eos="</s>")
    load_tokenizer("bytes").save(tmp_path / "bytes")
    for spec in ("bytes", tmp_path / "bytes"):
        with pytest.raises(ValueError, match="leave out --eos"):
            load_tokenizer(spec, eos="</s>")


def test_ids_beyond_the_vocabulary_are_left_out(t5_like: Path, word_json: Path) -> None:
    """A model may have more ids than its vocabulary."""
    for spec in ("bytes", t5_like, word_json):
        tokenizer = load_tokenizer(spec)
        ids = tokenizer.encode("w1 w2").tolist()
        beyond = [tokenizer.vocab_size, *ids, tokenizer.vocab_size + 500]
        assert tokenizer.decode(beyond) == tokenizer.decode(np.asarray(beyond)) == tokenizer.decode(ids)


def test_saved_and_loaded_are_the_same(
    tmp_path: Path, word_json: Path, t5_like: Path, trained: dict[str, SentencePieceTokenizer]
) -> None:
    made = [load_tokenizer("bytes"), load_tokenizer(word_json, "w3"), load_tokenizer(t5_like), trained["bpe"]]
    for number, tokenizer in enumerate(made):
        tokenizer.save(tmp_path / str(number))
        again = load_tokenizer(tmp_path / str(number))
        assert (again.kind, again.hash, again.eos_id) == (tokenizer.kind, tokenizer.hash, tokenizer.eos_id)
        np.testing.assert_array_equal(again.encode("w1 the state"), tokenizer.encode("w1 the state"))
    assert len({tokenizer.hash for tokenizer in made}) == len(made)
    require_same(made[0], load_tokenizer("bytes").hash, "the data")
    with pytest.raises(ValueError, match="does not match the checkpoint"):
        require_same(made[0], made[1].hash, "the checkpoint")


def test_bad_vocabularies_are_refused(tmp_path: Path, t5_like: Path) -> None:
    for name in ("x.json", "x.model"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=name):
            load_tokenizer(tmp_path / name)
    (tmp_path / "x.bin").write_bytes(b"")
    for spec, message in (
        (tmp_path / "none", "no vocabulary"),
        (tmp_path / "x.bin", r"\.json"),
        (tmp_path, "holds no"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(spec)
    load_tokenizer(t5_like).save(tmp_path / "saved")
    model = tmp_path / "saved" / "tokenizer.model"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not the one its description names"):
        load_tokenizer(tmp_path / "saved")
    description = json.loads((tmp_path / "saved" / "vocabulary.json").read_text())
    del description["hash"]
    (tmp_path / "saved" / "vocabulary.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"does not describe a vocabulary \('hash'\)"):
        load_tokenizer(tmp_path / "saved")
    (tmp_path / "saved" / "vocabulary.json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe"):
        load_tokenizer(tmp_path / "saved")


def test_repeated_passages_are_trained_on_once_and_always_alike(tmp_path: Path, texts: list[str]) -> None:
    lines = [" ".join(text.split())[:900] for text in texts]
    for copy in range(3):
        (tmp_path / f"{copy}.txt").write_text("\n".join(lines) + "\n")
    _write_sample([str(tmp_path / f"{copy}.txt") for copy in range(3)], SourceOptions(), tmp_path / "s", 10**6, print)
    sample = (tmp_path / "s").read_text().splitlines()
    assert len(sample) == len(set(sample))
    assert set(sample) == set(lines)
    first, second = (train_tokenizer([str(tmp_path / "0.txt")], tmp_path / name, vocab_size=300) for name in "ab")
    assert first.hash == second.hash
    assert str(tmp_path).encode() not in first.content


@posix
def test_sigterm_leaves_nothing_behind(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("\n".join(texts))
    script = (
        "import sys, os, signal; from gss.data.tokenizer_training import train_tokenizer\n"
        "if __name__ == '__main__':\n"
        "    end = lambda stage, share: stage == 'training' and os.kill(os.getpid(), signal.SIGTERM)\n"
        "    train_tokenizer([sys.argv[1] + '/corpus'], sys.argv[1] + '/out', vocab_size=300, progress=end)\n"
    )
    (tmp_path / "run.py").write_text(script)
    ended = subprocess.run([sys.executable, str(tmp_path / "run.py"), str(tmp_path)], check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "run.py"]


def test_dropout_of_a_vocabulary_is_switched_off(tmp_path: Path) -> None:
    import tokenizers

    letters = {letter: number for number, letter in enumerate("abcdefgh")}
    vocabulary = {**letters, "ab": 8, "cd": 9, "abcd": 10, "</s>": 11}
    merges = [("a", "b"), ("c", "d"), ("ab", "cd")]
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, dropout=0.5)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert {tuple(tokenizer.encode("abcd" * 8).tolist()) for _ in range(20)} == {(10,) * 8}


@posix
def test_vocabularies_from_elsewhere_reach_nothing_else(tmp_path: Path, t5_like: Path) -> None:
    folder = tmp_path / "v"
    load_tokenizer(t5_like).save(folder)
    good = json.loads((folder / "vocabulary.json").read_text())
    (tmp_path / "outside.model").write_bytes(t5_like.read_bytes())
    os.mkfifo(tmp_path / "fifo")
    for file in ("../outside.model", str(tmp_path / "outside.model"), "/dev/zero", "../fifo", None, 3):
        (folder / "vocabulary.json").write_text(json.dumps({**good, "file": file}))
        with pytest.raises(ValueError, match="not the vocabulary's own"):
            load_tokenizer(folder)
    (folder / "vocabulary.json").write_text(json.dumps(good))
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.model").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not the vocabulary's own"):
        load_tokenizer(folder)
    (folder / "vocabulary.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="does not describe a vocabulary"):
        load_tokenizer(folder)


def test_a_vocabulary_with_a_giant_id_is_refused(tmp_path: Path, word_json: Path) -> None:
    content = json.loads(word_json.read_text())
    content["model"]["vocab"]["giant"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="larger than"):
        load_tokenizer(tmp_path / "tokenizer.json")
