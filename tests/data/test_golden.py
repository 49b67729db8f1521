"""The format on disk does not drift: small corpora have the bytes, and the hash, that they have always had."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from data_corpora import folder_bytes, make_text, write_files

from gss.data import SourceOptions, load_tokenizer, prepare

GOLDEN = {
    "corpus": ("2ddc72584427c538", "6bb31bddc22a0b04"),
    "arxiv": ("c49375afed0abb11", "df0b7765042054ff"),
    "github": ("01209f6418315457", "b01de4cda68d7f7a"),
    "lm1b": ("fac3588332861517", "3dad278c78afe6ca"),
}


def make_corpora(root: Path) -> None:
    texts = [make_text(seed, 40 + 3 * seed).encode() for seed in range(12)]
    rows = [json.dumps({"text": text.decode()}).encode() for text in texts[4:9]] + [b"{torn", b'{"n": 1}']
    long = b"".join(make_text(seed, 6000).encode() for seed in range(20))
    write_files(
        root / "corpus",
        {
            **{f"{number}.txt": text for number, text in enumerate(texts[:5])},
            "copy.txt": texts[0],
            "long.txt": long,
            "long-again.txt.gz": gzip.compress(long, 0, mtime=0),
            "solid.txt": "語".encode() * 400_000,
            "binary.txt": b"\0",
            "blank.txt": b" \n",
            "latin.txt": b"\xff",
            "rows.jsonl": b"\n".join(rows),
        },
    )
    write_files(
        root / "articles",
        {
            "1/main.tex": b"\\documentclass{a}\n\\input{two} 50\\% % \\input{two}\n",
            "1/two.tex": b"The second file.\n",
            "2/x.tex": b"\\documentclass{b} alone",
        },
    )
    write_files(root / "code", {"one/a.py": b"print(1)", "one/b.go": b"package b\n", "two/c.c": b"int c;\n"})
    lines = b"\n".join(text.replace(b"\n", b" ") for text in texts)
    write_files(root / "words/training-monolingual.tokenized.shuffled", {"news.en-00001-of-00100": lines})
    write_files(root / "words/heldout-monolingual.tokenized.shuffled", {"news.en.heldout-00000-of-00050": lines[:900]})


def test_corpora_have_the_bytes_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpora(tmp_path)
    monkeypatch.chdir(tmp_path)  # a manifest names its sources as they were given
    found = {}
    for source, local in (("corpus", None), ("arxiv", "articles"), ("github", "code"), ("lm1b", "words")):
        options = SourceOptions(local=local, span_bytes=300_000)
        tokenizer = load_tokenizer("bytes")
        manifest = prepare([source], f"{source}.out", tokenizer, options=options, valid=0.2, test=0.1, workers=1)
        every = hashlib.sha256(repr(folder_bytes(tmp_path / f"{source}.out")).encode()).hexdigest()
        found[source] = (manifest.hash[:16], every[:16])
    assert found == GOLDEN
