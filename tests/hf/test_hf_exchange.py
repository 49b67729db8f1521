"""Export and import: a folder that `transformers` loads, text as from `gss generate`, weights back to the bit."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gss
from gss.config import from_mapping
from gss.data import load_tokenizer
from gss.generate import Sampling, generate
from gss.training.config import TrainConfig
from tests.conftest import ALL_FAMILIES, Command, small_config
from tests.making import call, save_run

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("gss.hf")

GREEDY = Sampling(temperature=0)
PROMPTS = ["Once upon", "", "naïve 🙂"]


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.export_run(run, tmp_path_factory.mktemp("exported") / "model")


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_weights_come_back_bit_equal(family: str, tmp_path: Path) -> None:
    model = gss.build_model(small_config(family, vocab_size=257))
    call("export", save_run(model, tmp_path / "run", step=42), tmp_path / "model")
    call("import", tmp_path / "model", tmp_path / "back")
    loaded = gss.load(tmp_path / "back")
    assert loaded.step == 42
    assert loaded.model.config == model.config
    assert loaded.tokenizer.hash == load_tokenizer("bytes").hash
    expected = model.state_dict()
    assert loaded.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(theirs[f"model.{name}"], tensor) for name, tensor in expected.items())


def test_what_an_export_holds(exported: Path, run: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names >= {"config.json", "model.safetensors", "generation_config.json", "README.md", "tokenizer.json"}
    assert not any(path.suffix in (".bin", ".pt", ".pkl") for path in exported.rglob("*"))
    assert {path.stat().st_mode for path in exported.glob("*.*")} == {(exported / "config.json").stat().st_mode}
    card = (exported / "README.md").read_text()
    loaded = gss.load(run)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    for fact in (f"{parameters:,}", "f00d" * 16, "training steps | 7 ", "import gss.hf", "Limits", "1 × attention"):
        assert fact in card
    assert all("/somewhere/private" not in path.read_text() for path in exported.glob("*.json"))
    assert [path.name for path in exported.rglob("*.py")] == ["modeling_gss.py"]


@pytest.mark.parametrize(
    "data", [{"hash": "abc"}, {"tokens": "many", "documents": 3}, {"tokens": [1], "documents": None}]
)
def test_a_card_without_what_was_not_recorded(run: Path, data: dict[str, object]) -> None:
    card = hf.exchange.model_card("name", gss.load(run), {"length": "long"}, data)
    for fact in ("training data", "sequence length in training", "tokens per step", "preset"):
        assert f"| {fact} | not recorded |" in card


def test_stock_transformers(exported: Path, run: Path, tmp_path: Path) -> None:
    """Without `import gss.hf`: refused unless the folder's file is trusted, which then gives the same model."""
    script = f"""
import torch, transformers, sys
load, path = transformers.AutoModelForCausalLM.from_pretrained, {str(exported)!r}
try:
    load(path, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("code was run that nobody trusts")
assert "gss" not in sys.modules
words = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)
model = load(path, trust_remote_code=True)
tokens = model.generate(**words("Hello", return_tensors="pt"), max_new_tokens=8, do_sample=False)
print(words.decode(tokens[0, 6:], skip_special_tokens=True), end="")
"""
    env = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == gss.load(run).generate("Hello", max_tokens=8, temperature=0)
    blocked = "import sys; sys.modules['gss'] = None; exec(open(sys.argv[1]).read())"
    file = str(exported / "modeling_gss.py")
    done = subprocess.run([sys.executable, "-c", blocked, file], capture_output=True, text=True, check=False)
    assert "pip install 'gss-lm[hf]', and then import gss.hf" in done.stderr


