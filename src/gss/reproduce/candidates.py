"""The ways to start a state space that are tried against each other, around the one that the study began with.

A time constant is −1/Re λ, the tokens after which a mode has faded to 1/e; a frequency is Im λ, in radians a token.
That one has time constants log-uniform from 1 to 1,000 tokens, frequencies exp(N(0,1)), and C scaled so that every mode
adds the same energy to the kernel. `half-low-frequencies` came out best and is the library's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Start:
    """One candidate."""

    name: str
    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to a `TrainConfig`."""


def candidate(name: str, about: str, **fields: Any) -> Start:
    """A candidate that changes fields of the first start; every field is written out, so that the study stays what it
    was when the library's default moves."""
    return Start(
        name=name,
        about=about,
        settings={f"model.state_space.{field}": value for field, value in {**_FIRST, **fields}.items()},
    )


def _down_to(low: float) -> dict[str, Any]:
    """Frequencies log-uniform from `low` to π, the highest there is."""
    return {"frequency_init": "log_uniform", "frequency_range": (low, 3.14159)}


_FIRST: dict[str, Any] = {
    "decay_init": "log_uniform",
    "decay_range": (1e-3, 1.0),
    "frequency_init": "log_normal",
    "frequency_range": (1e-4, 3.14159),
    "readout_init": "equal_energy",
}

_HALF_LOW: dict[str, Any] = {"frequency_init": "mixed", "frequency_range": (1e-2, 0.3)}

INITIALISATIONS: tuple[Start, ...] = (
    candidate("1-1000", "time constants of 1 to 1,000 tokens, exp(N(0,1)), equal energy"),
    # Ranges of Re λ.
    candidate("1-100", "no mode slower than 100 tokens", decay_range=(1e-2, 1.0)),
    candidate("1-4000", "up to 4,000 tokens, the training length", decay_range=(2.5e-4, 1.0)),
    candidate("1-16000", "up to 16,000 tokens", decay_range=(6e-5, 1.0)),
    candidate("10-1000", "no mode faster than 10 tokens", decay_range=(1e-3, 0.1)),
    candidate("0.1-1000", "modes within a token too", decay_range=(1e-3, 10.0)),
    # Ranges of Im λ.
    candidate("low-frequencies", "frequencies log-uniform from 0.001 to π", **_down_to(1e-3)),
    candidate("lower-frequencies", "frequencies log-uniform from 0.0001 to π", **_down_to(1e-4)),
    candidate(
        "low-and-slow",
        "frequencies log-uniform from 0.001 to π, time constants up to 4,000 tokens",
        decay_range=(2.5e-4, 1.0),
        **_down_to(1e-3),
    ),
    candidate("lowish-frequencies", "frequencies log-uniform from 0.01 to π", **_down_to(1e-2)),
    candidate(
        "half-low-frequencies",
        "frequencies of one half exp(N(0,1)), of the other log-uniform from 0.01 to 0.3",
        **_HALF_LOW,
    ),
    candidate(
        "half-low-and-slow",
        "half-low-frequencies with time constants up to 4,000 tokens",
        decay_range=(2.5e-4, 1.0),
        **_HALF_LOW,
    ),
    candidate("even-frequencies", "frequencies 2π(n+½)/N", frequency_init="linear"),
    # The energy of slow modes.
    candidate("loud", "C ÷ N for all modes: the slow ones have most of the energy", readout_init="inverse"),
    candidate(
        "quiet",
        "half exp(N(0,1)) with C ÷ √N, half of 10 to 1,000 tokens at 0.3 of equal energy",
        decay_init="mixed",
        decay_range=(1e-3, 0.1),
        readout_init="mixed",
    ),
    # Without structure.
    candidate("random", "Re, Im and C all from N(0,1), the paper's own", decay_init="log_normal", readout_init="unit"),
    candidate("random-scaled", "the same, C ÷ √N", decay_init="log_normal", readout_init="inverse_sqrt"),
)
