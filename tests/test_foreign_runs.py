"""Run folders from elsewhere: whatever is in them, loading gives a clear error at once, and writes nowhere else."""

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gss
from gss.io import checkpoint
from gss.io.files import read_json, write_file, written_folder
from gss.io.runs import read_metrics
from gss.training.folder import RunFolder
from tests.conftest import ALL_FAMILIES, small_config
from tests.making import save_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_run(gss.build_model(small_config("gss", vocab_size=257)), tmp_path / "run")


def configure(run: Path, **changes: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    for name, value in changes.items():
        group, _, field = name.rpartition("__")
        (config["model"][group] if group else config["model"])[field] = value
    (run / "config.json").write_text(json.dumps(config))


def reseal(path: Path, **contents: bytes) -> None:
    """Change files of a checkpoint and make its manifest true again, as anyone can."""
    for name, content in contents.items():
        (path / name.replace("__", ".")).write_bytes(content)
    files = {
        each.name: {"size": each.stat().st_size, "sha256": hashlib.sha256(each.read_bytes()).hexdigest()}
        for each in sorted(path.iterdir())
        if each.name != checkpoint.MANIFEST
    }
    (path / checkpoint.MANIFEST).write_bytes(checkpoint._manifest(1, files))


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 10**9},
        {"width": 10**30},
        {"depth": 3},
        {"depth": 30_000},
        {"depth": 10**9},
        {"channels": 10**9, "gate_width": 10**9},
        {"state_space__modes": 10**9},
        {"pattern": ["feedback"], "recurrent__blocks": 10**9},
        {"pattern": ["dss"], "dss_mixers": 10**9},
        {"vocab_size": 10**12},
        {"pattern": ["attention"], "attention__sliding": 10**9},
        {"pattern": ["slide"], "attention__window": 10**9},
        {"state_space__decay_range": [1e-3, float("inf")]},
        {"norm_epsilon": 10**400},
    ],
)
def test_sizes_that_the_weights_have_not(run: Path, changes: dict[str, Any]) -> None:
    configure(run, **changes)
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"holds no weights of the model that .*config.json|must be|Exceeds"):
        gss.load(run)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("size", ["sliding", "window"])
def test_a_state_that_no_model_of_these_weights_has(tmp_path: Path, size: str) -> None:
    kind = {"sliding": "attention", "window": "slide"}[size]
    model = gss.build_model(small_config("gss", vocab_size=257, pattern=(kind,)))
    folder = save_run(model, tmp_path / "run")
    gss.load(folder)
    configure(folder, **{f"attention__{size}": 10**9})
    with pytest.raises(ValueError, match="holds no weights of the model"):
        gss.load(folder)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_is_known_by_its_shapes(tmp_path: Path, family: str) -> None:
    model = gss.build_model(small_config(family, vocab_size=257)).eval()
    loaded = gss.load(save_run(model, tmp_path / "run"))
    tokens = torch.tensor([[256, 3, 4]])
    assert torch.equal(loaded.model(tokens)[0], model(tokens)[0])