def test_text_is_that_of_gss_generate(exported: Path, run: Path) -> None:
    model, tokenizer, *_ = gss.load(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    words = transformers.AutoTokenizer.from_pretrained(exported)
    inputs = words(PROMPTS, return_tensors="pt", padding=True)
    rows = theirs.generate(**inputs, max_new_tokens=20, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = generate(model, tokenizer, prompt, max_tokens=20, sampling=GREEDY)
        assert words.decode(row, skip_special_tokens=True) == expected
    fresh = theirs.generate(max_new_tokens=20, do_sample=False)  # no prompt: a new document
    assert words.decode(fresh[0], skip_special_tokens=True) == generate(
        model, tokenizer, "", max_tokens=20, sampling=GREEDY
    )


def test_pipeline(exported: Path, run: Path) -> None:
    model, tokenizer, *_ = gss.load(run)
    pipe = transformers.pipeline("text-generation", model=str(exported), device="cpu")
    options = {"max_new_tokens": 15, "do_sample": False, "return_full_text": False}
    expected = [generate(model, tokenizer, prompt, max_tokens=15, sampling=GREEDY) for prompt in PROMPTS]
    assert [pipe(prompt, **options)[0]["generated_text"] for prompt in PROMPTS] == expected
    together = pipe(PROMPTS, **options, batch_size=3)
    assert [found[0]["generated_text"] for found in together] == expected
    assert pipe("Once upon", max_new_tokens=15, do_sample=False)[0]["generated_text"] == "Once upon" + expected[0]


def test_import_of_what_transformers_saved(exported: Path, run: Path, tmp_path: Path) -> None:
    """As after fine-tuning: a folder with nothing of ours but the model."""
    transformers.AutoModelForCausalLM.from_pretrained(exported).save_pretrained(tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "saved")
    hf.import_folder(tmp_path / "saved", tmp_path / "run")
    loaded, original = gss.load(tmp_path / "run"), gss.load(run)
    assert loaded.tokenizer.hash == original.tokenizer.hash
    assert loaded.step == 0
    expected = original.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    half = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "saved")
    hf.import_folder(tmp_path / "saved", tmp_path / "from-half")
    assert {tensor.dtype for tensor in gss.load(tmp_path / "from-half").model.state_dict().values()} == {torch.float32}


def test_an_import_keeps_the_runs_settings(exported: Path, run: Path, tmp_path: Path) -> None:
    hf.import_folder(exported, tmp_path / "run")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (run, tmp_path / "run"))
    assert after == before
    assert from_mapping(TrainConfig, after).length == 128
    assert json.loads((tmp_path / "run" / "data.json").read_text())["hash"] == "f00d" * 16


def test_bad_folders(exported: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not an empty folder"):
        hf.export_run(run, exported)
    with pytest.raises(ValueError, match="not a run folder"):
        hf.export_run(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="no checkpoint of step 3"):
        hf.export_run(run, tmp_path / "out", step=3)
    with pytest.raises(ValueError, match="not an exported model"):
        hf.import_folder(tmp_path, tmp_path / "out")
    weights = copied(exported, tmp_path / "broken") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read"):
        hf.import_folder(tmp_path / "broken", tmp_path / "out")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "checkpoints before it are untouched")  # of no use here

    for where, command in (
        ("model_card", lambda: hf.export_run(run, tmp_path / "out")),
        ("save", lambda: hf.import_folder(exported, tmp_path / "out")),
    ):
        monkeypatch.setattr(f"gss.hf.exchange.{where}", full)
        with pytest.raises(OSError, match=r"no space left to write .*/out .*nothing is left") as raised:
            command()
        assert "untouched" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"broken"}  # nothing half-written


def copied(exported: Path, target: Path) -> Path:
    shutil.copytree(exported, target)
    return target


def test_weights_that_are_not_the_models(exported: Path, tmp_path: Path) -> None:
    weights = load_file(exported / "model.safetensors")
    for name, changed in (
        ("less", {name: w for name, w in weights.items() if name != "model.embedding.weight"}),
        ("more", {**weights, "model.extra": torch.zeros(2)}),
    ):
        folder = copied(exported, tmp_path / name)
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"holds no weights of the model that .*config\.json describes"):
            hf.import_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", {"model_type": "gss", "model": 2}), ("gss.json", {"config": 3}), ("gss.json", {"step": 10**30})],
)
def test_files_that_are_something_else(exported: Path, tmp_path: Path, file: str, content: dict[str, object]) -> None:
    folder = copied(exported, tmp_path / "odd")
    (folder / file).write_text(json.dumps(content))
    for read in (lambda: gss.load(folder), lambda: hf.import_folder(folder, tmp_path / "out")):
        with pytest.raises(ValueError, match="does not describe a run"):
            read()


def test_nothing_of_transformers_reads_what_is_imported(exported: Path, tmp_path: Path) -> None:
    """Its own readers know no bounds: a generation_config.json of a terabyte was read whole."""
    folder = copied(exported, tmp_path / "large")
    os.truncate(folder / "generation_config.json", 1 << 40)
    assert gss.load(hf.import_folder(folder, tmp_path / "out")).step


def test_pickled_weights_are_not_read(exported: Path, tmp_path: Path) -> None:
    folder = copied(exported, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors weights"):
        hf.import_folder(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"config": None}, "its config is None, not an object"),
        ({"data": [1]}, r"its data is \[1\], not an object"),
        ({"step": None}, "its step is None, not a whole number"),
        ({"step": -1}, "its step is -1, not a whole number"),
    ],
)
def test_a_run_that_is_not_described(exported: Path, tmp_path: Path, facts: dict[str, object], words: str) -> None:
    folder = copied(exported, tmp_path / "odd")
    (folder / "gss.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=words):
        hf.import_folder(folder, tmp_path / "out")


def test_without_the_extra(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Command) -> None:
    for name in [name for name in sys.modules if name.startswith("gss.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(gss, "hf", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, errors = command_line("export", run, tmp_path / "out")
    assert status == 1
    (line,) = errors.splitlines()
    assert "gss-lm[hf]" in line
