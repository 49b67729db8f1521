"""A run that is stopped and gone on with is the run that was never stopped, to the bit."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import FAMILIES, final_files, losses, run, small_config, window_config

import gss
from gss.data import load_tokenizer
from gss.io import checkpoint
from gss.training import loop, train
from gss.training.step import Stepper
from tests.conftest import WINDOW_FAMILIES
from tests.making import make_corpus, stop_in_step


@pytest.mark.parametrize(
    ("family", "batching", "optimizer"),
    [
        *((f, b, "adamw") for f in FAMILIES for b in ("segments", "lanes", "packed") if f + b != "transformerlanes"),
        ("llama", "packed", "adamw"),
        ("gss-hybrid", "lanes", "muon"),
        ("gss-hybrid", "lengthened", "muon"),
        ("gss2", "segments", "muon"),  # with dropout
    ],
)
def test_forty_steps_with_stops_at_random_steps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, batching: str, optimizer: str
) -> None:
    rows: dict[str, Any] = (
        {"late_length": 64, "late_share": 0.4} if batching == "lengthened" else {"batching": batching}
    )
    rows |= {"model__dropout": 0.1} if family == "gss2" else {}
    config = small_config(family, **rows, optimizer__name=optimizer, steps=40, checkpoint__every=9)
    straight = run(config, corpus, tmp_path / "straight")
    draw = random.Random(f"{family} {batching}")
    stops = 0
    while True:
        with monkeypatch.context() as patch:
            stop_in_step(patch, draw.randint(1, 15))
            result = train(config, corpus, tmp_path / "stopped", quiet=True)
        if result.signal is None:
            break
        stops += 1
    assert stops >= 2
    assert losses(tmp_path / "stopped") == straight
    assert len(straight) == 40
    assert final_files(tmp_path / "stopped", 40) == final_files(tmp_path / "straight", 40)
    assert straight[-1] < straight[0] - 1
    if batching == "lengthened":  # the first 24 steps are those of a run whose rows stay short
        short = run(replace(config, late_length=None), corpus, tmp_path / "short")
        assert short[:24] == straight[:24]
        assert short[24:] != straight[24:]


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_transformers_on_windows_resume_and_are_used(corpus: Path, tmp_path: Path, family: str) -> None:
    """With dropout: a run that stops and goes on ends with the bytes of the one that did not."""
    config = window_config(family, model__dropout=0.1, steps=12, optimizer__learning_rate=0.03)
    straight = run(config, corpus, tmp_path / "straight")
    assert straight[-1] < straight[0] - 0.5
    stopped = shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    for step in (12, 8):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step:08d}")
    assert run(config, corpus, stopped) == straight
    assert final_files(stopped, 12) == final_files(tmp_path / "straight", 12)
    lm = gss.load(stopped)
    assert lm.step == 12
    assert not lm.model.training
    assert all(row.loss < 6 for row in gss.evaluate(lm, corpus, [16, 64], max_tokens=256, piece=24).rows)
    assert lm.generate("ab", max_tokens=20, seed=1) == lm.generate("ab", max_tokens=20, seed=1)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    corpus: Path, resumed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = losses(resumed)
    newest = checkpoint.checkpoints(resumed / "checkpoints")[-1]
    tensors = newest / "model.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-3] ^= 4
    tensors.write_bytes(content)
    train(small_config(), corpus, resumed)
    shown = capsys.readouterr().out
    assert f"{newest} is damaged: model.safetensors has other contents than were written" in shown
    assert "resuming from step 8" in shown
    assert losses(resumed) == straight
    checkpoint.verify(newest)


def test_nothing_intact_is_refused(corpus: Path, resumed: Path) -> None:
    for path in checkpoint.checkpoints(resumed / "checkpoints"):
        (path / "trainer.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"no checkpoint .* is intact: restore one, or delete them"):
        run(small_config(), corpus, resumed)


def test_other_settings_are_refused_unless_allowed(corpus: Path, resumed: Path) -> None:
    longer = small_config(steps=16, optimizer__learning_rate=0.02)
    config = (resumed / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"learning_rate was 0.01, now 0.02; steps was 12, now 16.*--allow steps"):
        run(longer, corpus, resumed)
    with pytest.raises(ValueError, match="steps was 12"):
        run(longer, corpus, resumed, allow=["optimizer.learning_rate"])
    assert (resumed / "config.json").read_bytes() == config
    before = losses(resumed)
    after = run(longer, corpus, resumed, allow=["optimizer.learning_rate", "steps"])
    assert after[:12] == before
    assert len(after) == 16
    with pytest.raises(ValueError, match="already has 16 steps, more than steps=12"):
        run(small_config(optimizer__learning_rate=0.02), corpus, resumed, allow=["steps"])
    with pytest.raises(ValueError, match="--allow stepz: there is no such setting; did you mean steps"):
        run(longer, corpus, resumed, allow=["stepz"])
    with pytest.raises(ValueError, match=r"model.vocab_size was 257, now 300.*choose another --out$"):
        run(small_config(steps=16, model__vocab_size=300), corpus, resumed)
    config = (resumed / "config.json").read_bytes()
    wider = small_config(steps=16, model__width=32)
    with pytest.raises(ValueError, match=r"the checkpoint belongs to another model.*has shape"):  # allowed or not
        run(wider, corpus, resumed, allow=["model.width", "optimizer.learning_rate"])
    assert (resumed / "config.json").read_bytes() == config


def test_another_optimizer_starts_afresh(corpus: Path, tmp_path: Path) -> None:
    run(small_config(steps=2), corpus, tmp_path / "run")
    other = small_config(steps=4, optimizer__name="muon")
    assert len(run(other, corpus, tmp_path / "run", allow=["steps", "optimizer.name"])) == 4
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000004").trainer["optimizer"]
    assert {state["step"] for state in saved.values()} == {2}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("how", ["another owner", "missing", "nothing", "no scalars", "another shape", "fewer lanes"])
def test_a_state_that_does_not_fit_is_refused(corpus: Path, tmp_path: Path, optimizer: str, how: str) -> None:
    config = small_config("gss", batching="lanes", optimizer__name=optimizer, steps=1)
    run(config, corpus, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    saved = checkpoint.load(folder / "step-00000001")
    tensors, trainer = saved.tensors, saved.trainer
    state, owner = tensors["optimizer"], "layers.0.gate.weight"
    own = [name for name in state if name.startswith(f"{owner}:")]
    if how == "another owner":
        state["layers.7.gate.weight:momentum"] = torch.zeros(2)
        message = r"does not fit this run: layers\.7\.gate\.weight:momentum has shape \[2\] there, none here"
    elif how == "missing":
        del state[own[0]]
        message = rf"does not fit this run: {own[0]} has shape none there, \["
    elif how == "nothing":
        tensors["optimizer"], trainer["optimizer"] = {}, {}
        message = r"does not fit this run: .* has shape none there, \["
    elif how == "no scalars":
        trainer["optimizer"] = {}
        message = r"does not fit this run: .*:step has shape none there, \[\] here"
    elif how == "another shape":
        state[own[-1]] = state[own[-1]].repeat(2, 1)
        message = rf"does not fit this run: {own[-1]} has shape \[.* there, \[.* here; resume with the settings"
    else:
        tensors["lanes"] = {name: tensor[:-1].contiguous() for name, tensor in tensors["lanes"].items()}
        message = r"carries the states of 3 rows, but this run has 4: resume with the settings"
    checkpoint.save(folder, 1, tensors, trainer)
    with pytest.raises(ValueError, match=message):
        train(config, corpus, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("trainer", ["{}", '{"config": [], "data": {}, "optimizer": {}}', '{"imported": true}'])
def test_a_checkpoint_without_training_is_refused(corpus: Path, tmp_path: Path, trainer: str) -> None:
    config = small_config(steps=1)
    run(config, corpus, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    tensors = checkpoint.load(folder / "step-00000001").tensors
    checkpoint.save(folder, 1, tensors, json.loads(trainer))
    with pytest.raises(ValueError, match="has weights only, so training cannot resume"):
        train(config, corpus, tmp_path / "run", quiet=True)


def test_habits_may_change(corpus: Path, tmp_path: Path, resumed: Path) -> None:
    settings = {
        "checkpoint__every": 3,
        "report__log_every": 5,
        "micro_batch_tokens": 32,
        "piece_tokens": 10,
        "activation_checkpointing": True,
    }
    assert train(small_config(**settings), corpus, resumed, quiet=True).loss is None
    straight = losses(resumed)
    for step in (12, 8):
        (resumed / "checkpoints" / f"step-{step:08d}").rename(tmp_path / f"lost-{step}")
    assert run(small_config(**settings), corpus, resumed) == pytest.approx(straight, abs=1e-4)


def test_other_data_is_refused(corpus: Path, tmp_path: Path, resumed: Path) -> None:
    other = make_corpus(tmp_path, ["other words " * 500], valid=0)
    with pytest.raises(ValueError, match=r"data.hash was .*, now .*--allow data.hash"):
        run(small_config(), other, resumed)


def test_another_vocabulary_is_refused_whatever_is_allowed(corpus: Path, tmp_path: Path) -> None:
    config = small_config(steps=1, model__vocab_size=8192)
    run(config, corpus, tmp_path / "run")
    other = make_corpus(tmp_path, ["other words " * 500], gss.load().tokenizer, valid=0)
    with pytest.raises(ValueError, match=r"data.tokenizer was .* choose another --out$"):
        train(config, other, tmp_path / "run", quiet=True, allow=["data.hash"])
    with pytest.raises(ValueError, match=r"--allow data.tokenizer: there is no such setting"):
        train(config, other, tmp_path / "run", quiet=True, allow=["data.hash", "data.tokenizer"])


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_a_folder_of_something_else_is_left_alone(corpus: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="is not empty and is not a run folder"):
        run(small_config(), corpus, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: '{"model_type": "llama"}'}


def test_two_processes_cannot_train_in_one_folder(corpus: Path, tmp_path: Path) -> None:
    first = loop.RunFolder(tmp_path / "run")
    first.open()
    with pytest.raises(ValueError, match="another process is training in"):
        run(small_config(), corpus, tmp_path / "run")
    first.close()
    run(small_config(), corpus, tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_the_run(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = losses(finished)
    original = Stepper.step

    def poisoned(stepper: Stepper, batch: Any, number: int) -> Any:
        if number == 9 and log_every == 1:
            with torch.no_grad():
                stepper.model.embedding.weight[0, 0] = float("nan")
        elif number == 9:
            stepper.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
        return original(stepper, batch, number)

    for log_every, what in ((1, "nan and .* norm nan"), (100, r"[\d.]+ and .* norm (inf|nan)")):
        out = tmp_path / f"run{log_every}"
        config = small_config(report__log_every=log_every)
        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "step", poisoned)
            with pytest.raises(ValueError, match=rf"loss at step 10 is {what}.*resumes from step 8.*learning_rate"):
                run(config, corpus, out)
        assert checkpoint.newest_good(out / "checkpoints")[0] == out / "checkpoints" / "step-00000008"
        assert losses(out) == straight[:9]
        assert run(config, corpus, out) == straight


@pytest.mark.parametrize("how", ["replaced", "truncated", "touched"])
def test_data_that_changes_under_the_run_stops_it(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    straight = losses(finished)
    shutil.copytree(corpus, tmp_path / "data")
    tokens = tmp_path / "data" / "train.tokens"
    original = Stepper.step

    def meddle(stepper: Stepper, batch: Any, number: int) -> Any:
        if number == 5 and how == "replaced":
            shutil.copy(tokens, tmp_path / "copy")
            (tmp_path / "copy").replace(tokens)
        elif number == 5 and how == "truncated":
            (tmp_path / "data" / "train.names").write_text("")
        elif number == 5:
            tokens.touch()
        return original(stepper, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", meddle)
        with pytest.raises(ValueError, match=r"the data changed during the run, so step 8 was not saved.*from step 4"):
            run(small_config(), tmp_path / "data", tmp_path / "run")
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000004"]
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(corpus, tmp_path / "data")
    assert run(small_config(), tmp_path / "data", tmp_path / "run") == straight


def test_a_disk_that_fills_up_stops_the_run(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = losses(finished)
    save_file = checkpoint.safetensors.torch.save_file

    def full(tensors: Any, path: Path) -> None:
        if "step-00000008" in str(path) and path.name == "optimizer.safetensors":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match=r"could not write the checkpoint of step 8: .*No space left.*Free some"):
            run(small_config(), corpus, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert run(small_config(), corpus, tmp_path / "run") == straight


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_metrics_on_a_full_disk(tmp_path: Path) -> None:
    folder = loop.RunFolder(tmp_path)
    folder.metrics = Path("/dev/full")
    with pytest.raises(
        OSError, match=r"no space left to write /dev/full .*run the same command again; it resumes from"
    ):
        folder.append_metrics([{"step": 1}])


def test_the_run_folder_explains_itself(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    config = small_config(report__tensorboard=True)
    run(config, corpus, out)
    assert json.loads((out / "config.json").read_text())["model"]["width"] == 16
    data = json.loads((out / "data.json").read_text())
    assert data["hash"] == json.loads((corpus / "manifest.json").read_text())["hash"]
    (environment,) = json.loads((out / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    (out / "environment.json").write_text("not what it was")  # no reason not to go on
    run(config, corpus, out)
    assert len(json.loads((out / "environment.json").read_text())) == 1
    modes = {
        path.stat().st_mode for path in out.rglob("*") if path.is_file() and path.parent.parent.name == "checkpoints"
    }
    assert modes == {(out / "data.json").stat().st_mode}
    assert load_tokenizer(out / "tokenizer").hash == data["tokenizer"]
    trainer = checkpoint.load(out / "checkpoints" / "step-00000012").trainer
    assert trainer["config"]["steps"] == 12
    assert trainer["data"]["hash"] == data["hash"]
    assert list((out / "tensorboard").iterdir())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1].keys() >= {"step", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "targets", "mfu"}
