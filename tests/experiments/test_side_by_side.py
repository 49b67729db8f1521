"""`experiments.side_by_side` reads plans, runs their lines several at a time, and leaves out what is done."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import side_by_side
from experiments.studies import STUDIES
from gss.reproduce import SCALES

PLAN = Path(side_by_side.__file__).with_name("tables.plan")
WRITES = """
import json, pathlib, sys
folder, name, tokens = sys.argv[1:]
(pathlib.Path(folder) / "results" / name).write_text(json.dumps({"tokens": int(tokens)}))
"""


def arguments(folder: Path, seconds: float = 600) -> argparse.Namespace:
    paths = {name: folder / name for name in ("data", "results", "work")}
    return argparse.Namespace(**paths, seconds=seconds, scale="small", set=[], commit="abc1234")


def test_a_plan_is_read() -> None:
    first, second = side_by_side.parsed("table1 gss books  # the first\n\nalone init init-loud books 0,1 2621440\n")
    assert first == side_by_side.Line(False, "table1", "gss", "books", seeds="0", tokens="")
    assert second == side_by_side.Line(True, "init", "init-loud", "books", seeds="0,1", tokens="2621440")
    with pytest.raises(ValueError, match="line 2: write TARGET SYSTEM CORPUS"):
        side_by_side.parsed("table1 gss books\ntable1 gss\n")


def test_the_plan_of_the_results_names_what_there_is() -> None:
    for line in side_by_side.parsed(PLAN.read_text(encoding="utf-8")):
        assert line.system in {system.name for system in STUDIES[line.target].systems}


def test_lines_run_and_what_is_done_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_: Any, line: Any, out: Path, __: float) -> list[str]:
        name = f"{line.corpus}.{line.system}.small.800steps.seed{line.seeds}.json"
        return [sys.executable, "-c", WRITES, str(out), name, str(SCALES["small"].tokens)]

    monkeypatch.setattr(side_by_side.Work, "command", command)
    work = side_by_side.Work(arguments(tmp_path))
    lines = side_by_side.parsed("table1 gss books\ntable1 dss books 1\ntable1 gss books 0 1024")
    work.results.mkdir()
    assert not any(map(work.is_done, lines))
    work.go(lines[:2], jobs=2)
    assert [work.is_done(line) for line in lines] == [True, True, False]  # the third has other tokens
    assert len(list(work.results.iterdir())) == 2


def test_nothing_starts_when_the_time_is_over(tmp_path: Path) -> None:
    work = side_by_side.Work(arguments(tmp_path, seconds=20))
    work.go(side_by_side.parsed("table1 gss books"), jobs=1)
    assert not (tmp_path / "work").exists()


def test_what_a_line_becomes(tmp_path: Path) -> None:
    shared, alone = side_by_side.parsed("table1 gss books 0,1\nalone table2 rec-fixed-skip books 0 2621440")
    work = side_by_side.Work(arguments(tmp_path))
    words = work.command(shared, tmp_path / "out", 100.0)
    assert words[1:6] == ["-m", "experiments.study", "table1", "--scale", "small"]
    assert {"--shared", "--seconds"} <= set(words)
    assert words[words.index("--seeds") + 1] == "0,1"
    for_speed = work.command(alone, tmp_path / "out", 100.0)
    assert "--shared" not in for_speed
    assert for_speed[for_speed.index("--tokens") + 1] == "2621440"
    assert "--evaluate-tokens" in for_speed
