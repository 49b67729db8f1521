"""The commands as a person runs them: what they print, their errors, their exit status."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.data_speed import bench_data
from gss.cli import app
from gss.data import open_dataset

runner = CliRunner()


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "stdlib"
    result = runner.invoke(app, ["prepare", "stdlib", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "lossless" in result.output
    return out


def test_data_shows_the_corpus(stdlib: Path) -> None:
    result = runner.invoke(app, ["data", str(stdlib), "--sample", "3"])
    assert result.exit_code == 0
    assert "train: lengths of documents in tokens" in result.output
    bars = [line for line in result.output.splitlines() if " to " in line and "█" in line]
    assert len(bars) > 5
    assert "all hashes verified" in result.output
    assert "sample: train, document" in result.output


def test_data_refuses_altered_files(stdlib: Path) -> None:
    path = stdlib / "valid.tokens"
    whole = path.read_bytes()
    path.write_bytes(whole[:10] + b"\1" + whole[11:])
    try:
        result = runner.invoke(app, ["data", str(stdlib)])
        assert isinstance(result.exception, ValueError)
        assert "valid.tokens was altered" in str(result.exception)
    finally:
        path.write_bytes(whole)


def test_prepare_names_what_it_left_out(tmp_path: Path, t5_like: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.tex").write_text("the state space\n")
    (tmp_path / "c" / "b.tex").write_bytes(b"\0")
    (tmp_path / "c" / "c.tex").write_text("the state space\n")
    (tmp_path / "c" / "d.md").write_text("not read\n")
    arguments = ["prepare", str(tmp_path / "c"), "--out", str(tmp_path / "out"), "--tokenizer", str(t5_like)]
    result = runner.invoke(app, [*arguments, "--suffix", "tex", "--valid", "0", "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "left out: 1 binary (c/b.tex)" in result.output
    assert "left out: 1 duplicate (c/c.tex)" in result.output
    assert "no document is held out" in result.output
    assert "note: 1 files were not read (1 .md)" in result.output
    with pytest.raises(ValueError, match=r"has no split 'valid' but train: .* larger share for that \(--valid\)"):
        open_dataset(tmp_path / "out", "valid")
    shown = runner.invoke(app, ["data", str(tmp_path / "out")])
    assert "LOSSY: it changes or drops newlines, runs of spaces" in shown.output


def test_tokenizer_train_and_use(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(texts))
    out = tmp_path / "vocabulary"
    arguments = ["tokenizer", "train", str(tmp_path / "corpus.txt"), "--out", str(out), "--vocab-size", "320"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "320 pieces, lossless" in result.output
    prepared = runner.invoke(
        app, ["prepare", str(tmp_path / "corpus.txt"), "--out", str(tmp_path / "data"), "-t", str(out), "-j", "1"]
    )
    assert prepared.exit_code == 0, prepared.output
    assert "sentencepiece, 320 ids" in prepared.output


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
