"""Rows, their table and their JSON."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

import experiments
from experiments.measurements import Measurement, TrainingSpeed, document, number, table


def test_mfu_is_six_flops_a_parameter_and_token_over_the_matmul_rate() -> None:
    rows = {row.name: row.value for row in TrainingSpeed(400_000.0, 192_000_000).rows("gss", "16×4096", 766e12)}
    assert rows["MFU of gss, 16×4096"] == pytest.approx(6 * 192e6 * 400e3 / 766e12)
    assert rows["training gss, 16×4096"] == 400_000.0


def test_a_goal_is_a_limit_from_the_better_side() -> None:
    assert Measurement("speed", 430.0, "tokens/s", 400.0).met is True
    assert Measurement("speed", 390.0, "tokens/s", 400.0).met is False
    assert Measurement("memory", 31.0, "GB", 30.0).met is False
    assert Measurement("memory", 30.0, "GB", 30.0).met is True
    assert Measurement("speed", 1.0, "tokens/s").met is None
    assert Measurement("speed", None, "tokens/s", 400.0, note="out of memory").met is False


def test_a_ratio_over_one_is_better_whatever_the_unit() -> None:
    assert Measurement("speed", 300.0, "tokens/s").beside("peer", 100.0).ratio == 3.0
    assert Measurement("time", 100.0, "ms").beside("peer", 300.0).ratio == 3.0
    assert Measurement("speed", 300.0, "tokens/s").beside("peer", None).peer is None


def test_the_document_is_json_with_a_header() -> None:
    found = document([Measurement("a", math.nan, "ms")], {"copy": 1.0}, commit="abc")
    again = json.loads(json.dumps(found, allow_nan=False))
    assert list(again) == ["command", "commit", "hardware", "versions", "date", "ceilings", "rows"]
    assert again["commit"] == "abc"
    assert again["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    (row,) = again["rows"]
    assert row.keys() >= {"name", "value", "unit", "goal", "peer", "ratio"}
    assert row["value"] is None


def test_the_table_has_every_row_and_no_empty_column() -> None:
    rows = [
        Measurement("speed", 431_204.0, "tokens/s", 430_000.0),
        Measurement("speed of a peer", None, "tokens/s", note="not installed"),
    ]
    text = table(rows)
    assert "431,204" in text
    assert "≥ 430,000  met" in text
    assert text.splitlines()[-1].endswith("not installed")
    assert "ratio" not in text


def test_numbers_have_the_digits_that_matter() -> None:
    found = [number(x) for x in (431_204.4, 12.34, 0.6523, 3.1e-4, 0.0, None)]
    assert found == ["431,204", "12.3", "0.652", "3.1e-04", "0.000", "–"]


def test_the_folder_says_what_is_in_it() -> None:
    named = set(re.findall(r"\w+", experiments.__doc__ or ""))
    there = {path.stem for path in Path(experiments.__path__[0]).glob("*.py")} - {"__init__"}
    assert there <= named
    assert {name for name in named if "_" in name} <= there
