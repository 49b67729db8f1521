"""Measurements in parts, and that of decoding on a GPU as far as a CPU can try it: `--tiny` tries the rest."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gss
from experiments import decode_on_gpu
from experiments.decode_on_gpu import check, goals, speculated
from experiments.parts import Parts
from tests.conftest import small_config


def test_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    found: dict[str, Any] = {"device": "none"}
    out = tmp_path / "new" / "out.json"
    parts = Parts(out, lambda: found, lambda name, why: found.update({name: why}), seconds=60)
    parts.run("broken", lambda: 1 / 0)
    parts.run("slow", lambda: time.sleep(30), most=0.2)
    parts.run("long", lambda: found.update(never=1), needs=1000)
    parts.run("good", lambda: found.update(good=float("nan")), needs=1, most=1)
    assert json.loads(out.read_text()) == {**found, "good": None}
    assert found["broken"].endswith("ZeroDivisionError: division by zero")
    assert "took too long" in found["slow"]
    assert found["long"].startswith("left out: ")
    assert "never" not in found


def test_goals_are_met_or_not() -> None:
    found = {
        "generate, warm": {"tokens_per_s": 5500.0, "first_text_s": 6.0},
        "stream": {"0.8, top-p 0.95, 4": {"tokens_per_s": 1000.0}},
        "serve": {"server": {"tokens_per_s": 500.0}},
        "generate, new machine": {"error": "left out"},
    }
    words = [line.split() for line in goals(found, 4).splitlines()]
    assert [line[-1] for line in words if line[-1] in ("yes", "NO")] == ["yes", "NO", "NO", "NO"]
    assert "0.50" in words[4]


def test_what_is_measured_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_on_gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(decode_on_gpu, "ON_GPU", False)
    model = gss.build_model(small_config("gss"), seed=1).eval()
    assert check(model, 5, 2)["greedy tokens, equal"] == "5 of 5"
    found = speculated(model, [[3, 1, 4, 1, 5] * 4], 30, rounds=1)
    assert found["greedy"]["equal"] == found["0.8, top-p 0.95"]["equal"] == [30]
    assert found["greedy"]["tokens_per_s with"] > 0
