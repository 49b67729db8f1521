"""Checkpoint files: whole or refused, whatever happens to them."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gss.io import checkpoint
from gss.io.checkpoint import DamagedCheckpointError
from tests.conftest import posix


def _tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return {
        "model": {"a.weight": torch.randn(7, 5), "b": torch.randn(3, dtype=torch.float64)},
        "optimizer": {"a.weight:exp_avg": torch.randn(7, 5)},
    }


def _save(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(folder, step, _tensors(step), {"step": step, "note": "é"})


def test_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 12, _tensors(0), {"step": 12, "rate": 0.1})
    assert path.name == "step-00000012"
    loaded = checkpoint.load(path)
    assert (loaded.step, loaded.trainer) == (12, {"step": 12, "rate": 0.1})
    for group, members in _tensors(0).items():
        assert loaded.tensors[group].keys() == members.keys()
        for name, tensor in members.items():
            assert torch.equal(loaded.tensors[group][name], tensor)
            assert loaded.tensors[group][name].dtype == tensor.dtype


def test_no_pickle_in_any_file(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, _tensors(0), {})
    names = sorted(file.name for file in path.iterdir())
    assert names == ["manifest.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]
    for name in names:
        content = (path / name).read_bytes()
        assert json.loads(content) is not None if name.endswith(".json") else content[8:9] == b"{"


def test_200_bit_flips_and_truncations_are_all_detected(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20)
    good, newest = checkpoint.checkpoints(tmp_path)
    originals = {path: path.read_bytes() for path in newest.iterdir()}
    draw = random.Random(4)
    for trial in range(200):
        path = draw.choice(sorted(originals))
        content = bytearray(originals[path])
        if trial % 4 == 3:
            content = content[: draw.randrange(len(content))]
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=str(newest)):
            checkpoint.load(newest)
        used, damaged = checkpoint.newest_good(tmp_path)
        assert used == good
        assert len(damaged) == 1
        assert str(newest) in damaged[0]
        path.write_bytes(originals[path])
    checkpoint.verify(newest)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json", "manifest.json"])
def test_missing_and_surplus_files_are_damage(tmp_path: Path, name: str) -> None:
    _save(tmp_path, 10)
    (path,) = checkpoint.checkpoints(tmp_path)
    (path / name).rename(path / "other")
    with pytest.raises(DamagedCheckpointError):
        checkpoint.verify(path)


def test_a_group_is_read_without_the_others_and_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 10)
    path = tmp_path / "step-00000010"
    hashed: list[str] = []
    original = checkpoint.file_facts
    monkeypatch.setattr(checkpoint, "file_facts", lambda file: hashed.append(file.name) or original(file))
    used, _ = checkpoint.newest_good(tmp_path, ["model"])
    assert used == path
    assert checkpoint.load(path, ["model"], verified=True).tensors.keys() == {"model"}
    assert hashed == ["model.safetensors", "trainer.json"]
    content = bytearray((path / "optimizer.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "optimizer.safetensors").write_bytes(content)
    assert checkpoint.newest_good(tmp_path, ["model"]) == (path, [])  # the weights are good all the same
    assert checkpoint.newest_good(tmp_path)[0] is None


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000011")
    assert checkpoint.newest_good(tmp_path)[0] == tmp_path / "step-00000010"


def test_damage_is_replaced_when_its_step_is_saved_again(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    (tmp_path / "step-00000010" / "model.safetensors").write_bytes(b"")
    _save(tmp_path, 10)
    assert checkpoint.newest_good(tmp_path) == (tmp_path / "step-00000010", [])
    assert len(list(tmp_path.iterdir())) == 1


def test_retention(tmp_path: Path) -> None:
    for step in range(10, 101, 10):
        _save(tmp_path, step)
        checkpoint.retain(tmp_path, step, keep_last=2, keep_every=40)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [40, 80, 90, 100]
    assert len(list(tmp_path.iterdir())) == 4


def test_later_checkpoints_that_are_damaged_do_not_push_good_ones_out(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        _save(tmp_path, step)
    for step in (30, 40):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    _save(tmp_path, 25)  # as a run that goes on from 20 does
    checkpoint.retain(tmp_path, 25, keep_last=2, keep_every=None)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [20, 25, 30, 40]
    assert checkpoint.newest_good(tmp_path)[0] == tmp_path / "step-00000025"


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    for step in (10, 20):
        _save(tmp_path, step)
    model = tmp_path / "step-00000020" / "model.safetensors"
    model.unlink()
    model.symlink_to(tmp_path / "nowhere")
    newest, damaged = checkpoint.newest_good(tmp_path)
    assert newest == tmp_path / "step-00000010"
    assert "model.safetensors cannot be read" in damaged[0]


def test_leftovers_are_no_checkpoints_and_are_cleaned(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    (tmp_path / ".aside-step-00000020-1").mkdir()
    (tmp_path / ".aside-step-00000020-1" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest_good(tmp_path)[0] == tmp_path / "step-00000010"
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


# Files cannot grow past a limit: what a full disk does to a write, with no disk to fill.
_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from gss.io import checkpoint
folder = Path(sys.argv[1])
checkpoint.save(folder, 10, {"model": {"w": torch.zeros(10)}}, {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    checkpoint.save(folder, 20, {"model": {"w": torch.zeros(100_000)}}, {"long": "x" * 10_000})
except OSError as error:
    print(error)
    sys.exit(7)
"""


@posix
@pytest.mark.parametrize("limit", [100, 200_000])
def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path, limit: int) -> None:
    done = subprocess.run([sys.executable, "-c", _FULL_DISK, str(tmp_path), str(limit)], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert "could not write the checkpoint of step 20" in done.stdout
    assert "Free some space" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    checkpoint.verify(tmp_path / "step-00000010")


# Dies before the n-th file operation of a save that replaces a damaged checkpoint and retires an old one, for every n.
_DIE_EVERYWHERE = """
import os, sys
from pathlib import Path
import torch
from gss.io import checkpoint

def save(folder, step):
    checkpoint.save(folder, step, {"model": {"w": torch.full((5,), step)}}, {"step": step})

def die_before(count, folder):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
            seen += 1
            if seen > count:
                os._exit(9)
    sys.addaudithook(hook)

count, deaths = 0, 0
while True:
    folder = Path(sys.argv[1]) / str(count)
    for step in (10, 20, 30):
        save(folder, step)
    (folder / "step-00000030" / "trainer.json").write_text("damage")
    child = os.fork()
    if child == 0:
        die_before(count, folder)
        save(folder, 30)
        checkpoint.retain(folder, 30, 2, None)
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    newest, damaged = checkpoint.newest_good(folder)
    assert newest.name in ("step-00000020", "step-00000030"), (count, newest)
    assert newest.name == "step-00000030" or died, count
    checkpoint.clean(folder)
    for path in checkpoint.checkpoints(folder):
        if path.name != "step-00000030":
            checkpoint.verify(path)  # never half-deleted under its name
    if newest.name == "step-00000020":
        assert damaged == [] or "trainer.json" in damaged[0], damaged  # the old damage, never a half-written one
    if died == 0:
        break
    count, deaths = count + 1, deaths + 1
print(deaths)
"""


@posix
def test_death_before_any_file_operation_of_a_save(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _DIE_EVERYWHERE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15
