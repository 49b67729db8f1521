"""The scripts in examples/ run as they are, only shorter, and do what they say."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'run("{path.stem}"' in source
        assert len(path.read_text().splitlines()) <= 80


def test_a_custom_hybrid(run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a custom hybrid learns this line. " * 50)
    losses = re.findall(r": ([\d.]+) nats", run("custom_hybrid", tmp_path / "text.txt", "--steps=8", "--length=64"))
    assert float(losses[-1]) < float(losses[0]) - 1


def test_a_branched_state(run) -> None:
    said = run("branch_state").splitlines()
    assert [line.startswith("…") for line in said] == [True, True, False]
    assert said[0] != said[1]
    before, after = map(int, re.findall(r"(\d+) tokens read before, (\d+) after", said[2])[0])
    assert 0 < before < after


def test_fine_tuning_the_box(run, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(10):
        words = f"xylo {number} qwerty zebra fjord {number * 7} plinth. " * 12
        (tmp_path / "texts" / f"{number}.txt").write_text(words)
    said = run("fine_tune", tmp_path / "texts", "--out", tmp_path / "out", "--steps=2", "--length=64")
    box, tuned = map(float, re.findall(r": ([\d.]+) bits per byte", said))
    assert tuned < box


def test_a_layer_inside(run) -> None:
    said = run("layer_inside", "--steps=30")
    right, error = re.findall(r"(\d+)% right; in pieces the same to (\S+)", said)[0]
    assert int(right) > 60
    assert float(error) < 1e-4
