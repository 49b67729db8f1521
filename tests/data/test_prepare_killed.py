"""SIGKILL at random moments of `prepare`, then again: byte for byte what an undisturbed run gives."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from data_corpora import folder_bytes, make_text

from gss.data import SourceOptions, load_tokenizer, prepare
from gss.data.chunks import CHUNK
from tests.conftest import posix

pytestmark = posix

SPAN = 120_000
RUN = f"""
import sys
from gss.data import SourceOptions, load_tokenizer, prepare
if __name__ == "__main__":
    options = SourceOptions(span_bytes={SPAN})
    prepare([sys.argv[1]], sys.argv[2], load_tokenizer(sys.argv[3]), options=options, valid=0.2, workers=2)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "corpus"
    folder.mkdir()
    for seed in range(120):
        (folder / f"{seed:03d}.txt").write_text(make_text(seed, 700))
    (folder / "long.txt").write_text("".join(make_text(seed, 3000) for seed in range(5 * CHUNK // 22_000)))
    (folder / "bad.txt").write_bytes(b"\xff")
    (folder / "copy.txt").write_bytes((folder / "007.txt").read_bytes())
    return folder


def kill_often(corpus: Path, tokenizer: Path, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill `kills` runs at random moments of their work; compare whenever a run gets through."""
    undisturbed = folder / "undisturbed"
    script = folder / "run.py"
    script.write_text(RUN)
    started = time.monotonic()
    options = SourceOptions(span_bytes=SPAN)
    prepare([str(corpus)], undisturbed, load_tokenizer(tokenizer), options=options, valid=0.2, workers=2)
    duration = time.monotonic() - started
    expected = folder_bytes(undisturbed)
    chooser = random.Random(seed)
    out, work = folder / "out", folder / "out.preparing"
    seen = {"killed": 0, "kept parts": 0, "complete": 0}
    while True:
        command = [sys.executable, str(script), str(corpus), str(out), str(tokenizer)]
        process = subprocess.Popen(command, start_new_session=True)
        if seen["killed"] < kills:
            # Every other one when there is something to keep, however slow the machine is.
            sign = "share/part-*[0-9]" if seen["killed"] % 2 else "plan"
            while process.poll() is None and not any(work.glob(sign)):
                time.sleep(0.002)
            time.sleep(chooser.uniform(0, duration))
        else:
            process.wait()
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)  # the parent alone: its workers must notice
            process.wait()
            seen["killed"] += 1
            seen["kept parts"] += any(work.glob("share/part-*[0-9]"))
            wait_for_group_to_end(process.pid)
            assert not out.exists() or folder_bytes(out) == expected
            continue
        assert process.returncode == 0
        assert folder_bytes(out) == expected
        assert not work.exists()
        seen["complete"] += 1
        if seen["killed"] >= kills:
            return seen
        out.rename(folder / f"out-{seen['complete']}")


def wait_for_group_to_end(group: int) -> None:
    def running(process: psutil.Process) -> bool:
        """A zombie is not: whoever has adopted it reaps it when it likes."""
        try:
            return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    for _ in range(500):
        if not any(map(running, psutil.process_iter())):
            return
        time.sleep(0.01)
    raise AssertionError("worker processes outlived their parent by 5 seconds")


def test_twenty_kills(corpus: Path, trained_folder: Path, tmp_path: Path) -> None:
    seen = kill_often(corpus, trained_folder, tmp_path, kills=20, seed=0)
    assert seen["killed"] == 20
    assert seen["kept parts"] >= 5  # some kills came after work worth keeping


@pytest.mark.soak
def test_two_hundred_kills(corpus: Path, trained_folder: Path, tmp_path: Path) -> None:
    assert kill_often(corpus, trained_folder, tmp_path, kills=200, seed=1)["killed"] == 200
