"""Starting from trained weights: fine-tuning, LoRA, a first state tuned or read, and the recipe that is chosen."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from train_runs import assignments, final_files, losses, small_config
from typer.testing import CliRunner

import gss
from gss import box, pieces
from gss.cli import app
from gss.config import override, parse_assignments
from gss.data import load_tokenizer, open_dataset, prepare, read_manifest
from gss.nn.lora import add_lora, merged
from gss.training.config import OptimizerConfig, TrainConfig
from gss.training.start import first_model, plan
from tests import conftest
from tests.conftest import FAMILIES, SLIDING, WINDOW_FAMILIES
from tests.making import call

CARRYING = ("gss", "gss-hybrid", "gss2", "dss")


def tune(corpus: Path, finished: Path, out: Path, **settings: object) -> gss.TrainResult:
    own = {name: value for name, value in parse_assignments(assignments()).items() if not name.startswith("model.")}
    return gss.train(None, corpus, out, quiet=True, start=str(finished), **own | settings)


def loss(run: Path | gss.LM, corpus: Path, **options: object) -> float:
    lm = run if isinstance(run, gss.LM) else gss.load(run, **options)  # type: ignore[arg-type]
    return gss.evaluate(lm, corpus, [64], split="train").rows[0].loss


def test_weights_only(corpus: Path, finished: Path, tmp_path: Path) -> None:
    """A first step at rate zero leaves the weights as they were; optimizer, schedule and step are fresh."""
    still = {"optimizer.learning_rate": 1e-30, "optimizer.state_space_learning_rate": 1e-30, "steps": 1}
    tune(corpus, finished, tmp_path / "still", **still)
    old, new = gss.load(finished), gss.load(tmp_path / "still")
    assert new.step == 1
    for name, tensor in old.model.state_dict().items():
        torch.testing.assert_close(new.model.state_dict()[name], tensor)
    tune(corpus, finished, tmp_path / "more", steps=12)
    assert loss(tmp_path / "more", corpus) < loss(finished, corpus)
    assert losses(tmp_path / "more")[0] == pytest.approx(losses(tmp_path / "still")[0], rel=1e-6)
    with pytest.raises(ValueError, match="has different settings from this run: leave out the model's settings"):
        tune(corpus, finished, tmp_path / "no", **{"model.depth": 3})
    with pytest.raises(ValueError, match="has 257 ids, the model 100: prepare the text again"):
        gss.train(override(small_config(), {"model.vocab_size": 100}), corpus, tmp_path / "no", quiet=True)
    assert not (tmp_path / "no").exists()  # a refusal leaves nothing


def test_an_exported_model_and_the_box(corpus: Path, finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from gss.hf import export_run

    export_run(finished, tmp_path / "exported")
    lm = gss.load(tmp_path / "exported")
    assert lm.step == 12
    assert lm.score("abc def") == gss.load(finished).score("abc def")
    tune(corpus, tmp_path / "exported", tmp_path / "from-exported")
    tune(corpus, finished, tmp_path / "from-run")
    assert final_files(tmp_path / "from-exported", 12) == final_files(tmp_path / "from-run", 12)
    with pytest.raises(ValueError, match="exported is not empty and is not a run folder: give another --out"):
        gss.train("gss-tiny", corpus, tmp_path / "exported", quiet=True)
    assert gss.load("box").tokenizer.hash == gss.load().tokenizer.hash
    with pytest.raises(ValueError, match=r"a different vocabulary from that of box.*prepare the text again"):
        tune(corpus, Path("box"), tmp_path / "no")


def test_lora(corpus: Path, finished: Path, tmp_path: Path) -> None:
    """It learns, changes nothing but dense layers, resumes to the bit, and is merged when it is loaded."""
    settings = {"lora": 2, "optimizer.learning_rate": 0.05}
    tune(corpus, finished, tmp_path / "straight", **settings)
    tune(corpus, finished, tmp_path / "parts", **settings, steps=8)
    gss.train(None, corpus, tmp_path / "parts", quiet=True, steps=12, allow=["steps"])
    assert loss(tmp_path / "straight", corpus) < loss(finished, corpus) - 0.01
    before, after = gss.load(finished).model.state_dict(), gss.load(tmp_path / "straight").model.state_dict()
    assert before.keys() == after.keys()
    changed = {name.rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"weight"}
    assert torch.equal(before["embedding.weight"], after["embedding.weight"])
    saved = load_file(tmp_path / "straight" / "checkpoints" / "step-00000012" / "optimizer.safetensors")
    assert all(".parametrizations.weight.0." in name for name in saved)
    assert len(losses(tmp_path / "parts")) == 12
    hf = pytest.importorskip("gss.hf")
    hf.export_run(tmp_path / "straight", tmp_path / "exported")
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == {f"model.{name}" for name in before}
    assert gss.load(tmp_path / "exported").score("abc") == gss.load(tmp_path / "straight").score("abc")


@pytest.mark.parametrize("family", conftest.ALL_FAMILIES)
def test_lora_is_its_merged_weights(family: str) -> None:
    model = gss.build_model(conftest.small_config(family)).eval()
    add_lora(model, 3)
    drawn = [parameter.flatten() for name, parameter in model.named_parameters() if name.endswith(".down")]
    assert torch.cat(drawn).std().item() == pytest.approx(3**-0.5, rel=0.15)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.endswith((".up", ".down"))
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    plain = gss.build_model(conftest.small_config(family)).eval()
    plain.load_state_dict(merged(model.state_dict()))
    tokens = torch.randint(0, 61, (2, 20))
    torch.testing.assert_close(model(tokens)[0], plain(tokens)[0])


def test_a_product_of_another_size_is_not_made() -> None:
    """It would have 4 TB."""
    place = "layer.parametrizations.weight."
    parts = {"original": (2, 2), "0.up": (10**6, 1), "0.down": (1, 10**6)}
    with pytest.raises(ValueError, match="the LoRA update of layer has the wrong size"):
        merged({place + name: torch.zeros(shape) for name, shape in parts.items()})


@pytest.mark.parametrize("family", CARRYING)
def test_the_gradient_of_a_tuned_state(family: str) -> None:
    """It is that of the loss with respect to a state that is handed in, and by differences too."""
    config = conftest.small_config(family)
    model = gss.build_model(config).double().requires_grad_(False)
    tokens = torch.randint(0, 61, (2, 12))
    state = model.initial_state(1).map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)
    model.start_from(state)
    assert model.first is not None
    model.first.learn()

    def nats(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    nats(model(tokens)[0]).backward()
    got = {name: p.grad for name, p in model.first.named_parameters() if p.grad is not None}
    model.first = None
    handed = state.map(lambda t: t.clone().requires_grad_(t.is_floating_point()))
    nats(model(tokens, handed.select([0, 0]))[0]).backward()
    for name, leaf in handed.named().items():
        if leaf.grad is not None:  # what is not learned has none
            torch.testing.assert_close(got.get(name, torch.zeros_like(leaf)), leaf.grad)
    name = next(name for name, grad in got.items() if grad.abs().max() > 1e-6)
    place = int(got[name].abs().argmax())
    values = []
    for step in (1e-5, -1e-5):
        moved = state.map(torch.clone)
        moved.named()[name].view(-1)[place] += step
        values.append(nats(model(tokens, moved.select([0, 0]))[0]).item())
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(got[name].view(-1)[place].item(), rel=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOW_FAMILIES, SLIDING])
def test_all_that_is_tuned_of_a_state_has_an_effect(family: str, corpus: Path, tmp_path: Path) -> None:
    """A model that reads nothing of its first state is refused, not trained in vain."""
    settings = {"start": str(tmp_path), "tune": "state", "model": conftest.small_config(family, vocab_size=257)}
    config = TrainConfig(length=12, batch_tokens=24, **settings)
    dataset = open_dataset(corpus, verify=False)
    if not {"gss", "gss2", "dss"} & {*config.model.kinds}:
        with pytest.raises(ValueError, match="there is nothing for tune=state to learn"):
            first_model(config, dataset, resuming=True)
        return
    model = first_model(config, dataset, resuming=True)
    tokens = torch.randint(0, 257, (2, 13))
    pieces.backward(model, tokens[:, :-1], tokens[:, 1:], piece_tokens=12)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None)
        assert parameter.grad is None or parameter.grad.norm() > 0, name


def test_tuning_a_state(corpus: Path, finished: Path, tmp_path: Path) -> None:
    """Only the state is learned; the run, and the finished one with the file, are the same model."""
    out = tmp_path / "tuned"
    tune(corpus, finished, out, tune="state", **{"optimizer.learning_rate": 0.3})
    tuned, plain = gss.load(out), gss.load(finished)
    assert {name for name in tuned.model.state_dict() if not name.startswith("first.")} == set(plain.model.state_dict())
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tuned.model.state_dict()[name], tensor)
    file = out / "state.safetensors"
    with_file = gss.load(finished, state=file)
    assert loss(out, corpus) == loss(with_file, corpus) < loss(finished, corpus)
    assert with_file.generate("abc", max_tokens=8, temperature=0) == tuned.generate("abc", max_tokens=8, temperature=0)
    gss.train(None, corpus, out, quiet=True, steps=14, allow=["steps"])
    assert len(losses(out)) == 14
    with pytest.raises(ValueError, match="is a tuned initial state"):
        tune(corpus, out, tmp_path / "no")


@pytest.mark.parametrize(
    "settings", [{"batching": "lanes", "micro_batch_tokens": 32}, {"piece_tokens": 8}, {"micro_batch_tokens": 32}]
)
def test_a_state_is_tuned_in_lanes_pieces_and_micro_batches(
    corpus: Path, finished: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    whole = {"tune": "state", "optimizer.learning_rate": 0.3, "steps": 2, "batching": "segments"}
    tune(corpus, finished, tmp_path / "whole", **whole)
    tune(corpus, finished, tmp_path / "other", **whole | settings)
    states = [gss.load_state(tmp_path / name / "state.safetensors").named() for name in ("whole", "other")]
    moved = [name for name, tensor in states[1].items() if tensor.is_floating_point() and tensor.abs().max() > 0]
    assert moved
    if "batching" not in settings:
        for name in moved:
            torch.testing.assert_close(states[1][name], states[0][name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("int8", [False, True])
def test_reading_then_continuing_is_reading_the_whole(finished: Path, tmp_path: Path, int8: bool) -> None:
    book, rest = "bad fed ace " * 60, "had a cab, a bag"
    lm = gss.load(finished)
    state = lm.read(book)
    gss.save_state(state, tmp_path / "state", int8=int8)
    started = time.perf_counter()
    kept = gss.load_state(tmp_path / "state")
    assert time.perf_counter() - started < 0.1
    whole = lm.model(torch.tensor([[lm.tokenizer.eos_id, *lm.tokenizer.encode(book + rest).tolist()]]))[0]
    tokens = torch.tensor([lm.tokenizer.encode(rest).tolist()])
    from_file = gss.load(finished, state=tmp_path / "state")
    logits = from_file.model(tokens)[0]
    torch.testing.assert_close(logits, whole[:, -tokens.shape[1] :], atol=0.05 if int8 else 1e-5, rtol=0)
    for name, tensor in state.named().items():
        scale = 0.01 * tensor.abs().max().item() if int8 and tensor.is_floating_point() else 0
        torch.testing.assert_close(kept.named()[name], tensor, atol=scale, rtol=0)
    if not int8:
        text = lm.generate(book + rest, max_tokens=12, seed=3)
        assert from_file.generate(rest, max_tokens=12, seed=3) == text
        assert text == lm.generate(rest, state=state, max_tokens=12, seed=3)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
def test_opening_an_int8_state_wakes_no_threads(tmp_path: Path) -> None:
    """torch would start its pool for the many values of the box's state, which took up to 0.4 s on a busy machine."""
    gss.save_state(gss.load("box").model.initial_state(1), tmp_path / "state", int8=True)
    script = (
        "import os, sys, torch, gss; torch.set_num_threads(3); load = gss.load_state; "
        "count = lambda: len(os.listdir('/proc/self/task')); before = count(); load(sys.argv[1]); "
        "print(count() - before); torch.ones(1_000_000) * torch.ones(1_000_000); print(count() - before)"
    )
    said = subprocess.run([sys.executable, "-c", script, tmp_path / "state"], stdout=subprocess.PIPE, check=True).stdout
    assert said.split() == [b"0", b"2"]


