"""The commands as a person runs them: what they print, their errors, their exit status."""

from pathlib import Path

import pytest

from experiments.data_speed import bench_data
from gss.cli import app
from gss.data import open_dataset
from tests.making import call


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "stdlib"
    assert "lossless" in call("prepare", "stdlib", "--out", out)
    return out


def test_data_shows_the_corpus(stdlib: Path) -> None:
    shown = call("data", stdlib, "--sample", 3)
    assert "train: document lengths in tokens" in shown
    assert len([line for line in shown.splitlines() if " to " in line and "█" in line]) > 5
    assert "all hashes verified" in shown
    table = [line for line in shown.splitlines() if line.startswith(tuple("┏┃┡│└"))]
    assert [line.split()[1] for line in table if line[0] == "│"][:4] == ["documents", "tokens,", "bytes", "words"]
    assert max(map(len, table)) <= 80
    assert "sample: the beginning of document" in shown
    with pytest.raises(ValueError, match=r"--sample 9999: documents of train are numbered from 0 to \d+"):
        call("data", stdlib, "--sample", 9999)


def test_data_refuses_altered_files(stdlib: Path) -> None:
    path = stdlib / "valid.tokens"
    whole = path.read_bytes()
    path.write_bytes(whole[:10] + b"\1" + whole[11:])
    try:
        with pytest.raises(ValueError, match=r"valid\.tokens was altered"):
            call("data", stdlib)
    finally:
        path.write_bytes(whole)


def test_prepare_names_what_it_left_out(tmp_path: Path, t5_like: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.tex").write_text("the state space\n")
    (tmp_path / "c" / "b.tex").write_bytes(b"\0")
    (tmp_path / "c" / "c.tex").write_text("the state space\n")
    (tmp_path / "c" / "d.md").write_text("not read\n")
    arguments = ("prepare", tmp_path / "c", "--out", tmp_path / "out", "--tokenizer", t5_like)
    printed = call(*arguments, "--suffix", "tex", "--valid", 0, "--workers", 1)
    assert "left out: 1 binary (c/b.tex)" in printed
    assert "left out: 1 duplicate (c/c.tex)" in printed
    assert "held out" not in printed  # as was asked for
    assert "note: files that were not read: 1 .md; if they are text" in printed
    with pytest.raises(ValueError, match=r"has no split 'valid', only train: .* larger share for that \(--valid\)"):
        open_dataset(tmp_path / "out", "valid")
    assert "LOSSY: it changes or drops newlines, runs of spaces" in call("data", tmp_path / "out")


def test_prepare_says_why_nothing_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "only one"}\n')
    printed = call("prepare", tmp_path / "rows.jsonl", "--out", tmp_path / "one")
    assert "nothing is held out for validation: of a single document, only that of a plain text file has" in printed
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(name)
    own = (tmp_path / "train.txt", tmp_path / "test.txt")
    assert "the files name no split valid; --splits hash" in call("prepare", *own, "--out", tmp_path / "own")
    assert "the files name no split train" in call("prepare", tmp_path / "test.txt", "--out", tmp_path / "test")


def test_tokenizer_train_and_use(tmp_path: Path, texts: list[str]) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "vocabulary"
    corpus.write_text("\n".join(texts))
    assert "320 pieces, lossless" in call("tokenizer", "train", corpus, "--out", out, "--vocab-size", 320)
    assert "sentencepiece, 320 ids" in call("prepare", corpus, "--out", tmp_path / "data", "-t", out, "-j", 1)


def test_measuring_the_data_pipeline_measures_everything() -> None:
    rows = bench_data("bytes", megabytes=2, length=64, batch_size=2, repeats=1)
    named = {row.name.split(",")[0] for row in rows}
    assert named == {"prepare", "the bare library's encode", "batching"}
    assert all(row.value > 0 for row in rows)
    assert all(row.ratio is not None and row.ratio > 0 for row in rows if row.name.startswith("prepare"))


def test_every_option_has_help() -> None:
    import typer

    group = typer.main.get_command(app)
    for path in (["prepare"], ["merge"], ["data"], ["tokenizer", "train"]):
        command = group
        for name in path:
            command = command.commands[name]  # type: ignore[attr-defined]
        assert command.help
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{path}: {parameter.name} has no help"
