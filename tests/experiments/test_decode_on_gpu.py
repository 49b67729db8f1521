"""The measurement of decoding on a GPU, as far as a CPU can try it: `--tiny` tries the rest."""

import json
import time
from pathlib import Path

import pytest
import torch

import gss
from experiments import decode_on_gpu
from experiments.decode_on_gpu import Parts, check, goals, speculated
from tests.conftest import small_config


def test_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out.json", 60, {"device": "none"})
    parts.run("broken", lambda: {"never": 1 / 0}, 1, 1)
    parts.run("slow", lambda: time.sleep(30) or {}, 1, 0.2)
    parts.run("long", lambda: {}, 1000, 1000)
    parts.run("generate, warm", lambda: {"tokens_per_s": 5500.0, "first_text_s": 6.0}, 1, 1)
    parts.run("stream", lambda: {"0.8, top-p 0.95, 4": {"tokens_per_s": 1000.0}}, 1, 1)
    parts.run("serve", lambda: {"server": {"tokens_per_s": 500.0}}, 1, 1)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == parts.found
    assert "ZeroDivisionError" in found["broken"]["error"]
    assert "took too long" in found["slow"]["error"]
    assert "left out" in found["long"]
    words = [line.split() for line in goals(parts, 4).splitlines()]
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
