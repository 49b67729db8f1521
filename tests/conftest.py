"""Shared set-up: one thread per process, and small models of every family."""

import os
import sys
import warnings
from collections.abc import Callable

import pytest
import torch

import gss
from gss.cli import main

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # GPU kernels on the CPU; read when they are imported

torch.set_num_threads(1)  # small tensors gain nothing from more, and the order of additions stays the same everywhere

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals, limits, pipes or terminals")

# Transformers on windows: most tests of theirs are in nn/, with windows of 8 tokens.
WINDOW_FAMILIES = ("slide", "xl", "rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip")
# Every family has a tiny preset; those in -l are the same family.
ALL_FAMILIES = tuple(
    name.removesuffix("-tiny") for name in gss.PRESETS if name.endswith("-tiny") and not name.endswith("-l-tiny")
)
FAMILIES = tuple(name for name in ALL_FAMILIES if name not in (*WINDOW_FAMILIES, "llama"))
"""Those that the longest tests are run on."""
SLIDING = "llama-sliding"
"""For `small_config`: llama with a window of 8 tokens and QK-norm, which no preset has."""


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`gss …` in this process, by the function behind the command: its exit status, standard output and error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gss", *map(str, arguments)])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command replaces
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def small_config(family: str, **overrides: object) -> gss.ModelConfig:
    """A model of a few thousand parameters with every part of its family."""
    sizes = {
        "vocab_size": 61,
        "width": 16,
        "depth": 1 if family == "dss" else 2,  # a DSS block holds two state spaces
        "gate_width": 24,
        "channels": 5,
        "feedforward_width": 24,
        "state_space.modes": 6,
        "attention.heads": 2,
        "attention.window": 8,
        "recurrent": {"vectors": 5, "blocks": 2, "block": 1},
    }
    if family == "gss2":
        # Layers whose outputs start at zero would all do nothing.
        sizes |= {"pattern": ("gss2", "attention"), "matrix_state": {"heads": 2, "value_width": 6, "taps": 3}}
        sizes |= {"attention.sliding": 8, "zero_outputs": False}
    if family == SLIDING:
        family = "llama"
        sizes |= {"attention.sliding": 8, "attention.qk_norm": True}
    if family.startswith("rec-"):
        sizes["pattern"] = ("slide", "recurrent")
    if family.startswith("feedback-"):
        sizes["depth"] = 1  # a layer is a whole stack
    return gss.preset(f"{family}-tiny", **{**sizes, **overrides})
