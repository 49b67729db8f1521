"""`gss eval` and `gss generate` on a run folder, as a user calls them."""

import csv
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

import gss
from gss.cli import app
from gss.data import load_tokenizer
from tests.making import call, make_corpus, make_run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A prepared corpus and a run on it."""
    root = tmp_path_factory.mktemp("commands")
    said = (f"the {number}th of the documents says little. " * 40 for number in range(12))
    data = make_corpus(root, said, valid=0.3)
    return data, make_run("gss-tiny", data, root / "run")


def test_eval(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data, run = folders
    printed = call(
        "eval", run, "--data", data, "--lengths", "64,512", "--carry-state", "--json", "--csv", tmp_path / "rows.csv"
    )
    facts = json.loads(printed)
    assert facts["step"] == 3
    assert [row["length"] for row in facts["rows"]] == [64, 512, None]
    assert len({row["tokens"] for row in facts["rows"]}) == 1
    assert all(row["perplexity"] == pytest.approx(math.exp(row["loss"])) for row in facts["rows"])
    written = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [float(row["loss"]) for row in written] == [row["loss"] for row in facts["rows"]]
    table = call("eval", run, "--data", data, "--max-tokens", "1000")
    assert "1,000 tokens of" in " ".join(table.split())
    assert "512" in table
    assert "65,536" not in table  # the default lengths are scored as far as documents reach


def test_where_a_result_will_be_is_checked_before_the_work(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = folders
    (tmp_path / "book.txt").write_text("once")
    call("eval", run, "--data", data, "--lengths", "64", "--csv", tmp_path / "new" / "rows.csv")
    call("read", tmp_path / "book.txt", run, "--out", tmp_path / "another" / "state")
    assert {path.name for path in tmp_path.glob("*/*")} == {"rows.csv", "state"}
    monkeypatch.setattr(gss, "load", lambda *_, **__: pytest.fail("the model was read"))
    for command in (
        ("eval", run, "--data", data, "--lengths", "64", "--csv", tmp_path),
        ("read", tmp_path / "book.txt", run, "--out", tmp_path),
    ):
        with pytest.raises(ValueError, match="is a folder: give a file"):
            call(*command)


def test_eval_keeps_its_numbers_at_80_columns(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    data, run = folders
    lengths = [16, 32, 64, 128, 256, 512]
    options = ("eval", run, "--data", data, "--lengths", ",".join(map(str, lengths)), "--carry-state")
    table, facts = call(*options), json.loads(call(*options, "--json"))
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    for row in facts["rows"]:
        (line,) = [line for line in table.splitlines() if f" {row['length'] or 'whole'} " in line]
        assert f"{row['perplexity']:.3f}" in line
        assert f"{row['bits_per_byte']:.3f}" in line


def test_eval_of_one_document_says_so(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data = make_corpus(tmp_path, ["the only one of the documents says little. " * 200], valid=0.3)
    table = call("eval", folders[1], "--data", data, "--lengths", "64")
    assert "tokens of 1 document " in " ".join(f"{table} ".split()) + " "


def test_eval_shows_the_papers_figures(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data, run = folders
    config = json.loads((run / "config.json").read_text())
    named = shutil.copytree(run, tmp_path / "named")
    (named / "config.json").write_text(json.dumps({**config, "preset": "gss"}))
    table = call("eval", named, "--data", data, "--lengths", "64,512")
    assert "PG-19" in table
    assert "14.01" in table


def test_eval_refuses_another_vocabulary(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = folders
    words = Tokenizer(WordLevel({"some": 0, "words": 1, "</s>": 2, "?": 3}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    texts = {f"{split}/one": f"some {split} words " * 100 for split in ("train", "valid")}
    data = make_corpus(tmp_path, texts, load_tokenizer(tmp_path / "tokenizer.json", eos="</s>"))
    with pytest.raises(ValueError, match="vocabulary"):
        call("eval", run, "--data", data, "--lengths", "64")


def test_eval_of_one_document_is_json(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """It has no standard error, and JSON no NaN. Brackets in a run's path are no markup."""
    data = make_corpus(tmp_path, {"valid/one": "one document " * 20, "train/two": "another document " * 20})
    run = tmp_path / "a[" / "b]"
    run.parent.mkdir()
    run.symlink_to(folders[1])
    printed = call("eval", run, "--data", data, "--lengths", "64", "--json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (row,) = json.loads(printed, parse_constant=refuse)["rows"]
    assert row["standard_error"] is None
    assert "a[/b] on valid" in " ".join(call("eval", run, "--data", data, "--lengths", "64").split())


def test_generate(folders: tuple[Path, Path]) -> None:
    _, run = folders
    first = call("generate", run, "--prompt", "the ", "--tokens", 30, "--seed", 4)
    assert first.startswith("the ")
    assert first == call("generate", run, "--prompt", "-", "--tokens", 30, "--seed", 4, input=b"the ")
    both = call("generate", run, "--prompt", "the ", "--tokens", 30, "--seed", 3, "--samples", 2)
    assert both.endswith(first)


def test_many_prompts(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Side by side, each as it is alone, in order; as text without the prompt, or as JSON lines."""
    _, run = folders
    (tmp_path / "prompts").write_text('the \n\n{"prompt": "a\\nb", "id": 3}\nsays\n')
    options = ("generate", run, "--prompts", tmp_path / "prompts", "--tokens", 12, "--samples", 2)
    rows = [json.loads(line) for line in call(*options, "--json").splitlines()]
    assert [(row["prompt"], row["seed"]) for row in rows] == [(p, s) for p in ("the ", "a\nb", "says") for s in (0, 1)]
    lm = gss.load(run)
    for row in rows:
        text = lm.generate(row["prompt"], max_tokens=12, temperature=0.8, seed=row["seed"])
        assert (row["text"], row["finish"]) == (text, "length" if row["tokens"] == 12 else "stop")
    assert call(*options, "--no-echo") == "\n".join(row["text"] + "\n" for row in rows)
    assert call(*options) == "\n".join(row["prompt"] + row["text"] + "\n" for row in rows)
    alone = call("generate", run, "--prompt", "the ", "--tokens", 12, "--no-echo")
    assert alone == rows[0]["text"] + "\n"
    (tmp_path / "lines").write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n'.encode())
    shown = ("generate", run, "--tokens", 1, "--json", "--prompts")
    assert json.loads(call(*shown, tmp_path / "lines"))["prompt"] == "a\u2028b"
    assert json.loads(call(*shown, "-", input=b"the \n"))["prompt"] == "the "
    no_prompt = 'line 1: not a JSON object with a "prompt"'
    for content, message in (
        ("", "bad is empty"),
        ("\n", "has no prompts"),
        ('{"text": 1}', no_prompt),
        ('{"prompt": null}', no_prompt),
        ('{"prompt": "\\ud800"}', "line 1 is not UTF-8 text"),
    ):
        (tmp_path / "bad").write_text(content)
        with pytest.raises(ValueError, match=message):
            call("generate", run, "--prompts", tmp_path / "bad")
    with pytest.raises(ValueError, match="--prompt or --prompts, not both"):
        call(*options, "--prompt", "the ")


@pytest.mark.parametrize(("name", "shown"), [(None, 60), ("optimizer", 12), ("optimizer.learning_rate", 1)])
def test_settings(name: str | None, shown: int) -> None:
    """Every setting has a type, a default and a line, from where it is defined."""
    lines = call("settings", *([name] if name else [])).splitlines()
    heads, texts = lines[::2], lines[1::2]
    assert len(heads) >= shown
    assert all(" = " in head for head in heads)
    assert all(len(text.strip()) > 5 for text in texts)
    for head, text in zip(heads, texts, strict=True):  # what fits in a line explains more than one of several values
        choices = head.partition(" ")[2].partition(" = ")[0].split(" | ")
        first = text.strip().partition(":")[0]
        assert first != "None"
        assert first not in choices or all(f"{choice}: " in text for choice in choices)
    if name is None:
        assert "model.activation gelu | relu2 | swish | relu = " in "\n".join(heads)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.learning_rat", "did you mean optimizer.learning_rate or "),
        ("warmup_steps", "did you mean optimizer.warmup_steps?"),
        ("modle", "did you mean model?"),
        ("state_space", "did you mean model.state_space?"),
        ("layers", "; `gss settings` lists all"),
    ],
)
def test_settings_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"there is no setting '{name}'.*{re.escape(message)}"):
        call("settings", name)


def test_a_shell_completes_names() -> None:
    def completed(*words: str) -> list[str]:
        env = {"_GSS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["gss", *words]), "COMP_CWORD": str(len(words))}
        return CliRunner().invoke(app, [], env=env, prog_name="gss").output.split()

    assert "gss2-small" in completed("train", "--preset", "gss2")
    assert completed("train", "--config", "tune") == ["tune-state"]
    assert "optimizer.learning_rate=" in completed("train", "--set", "optimizer.le")


def test_lm_eval_without_lm_eval_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gss.lm_eval", raising=False)
    with pytest.raises(SystemExit, match=r"error: gss\.lm_eval needs lm-eval: pip install"):
        runpy.run_module("gss.lm_eval", run_name="__main__")


def test_bad_calls(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data, run = folders
    for arguments, message in (
        (("generate", run, "--temperature=-1"), "temperature must be at least 0"),
        (("generate", tmp_path), "not a run folder"),
        (("generate", run, "--step", 9), "no checkpoint of step 9"),
        (("generate", run, "--device", "foo"), "device cannot be 'foo'; choose from: auto, cpu, cuda"),
        (("report", run, "--device", "foo"), "device cannot be 'foo'; choose from: auto, cpu, cuda"),
        (("eval", run, "--data", data, "--device", "foo"), "device cannot be 'foo'; choose from: auto, cpu, cuda"),
        (("eval", run, "--data", data, "--lengths", "64,x"), "not a list of lengths"),
        (("eval", run, "--data", data, "--lengths", "100000"), "no document is as long"),
        (("generate", tmp_path / "none"), "not a run folder: there is no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    for prompt, message in (
        (b"ab\xff\xfe", "not UTF-8 text, from character 3 on"),
        (b"", "standard input is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            call("generate", run, "--prompt", "-", input=prompt)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"model": null}'])
def test_a_config_that_is_none(folders: tuple[Path, Path], tmp_path: Path, content: str) -> None:
    shutil.copytree(folders[1], tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json (does not describe a run: it has no model|is not valid JSON)"):
        gss.load(tmp_path / "run")


def test_a_damaged_checkpoint_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folders[1], run)
    newest = run / "checkpoints" / "step-00000003"
    shutil.copytree(newest, run / "checkpoints" / "step-00000005")
    with pytest.warns(UserWarning, match=r"step-00000005 is damaged.*; using the one before it"):
        assert gss.load(run).step == 3
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"no checkpoint that can be read \(.*is damaged.*restore one"):
        gss.load(run)
