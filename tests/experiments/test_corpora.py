"""Corpora from archives: each as soon as all of its archives are there."""

import tarfile
from pathlib import Path

import pytest

from experiments import corpora
from gss.data import open_dataset


def _archive(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / f"{name}.tar.xz", "w:xz") as archive:
        for path, text in files.items():
            (folder / "text").write_text(text)
            archive.add(folder / "text", path)


def test_corpora_are_made_when_their_archives_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archives, data = tmp_path / "archives", tmp_path / "data"
    command = [str(archives), "--out", str(data), "--vocabulary", "bytes"]
    _archive(archives, "math", {"train/a.tex": "2 + 2", "train/b.tex": "x²", "valid/c.tex": "1 + 1"})
    _archive(archives, "books-train-0", {"train/a.txt": "one"})
    corpora.main(command)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "code: waits for code.tar.xz"
    assert said[1].startswith("math: 10 tokens of train, 6 tokens of valid in ")  # a byte or an end of document each
    assert said[2] == "books: waits for books-train-1.tar.xz, books-train-2.tar.xz, books-valid.tar.xz"
    assert said[3] == "code-lossless: left out without --code-vocabulary"
    assert [path.name for path in data.iterdir()] == ["math"]
    assert len(open_dataset(data / "math", "train").lengths) == 2
    for part in ("books-train-1", "books-train-2", "books-valid"):
        _archive(archives, part, {f"{'valid' if 'valid' in part else 'train'}/{part}.txt": part})
    corpora.main(command)
    assert "math: there already\nbooks: " in capsys.readouterr().out
    assert sorted(path.name for path in data.iterdir()) == ["books", "math"]
