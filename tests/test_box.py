"""The model in the box: how it is written, how it is used where no run is named, and the one that ships."""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import gss
from experiments import box as making
from experiments.box_card import FIELDS, card
from experiments.box_export import CARD, MOST_BYTES, folder_size, write_box, write_card
from experiments.box_export import FACTS as FACTS_FILE
from experiments.box_texts import in_a_loop, line_breaks, samples, unwrap, unwrap_books
from gss import box
from gss.accounting import account
from gss.data import load_tokenizer, open_dataset
from gss.generate import Sampling, generate
from gss.nn.quantized import quantize, weights_of
from gss.recipes import recipe_path
from gss.training import resolve
from tests.making import call, make_corpus, make_run

ROOT = Path(__file__).parents[1]
RECIPE = recipe_path("box")
GREEDY = Sampling(temperature=0)
TEXT = "It was a dark and stormy night; the rain fell in torrents.\n\n  \t“Ægir,” she said, 北京 🙂\n"
FACTS: dict[str, Any] = {
    "parameters": 1234,
    "layers": "1 × gss, width 16",
    "vocabulary": "bytes",
    "bytes": 5678,
    "data": {"what": "books", "documents": 9, "tokens": 1000, "bytes": 4000, "hash": "0123456789abcdef0123"},
    "training": {
        "steps": 3,
        "planned_steps": 4,
        "batch_tokens": 500,
        "length": 64,
        "learning_rate": 4e-3,
        "seed": 0,
        "minutes": 1.5,
        "tokens_per_second": 2000.0,
    },
    "scores": [
        {"length": 512, "perplexity": 40.25, "bits_per_byte": 1.5, "word_perplexity": 300.0},
        {"length": 65_536, "perplexity": 39.75, "bits_per_byte": 1.25, "word_perplexity": 290.0},
    ],
    "held_out": {"documents": 2, "tokens": 700},
    "rounding": {"length": 512, "tokens": 700, "before": 40.1, "after": 40.2},
    "hardware": "a GPU",
    "versions": "gss 0",
    "date": "2026-11-15",
    "commit": "abc1234",
    "sample": {"prompt": "It was", "temperature": 0.7, "seed": 0, "text": "It was\nlate."},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A prepared corpus, a run on it, and the run as a box."""
    root = tmp_path_factory.mktemp("box")
    names = [(split, number) for split in ("train", "valid") for number in range(4)]
    texts = {
        f"{split}/{number}": f"the {number}th of the {split} documents says little. " * 20 for split, number in names
    }
    run = make_run("gss-hybrid-tiny", make_corpus(root, texts), root / "run", model__width=64)
    return root / "data", run, write_box(run, root / "a-box")


@pytest.fixture
def shipped(folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the small box came with the package."""
    monkeypatch.setattr(box, "SHIPPED", folders[2])
    return folders[2]


def test_the_recipe_fits() -> None:
    run = resolve(None, RECIPE, (), 8192)
    model = gss.build_model(run.model)
    quantize(model, "int4")
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert weights + 300_000 <= MOST_BYTES  # a vocabulary of 8,192 pieces takes 140 kB
    assert {"gss2", "attention"} == set(run.model.layers)
    assert run.eos_first
    assert run.steps * run.optimizer.state_space_learning_rate <= 1  # slow modes stay slow


def test_training_goes_on_in_the_next_call_and_is_not_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = argparse.Namespace(work=tmp_path, steps=50, train_minutes=None, trial=False)
    decided: dict[str, Any] = {"steps": 50, "compile": False, "probes": []}

    def call(program: str, minutes: float) -> dict[str, Any]:
        monkeypatch.setattr(making, "command", lambda *_: [sys.executable, "-c", program])
        taken = making.train(arguments, tmp_path, decided, making.Clock(minutes))
        kept = json.loads((tmp_path / "plan.json").read_text())
        assert kept["minutes"] == taken
        return dict(kept)

    saves = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(60)"
    stopped = call(saves, (making.SAVING + 3) / 60)
    done = call("pass", 1)
    assert not stopped["complete"]
    assert done["complete"]
    assert done["minutes"] > stopped["minutes"] > 2.9 / 60
    assert call("raise SystemExit(1)", 1) == done  # not run again
    decided["complete"] = False
    with pytest.raises(RuntimeError, match="ended with status 1"):
        call("raise SystemExit(1)", 1)


def test_training_continues_from_a_box(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, run, folder = folders
    start = shutil.copytree(folder, tmp_path / "start")
    write_card(start, FACTS)
    known = json.loads((start / FACTS_FILE).read_text())
    assert making.before(str(start)) == {"before": {name: known[name] for name in making.KEPT}}
    assert making.before(None) == {}
    arguments = argparse.Namespace(start=str(start), trial=False, set=["steps=3"])
    line = making.command(arguments, folders[0], tmp_path / "run", ["length=64", "batch_tokens=128", "device=cpu"])
    subprocess.run(line, check=True, capture_output=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["start"], config["eos_first"], config["steps"]) == (str(start), True, 3)
    assert config["model"] == json.loads((run / "config.json").read_text())["model"]


def test_matrices_are_integers_and_the_rest_is_float32(folders: tuple[Path, Path, Path]) -> None:
    _, run, folder = folders
    (path,) = folder.glob("checkpoints/*/model.safetensors")
    assert path.stat().st_mode & 0o777 == 0o644
    stored = load_file(path)
    for name, parameter in gss.load(run).model.named_parameters():
        if f"{name.removesuffix('weight')}packed" in stored or f"{name.removesuffix('weight')}head.packed" in stored:
            assert parameter.ndim == 2
        else:
            assert torch.equal(stored[name], parameter), name  # norms, biases, state spaces, odd widths
    kinds = {tensor.dtype for tensor in stored.values()}
    assert kinds == {torch.uint8, torch.float32}
    assert gss.load(folder).step == 3
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert not any("optimizer" in name or name.endswith((".pkl", ".pt", ".bin")) for name in names)
    assert "folder" not in json.loads((folder / "data.json").read_text())


def test_blank_lines_and_loops_are_counted(shipped: Path) -> None:
    assert in_a_loop("the house of the king, " * 4)
    assert not in_a_loop("the house of the king, " * 3)
    assert not in_a_loop("")
    found = samples(gss.load(), 5)
    assert (found["texts"], found["tokens"]) == (16, 5)
    assert 0 <= found["blank"] <= 16


def test_lines_of_prose_are_joined(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    full = "It was a dark and stormy night, and the rain fell in"
    prose, verse = f"{full}\n{full}\ntorrents.", "The sea is calm to-night.\nThe tide is full,"
    table = f"    {full}\n    {full}"
    kept = [verse, table, "", f"{full}\n\n"]
    assert unwrap("\n\n".join([prose, *kept])) == "\n\n".join([f"{full} {full} torrents.", *kept])
    (tmp_path / "train").mkdir()
    for number in range(7):
        (tmp_path / "train" / f"{number}.txt").write_text(prose, encoding="utf-8")
    assert unwrap_books(tmp_path / "train", tmp_path / "joined") == 3
    assert {path.name: path.read_text() for path in (tmp_path / "joined").iterdir()} == {
        f"{number}-unwrapped.txt": f"{full} {full} torrents." for number in (0, 3, 6)
    }
    lm = gss.load(folders[1])
    held_out = open_dataset(folders[0], "valid")
    found = line_breaks(lm, held_out.documents())
    assert found["broken"] == found["joined"]  # these documents have one line each
    assert 0 < found["broken"] < 16


def test_matrices_in_bf16_are_dense_layers_once_loaded(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, run, _ = folders
    stored = load_file(next(write_box(run, tmp_path / "box", weights="bf16").rglob("*.safetensors")))
    model = gss.load(tmp_path / "box").model
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.float32}
    assert weights_of(model) is None
    for name, tensor in gss.load(run).model.state_dict().items():
        assert torch.equal(model.get_parameter(name), tensor.to(stored[name].dtype).float())


def test_a_box_is_refused_when_it_cannot_ship(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run, folder = folders
    with pytest.raises(ValueError, match="not an empty folder"):
        write_box(run, folder)
    with monkeypatch.context() as patch:
        patch.setattr("experiments.box_export.MOST_BYTES", 1000)
        with pytest.raises(ValueError, match="more than the 1,000"):
            write_box(run, tmp_path / "large")
    assert not list(tmp_path.iterdir())
    words = Tokenizer(WordLevel({"some": 0, "words": 1, "</s>": 2, "?": 3}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    data = make_corpus(
        tmp_path, {"train/1": "some words", "valid/1": "words"}, load_tokenizer(tmp_path / "tokenizer.json")
    )
    run = make_run("gss-hybrid-tiny", data, tmp_path / "run", ids=4)
    with pytest.raises(ValueError, match="lossless"):
        write_box(run, tmp_path / "lossy")


def test_without_a_box_commands_say_so(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "SHIPPED", tmp_path / "model")
    message = "has no bundled model: name a run folder"
    with pytest.raises(ValueError, match=message):
        gss.load()
    for arguments in (["generate", "--prompt", "It"], ["eval", "--data", folders[0]], ["serve"]):
        with pytest.raises(ValueError, match=message):
            call(*arguments)


def test_commands_without_a_run_take_the_box(shipped: Path, folders: tuple[Path, Path, Path]) -> None:
    wanted = ["--prompt", "the ", "--tokens", 20, "--temperature", 0]
    text = call("generate", *wanted)
    assert text.startswith("the ")
    assert text == call("generate", shipped, *wanted) == call("generate", *wanted)
    rows = json.loads(call("eval", "--data", folders[0], "--lengths", "64", "--json"))
    assert rows["run"] == box.NAME
    assert rows["rows"] == json.loads(call("eval", shipped, "--data", folders[0], "--lengths", "64", "--json"))["rows"]
    assert "Default: box, the bundled model" in " ".join(call("generate", "--help").replace("│", " ").split())


def test_generate_puts_threads_back(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr("gss.generate.stream_texts", lambda *_, **__: used.append(torch.get_num_threads()) or iter(()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        call("generate")
        call("generate", "--threads", 3)
        monkeypatch.setattr("gss.cli.text._SMALL", 0)
        call("generate")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert used == [1, 3, 2]


def test_serve_without_a_run_takes_the_box(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("gss.serve.server")
    served: dict[str, Any] = {}
    monkeypatch.setattr(server, "serve", lambda loaded, **options: served.update(options, loaded=loaded))
    call("serve", "--device", "cpu")
    assert served["name"] == box.NAME
    assert served["loaded"].step == 3
    call("serve", shipped, "--device", "cpu")
    assert served["name"] == "a-box"


def test_a_box_goes_to_transformers(shipped: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import gss.hf as exchange

    exchange.export_run("box", tmp_path / "exported")
    wrapped = exchange.GSSForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.arange(40).unsqueeze(0)
    torch.testing.assert_close(wrapped(tokens).logits, gss.load().model(tokens)[0])


def test_the_card_has_every_figure(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    text = card(FACTS)
    for figure in ("40.25", "39.75", "65,536", "1.2500", "1,500 tokens", "1.5 times", "4 steps were planned"):
        assert figure in text
    for fact in ("2026-11-15", "abc1234", "a GPU", "> late.", "0123456789abcdef", "## Limits", "## Data"):
        assert fact in text
    layers = [{"quantiles": {"0.5": half, "0.95": slow}} for half, slow in ((120.4, 4000), (300, 3000))]
    more = card({**FACTS, "line_breaks": {"broken": 1.2, "joined": 1.3}, "memory": {"layers": layers}})
    for figure in ("1.200 bits per byte", "1.300 with the lines", "last 120 tokens", "300 in that", "3,000 to 4,000"):
        assert figure in more
    first = {"training": {**FACTS["training"], "steps": 4, "batch_tokens": 1000}, "hardware": "a larger GPU"}
    continued = card({**FACTS, "before": {**FACTS, **first}})
    assert "| first training | 4 steps of 1,000 tokens" in continued
    assert continued.index("a larger GPU") < continued.index("| training | 3 steps of 500 tokens")
    for name in FIELDS:
        with pytest.raises(ValueError, match=f"needs {name}"):
            card({key: value for key, value in FACTS.items() if key != name})
    folder = write_box(folders[1], tmp_path / "box")
    write_card(folder, FACTS)
    assert (folder / CARD).read_text() == text
    assert json.loads((folder / FACTS_FILE).read_text()) == FACTS
    assert gss.load(folder).step == 3


@pytest.mark.soak
def test_the_script_makes_a_box(tmp_path: Path) -> None:
    out = tmp_path / "box"
    options = ["--trial", "--minutes=5", f"--out={out}", f"--work={tmp_path}/work"]
    command = [sys.executable, "-m", "experiments.box", *options]
    for _ in range(2):  # the second time everything is there, and the folder is made anew
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "It was a dark and stormy night" in done.stdout
    _check_box(out)


def _check_box(folder: Path) -> None:
    """What holds of every box that was made for real."""
    assert folder_size(folder) <= MOST_BYTES
    facts = json.loads((folder / FACTS_FILE).read_text())
    assert (folder / CARD).read_text() == card(facts)
    model, tokenizer, step, _ = gss.load(folder)
    assert facts["training"]["steps"] == step
    assert facts["parameters"] == account(model.config).parameters
    assert tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    first = generate(model, tokenizer, "It was", max_tokens=40, sampling=GREEDY)
    assert first == generate(gss.load(folder).model, tokenizer, "It was", max_tokens=40, sampling=GREEDY)


needs_box = pytest.mark.skipif(
    not (box.SHIPPED / "config.json").is_file(), reason="this build comes without a model in the box (docs/box.md)"
)


@needs_box
def test_the_shipped_box() -> None:
    _check_box(box.folder())
    facts = json.loads((box.folder() / FACTS_FILE).read_text())
    assert {row["length"] for row in facts["scores"]} >= {512, 4096, 16_384, 65_536}
    assert "attention" in gss.load().model.config.layers


@needs_box
def test_the_shipped_box_writes_english() -> None:
    model, tokenizer, *_ = gss.load()
    prompt, sampling = "It was a dark and stormy night", Sampling(temperature=0.8)
    texts = [generate(model, tokenizer, prompt, max_tokens=120, sampling=sampling, seed=seed) for seed in range(4)]
    common = {"the", "and", "of", "to", "a", "in", "was", "he", "it", "that", "his", "with", "I", "as", "had", "not"}
    words = " ".join(texts).split()
    assert len(words) > 4 * 120 / 2
    assert sum(word.strip(",.;:!?“”\"'") in common for word in words) > len(words) / 6


@needs_box
@pytest.mark.soak
def test_the_shipped_box_is_quick() -> None:
    model, tokenizer, *_ = gss.load()
    generate(model, tokenizer, "It was", max_tokens=20)
    best = 0.0
    for seed in range(5):
        started = time.process_time()  # of this process: a busy machine does not count
        text = generate(model, tokenizer, "It was a dark and stormy night", max_tokens=300, seed=seed)
        seconds = (time.process_time() - started) / torch.get_num_threads()
        best = max(best, len(tokenizer.encode(text)) / seconds)
    assert best >= 100, f"{best:.0f} tokens/s"