def test_states_of_another_model_are_refused(finished: Path, tmp_path: Path) -> None:
    other = gss.build_model(gss.preset("gss-tiny"))
    gss.save_state(other(torch.zeros(1, 3, dtype=torch.int64))[1], tmp_path / "state")
    with pytest.raises(ValueError, match="the state is another model's"):
        gss.load(finished, state=tmp_path / "state")
    (tmp_path / "bad").write_text("no")
    with pytest.raises(ValueError, match="does not hold a model's state"):
        gss.load(finished, state=tmp_path / "bad")
    named = {"position": torch.zeros(1, dtype=torch.int64), "layers.0.x": torch.zeros(99, dtype=torch.int8)}
    for scale in (torch.ones(2, dtype=torch.bfloat16), torch.ones(1), torch.tensor(1.0)):
        (tmp_path / "bad").write_bytes(save(named | {"layers.0.x:scale": scale}))
        with pytest.raises(ValueError, match="does not hold a model's state"):
            gss.load_state(tmp_path / "bad")
    with pytest.raises(ValueError, match="there is no state at"):
        gss.load(finished, state=tmp_path / "none")


def test_the_commands(corpus: Path, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("bad fed ace " * 30)
    reading = ["read", str(tmp_path / "book.txt"), str(finished), "--out", str(tmp_path / "state"), "--int8"]
    result = CliRunner().invoke(app, reading)
    assert result.stdout.startswith("read 361 tokens")
    assert result.stderr == "reading: 100%\n"
    assert call("generate", finished, "--state", tmp_path / "state", "--prompt", "had", "--tokens", 5).startswith("had")
    started = ("--state", tmp_path / "state")
    scoring = ("eval", finished, "--data", corpus, "--lengths", 64)
    alone, after = (json.loads(call(*scoring, "--json", *state)) for state in ((), started))
    assert alone["rows"][0]["loss"] != after["rows"][0]["loss"]
    assert after["state"] == str(tmp_path / "state")
    assert f"from{tmp_path / 'state'}onvalid" in "".join(call(*scoring, *started).split())
    sets = [f"--set={each}" for each in assignments(steps=2) if not each.startswith("model.")]
    said = call("train", "--from", finished, "--lora", 2, "--data", corpus, "--out", tmp_path / "lora", *sets)
    assert "using the recipe lora, for LoRA of rank 2" in said
    assert "of which" in said
    again = call("train", "--data", corpus, "--out", tmp_path / "lora", "--set", "steps=3", "--allow", "steps")
    assert "using the settings of the run" in again
    assert gss.load(tmp_path / "lora").step == 3


@pytest.mark.parametrize(
    ("settings", "recipe"),
    [
        ({}, "quickstart"),
        ({"model.width": 512, "model.depth": 12, "device": "cpu"}, "cpu"),
        ({"start": "box"}, "fine-tune"),
        ({"start": "box", "tune": "state"}, "tune-state"),
    ],
)
def test_the_recipe_is_chosen(corpus: Path, tmp_path: Path, settings: dict[str, object], recipe: str) -> None:
    preset = None if "start" in settings else "gss-hybrid-tiny"
    config, said = plan(corpus, tmp_path / "out", preset, None, settings)
    assert said.startswith(f"using the recipe {recipe}, for ")
    named, nothing = plan(corpus, tmp_path / "out", preset, recipe, settings)
    assert (config, nothing) == (named, "")
    assert config.steps <= 600


def test_the_library_says_which_recipe_it_chose(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"model": {"width": 16, "depth": 1, "gate_width": 32, "channels": 4}, "length": 64, "batch_tokens": 64}
    gss.train("gss-tiny", corpus, tmp_path / "run", steps=1, **small)
    assert capsys.readouterr().out.startswith("using the recipe quickstart, for 0.0M parameters")
    gss.train("gss-tiny", corpus, tmp_path / "run", quiet=True)
    assert capsys.readouterr().out == ""
    lm = gss.load(tmp_path / "run", device="auto")
    assert lm.model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_settings_are_those_of_the_chosen_recipe(corpus: Path, tmp_path: Path) -> None:
    """Not of the paper's, with its rows of 4,096 tokens, before a recipe is chosen."""
    config, _ = plan(corpus, tmp_path / "out", "gss-hybrid-tiny", None, {"batch_tokens": 1024})
    assert (config.batch_tokens, config.length) == (1024, 512)
    with pytest.raises(ValueError, match=r"batch_tokens \(4096\) must be a multiple of length \(3000\)"):
        plan(corpus, tmp_path / "out", "gss-hybrid-tiny", None, {"length": 3000})


def test_data_without_documents_to_train_on(tmp_path: Path) -> None:
    for name in ("valid-a.txt", "valid-b.txt"):
        (tmp_path / name).write_text(f"held out {name}")
    corpus = tmp_path / "corpus"
    prepare([str(tmp_path / "valid-a.txt"), str(tmp_path / "valid-b.txt")], corpus, load_tokenizer("bytes"))
    command = ["train", "--preset", "gss-tiny", "--data", str(corpus), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ValueError)
    assert "has no split 'train', only valid" in str(result.exception)


def test_a_corpus_that_is_read_often(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gss.training.start.pick_device", lambda _: torch.device("cuda"))
    tokens = read_manifest(corpus).splits["train"]["tokens"]

    def chosen(steps: int, preset: str = "gss2-small", **settings: object) -> tuple[float, float, str]:
        rows = {"steps": steps, "length": 16, "batch_tokens": 1024}
        config, said = plan(corpus, tmp_path / "out", preset, None, rows | settings)
        return config.optimizer.weight_decay, config.model.dropout, said

    often = 5 * tokens // 1024 + 1
    *found, said = chosen(often)
    assert found == [1.0, 0.15]
    assert "recipe muon" in said
    times = f". It reads the corpus {often * 1024 / tokens:.1f} times, hence "
    assert said.endswith(times + "optimizer.weight_decay=1 and model.dropout=0.15")
    *found, said = chosen(often, "gss-small")  # whose layers have no dropout
    assert found == [1.0, 0.0]
    assert said.endswith(times + "optimizer.weight_decay=1")
    *found, said = chosen(often, **{"optimizer.weight_decay": 0.3})
    assert found == [0.3, 0.15]
    assert said.endswith(times + "model.dropout=0.15")
    assert chosen(often, **{"optimizer.weight_decay": 0.3, "model.dropout": 0.0})[:2] == (0.3, 0.0)
    assert chosen(often, **{"optimizer.name": "adamw"})[0] < 1.0  # which has not been measured
    assert chosen(often, optimizer={"weight_decay": 0.3, "clip_norm": 2.0})[0] == 0.3
    assert chosen(often, optimizer=OptimizerConfig(weight_decay=0.3))[0] == 0.3
    assert chosen(often, optimizer={"clip_norm": 2.0})[0] == 1.0
    assert chosen(often // 5)[:2] == (0.1, 0.0)


def test_a_corpus_without_documents_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("held out, all of it\n" * 20)
    prepare([str(tmp_path / "valid.txt")], tmp_path / "corpus", load_tokenizer("bytes"))
    with pytest.raises(ValueError, match="has no split 'train', only valid"):
        gss.train("gss-tiny", tmp_path / "corpus", tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tune": "state"}, "tune=state needs trained weights"),
        ({"lora": 4}, "lora needs trained weights"),
        ({"start": "box", "lora": 4, "tune": "state"}, "cannot be combined"),
        ({"start": "box", "tune": "state", "batching": "packed"}, "does not work with packed rows"),
        ({"start": "box", "lora": 4, "parallel": "fsdp2"}, "use parallel=ddp"),
        ({"start": "nowhere"}, "nowhere is not a run folder"),
    ],
)
def test_what_cannot_be(corpus: Path, tmp_path: Path, settings: dict[str, object], message: str) -> None:
    preset = None if "start" in settings else "gss-tiny"
    with pytest.raises(ValueError, match=message):
        plan(corpus, tmp_path / "out", preset, None, settings)


def test_what_an_error_suggests_is_possible(corpus: Path, finished: Path, tmp_path: Path) -> None:
    """Another model is not resumed with --allow, and weights without an optimizer are to be started from."""
    changed = small_config(model__pattern='["gss"]')
    with pytest.raises(ValueError, match=r"model\.pattern was .*choose another --out$"):
        gss.train(changed, corpus, finished, quiet=True)
    with pytest.raises(ValueError, match=r"steps was 12, now 13.*or resume anyway with --allow steps$"):
        gss.train(small_config(steps=13), corpus, finished, quiet=True)
    preset = replace(small_config("gss2"), preset="gss2-tiny")  # changes much, and the name says it all
    with pytest.raises(
        ValueError, match=r'different settings: preset was "gss-hybrid-tiny", now "gss2-tiny"\. Restore them'
    ):
        gss.train(preset, corpus, finished, quiet=True)
    shutil.copytree(box.folder(), tmp_path / "copy")
    assert gss.load(tmp_path / "copy").step == gss.load().step
    with pytest.raises(ValueError, match=r"has weights only.*with --from"):
        gss.train("gss-hybrid-small", corpus, tmp_path / "copy", quiet=True)