def deeply(levels: int = 200_000) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", deeply()),
        ("config.json", b'{"model": [1, 2]}'),
        ("config.json", b"\xff\xfe"),
        ("config.json", b'{"model": {"width": ' + b"9" * 5000 + b"}}"),
        ("tokenizer/vocabulary.json", deeply()),
        ("tokenizer/vocabulary.json", b"[]"),
        (
            "tokenizer/vocabulary.json",
            b'{"kind": "bytes", "file": null, "eos": null, "hash": "", "vocab_size": "\\ud800", "eos_id": 256}',
        ),
        ("tokenizer/vocabulary.json", b'{"kind": "bytes", "file": null, "eos": [1], "hash": ""}'),
        ("tokenizer/vocabulary.json", b'{"kind": "tokenizer.json", "file": "/dev/zero", "eos": null, "hash": ""}'),
        ("checkpoints/step-00000001/manifest.json", deeply()),
        ("checkpoints/step-00000001/manifest.json", b"[]"),
    ],
)
def test_files_that_are_something_else(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    with pytest.raises(ValueError, match=str(run)):
        gss.load(run)


@pytest.mark.parametrize(
    "change",
    [
        {"model__safetensors": b"not safetensors"},
        {"model__safetensors": struct.pack("<Q", 1 << 40) + b"{}"},
        {"model__safetensors": struct.pack("<Q", 2) + b"{}"},
        {"trainer__json": deeply()},
        {"trainer__json": b"[1]"},
    ],
)
def test_a_checkpoint_that_is_sealed_and_malformed(run: Path, change: dict[str, bytes]) -> None:
    reseal(run / "checkpoints/step-00000001", **change)
    with pytest.raises(ValueError, match=r"damaged|holds no weights"):
        gss.load(run)


@pytest.mark.parametrize("files", [["model.safetensors"], {"model.safetensors": 3}, {"x": {"size": 1}}, 7])
def test_a_manifest_whose_files_are_none(run: Path, files: Any) -> None:
    path = run / "checkpoints/step-00000001"
    (path / checkpoint.MANIFEST).write_bytes(checkpoint._manifest(1, files))
    with pytest.raises(ValueError, match="damaged"):
        gss.load(run)


@pytest.mark.parametrize(
    "change",
    [
        {"position": torch.tensor(3)},
        {"position": torch.tensor([3.0, 3.0])},
        {name: torch.tensor([3, -3]) for name in ("position", "layers.0.length")},
        {name: torch.tensor([2**62, 2**62]) for name in ("position", "layers.0.length")},
        {"layers.0.length": torch.tensor([3, 2])},
        {name: torch.tensor([3, 500]) for name in ("position", "layers.0.length")},
        {"layers.7.keys": torch.zeros(1)},
        {"layers.0.keys:scale": torch.tensor(1.0)},
        {"x": torch.zeros(1)},
    ],
)
def test_states_that_are_none(tmp_path: Path, change: dict[str, torch.Tensor]) -> None:
    model = gss.build_model(small_config("transformer", depth=1, vocab_size=257)).eval()
    tokens = torch.tensor([[1, 2, 3]] * 2)
    state = model(tokens)[1]
    assert state is not None
    save_file({**state.named(), **change}, tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match=r"does not hold a model's state|the state is"):
        model(tokens, gss.load_state(tmp_path / "state.safetensors"))


@pytest.mark.skipif(os.name == "nt", reason="there are none there")
def test_a_pipe_is_not_waited_for(run: Path) -> None:
    pipe, place = run / "state.safetensors", run / "checkpoints/step-00000001/model.safetensors"
    place.unlink()
    for path in (pipe, place):
        os.mkfifo(path)
    (run / "lock").unlink(missing_ok=True)
    os.mkfifo(run / "lock")
    with pytest.raises(ValueError, match="there is no state at"):
        gss.load_state(pipe)
    with pytest.raises(ValueError, match=r"model.safetensors is not a file"):
        gss.load(run)
    with pytest.raises(ValueError, match="lock is a link or not a file"):
        RunFolder(run).open()


def test_a_json_of_any_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="is too large"):
        read_json(tmp_path / "large.json")


def test_metrics_end_where_they_are_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for broken in ("[1]", "7", '{"loss": 1}', '{"step": "x"}', "{", "[" * 100_000):
        path.write_text('{"step": 1}\n' + broken + '\n{"step": 2}\n')
        assert read_metrics(path) == [{"step": 1}]


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
class TestLinks:
    """A link in the folder is never written through."""

    @pytest.fixture
    def precious(self, tmp_path: Path) -> Path:
        path = tmp_path / "precious"
        path.write_text("precious")
        return path

    @pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
    def test_of_a_run(self, run: Path, precious: Path, name: str) -> None:
        (run / "lock").touch()
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(precious)
        with pytest.raises(ValueError, match=f"{name} is a link"):
            RunFolder(run).open()
        assert precious.read_text() == "precious"

    @pytest.mark.parametrize(
        "write",
        [
            lambda folder: write_file(folder / "x", "new"),
            lambda folder: RunFolder(folder).write_sample(1, "new"),
            lambda folder: written_folder(folder / "x").__enter__(),
            lambda folder: checkpoint.save(folder / "checkpoints", 1, {}, {}),
            lambda folder: checkpoint.clean(folder / "checkpoints"),
        ],
    )
    def test_aside(self, tmp_path: Path, precious: Path, write: Callable[[Path], Any]) -> None:
        folder = tmp_path / "folder"
        places = [
            f".x.aside-{os.getpid()}",
            f"checkpoints/.aside-step-00000001-{os.getpid()}",
            "samples/step-00000001.txt",
        ]
        for place in places:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).symlink_to(precious)
        write(folder)
        assert precious.read_text() == "precious"
