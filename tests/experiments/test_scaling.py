"""The simulator of many GPUs: its arithmetic in small cases, and the page that it fills."""

import json

import pytest

from experiments.page import fill
from experiments.scaling import MEASURED, PAGE, Device, Layout, Links, check, exchanged, links_text, simulate, table
from gss.presets import preset

MIB = 1 << 20


def test_what_layers_exchange() -> None:
    assert exchanged(preset("gss"), 2) == (16 * MIB, 16)
    # Keys and values of 512 tokens of 1,024 numbers in one layer of four, 2 MiB in 16 bits.
    assert exchanged(preset("gss-hybrid"), 2) == (12 * MIB + 4 * 2 * MIB, 12 + 2 * 4)


def test_a_step_is_the_sum_of_its_parts() -> None:
    device, links = Device(seconds=1e-6, activations=1000, sharing=0.5), Links(near=1e9, far=1e8, latency=0.001)
    alone = simulate(preset("gss"), device, links, Layout(65_536, 1, 1, 1))
    assert (alone.seconds, alone.state_bytes, alone.gradient_bytes) == (pytest.approx(0.065536), 0, 0)
    shared = simulate(preset("gss"), device, links, Layout(65_536, 1, 8, 8))
    assert shared.compute == pytest.approx(0.065536 / 8 * 1.5)
    assert shared.state_bytes == 2 * 7 * 16 * MIB  # there and back
    assert shared.state_seconds == pytest.approx(shared.state_bytes / 1e9 + 2 * 16 * 0.001)
    assert shared.gradient_seconds == pytest.approx(2 * 7 / 8 * 4 * 192_409_088 / 1e9 + 0.001, rel=0.01)
    assert shared.memory - 65_536 / 8 * 1000 - 8 * 16 * MIB == alone.memory - 65_536 * 1000
    # Over two machines, and in pieces, all but one of which are read again.
    far = simulate(preset("gss"), device, links, Layout(65_536, 1, 16, 16, 4))
    assert far.state_bytes == 4 * 2.75 * 15 * 16 * MIB
    assert far.state_seconds == pytest.approx(far.state_bytes / 1e8 + 4 * 2.75 * 16 * 0.001)
    assert far.compute == pytest.approx(0.065536 / 16 * 1.5 * 1.25)


def test_the_page_is_current() -> None:
    measured = json.loads(MEASURED.read_text())
    text = PAGE.read_text(encoding="utf-8")
    parts = {"scaling": table, "check": lambda: check(measured), "links": lambda: links_text(measured)}
    assert fill(text, parts) == text
