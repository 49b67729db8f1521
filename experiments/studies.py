"""Studies beside the paper's tables: how state spaces start, learning rates and optimizers, vocabularies.

They compare a model with itself, so they keep the learning rate that they were made at when the tables get a better
one. A time constant is −1/Re λ, the tokens after which a mode has faded to 1/e; a frequency is Im λ, in radians per
token. The first start has time constants log-uniform from 1 to 1,000 tokens, frequencies exp(N(0,1)), and C scaled so
that every mode adds the same energy to the kernel. `half-low-frequencies` came out best and is the library's default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gss.reproduce import SYSTEMS, TARGETS, System, Target

STUDY_RATE = {"optimizer.learning_rate": 1.6e-3}
RATES = (6.4e-3, 3.2e-3, 1.6e-3, 8e-4)
"""The paper's grid of learning rates."""
FASTER_MODES = 1e-2
"""A rate for state-space parameters that is tried beside the paper's, 1e-3."""
EMBEDDING_FACTOR = 16.0
"""The embedding's rate in a short run, as a multiple of the others': about √width."""
_ADAMW_LANES = {
    "batching": "lanes",
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.1,
    "optimizer.final_learning_rate": 1e-6,
    "optimizer.embedding_factor": EMBEDDING_FACTOR,
}


def candidate(name: str, about: str, **fields: Any) -> System:
    """A start that changes fields of the first one; every field is written out, so that the study stays what it was
    when the library's default moves."""
    settings = {f"model.state_space.{field}": value for field, value in {**_FIRST, **fields}.items()}
    return System(name=f"init-{name}", label=name, model="gss", settings={**STUDY_RATE, **settings}, about=about)


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

INITIALISATIONS: tuple[System, ...] = (
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


def _changed(names: Sequence[str], changes: Mapping[str, tuple[str, Mapping[str, Any]]]) -> tuple[System, ...]:
    """Each of these systems with each of the changes: what its name ends with, its label's end, settings."""
    return tuple(
        replace(
            SYSTEMS[name],
            name=f"{name}-{end}",
            label=f"{SYSTEMS[name].label}, {label}",
            settings={**SYSTEMS[name].settings, **settings},
        )
        for name in names
        for end, (label, settings) in changes.items()
    )


def _rates() -> tuple[System, ...]:
    grid = {f"{rate:g}": (f"rate {rate:g}", {"optimizer.learning_rate": rate}) for rate in RATES}
    modes = {
        f"{end}-modes": (
            f"{label}, state spaces {FASTER_MODES:g}",
            {**settings, "optimizer.state_space_learning_rate": FASTER_MODES},
        )
        for end, (label, settings) in grid.items()
    }
    embeddings = {
        f"embedding-{factor:g}": (
            f"embedding's rate × {factor:g}",
            {**STUDY_RATE, "optimizer.embedding_factor": factor},
        )
        for factor in (1.0, EMBEDDING_FACTOR / 2)
    }
    optimizers: dict[str, tuple[str, Mapping[str, Any]]] = {
        f"adamw-{rate:g}": (f"AdamW, rate {rate:g}", {**_ADAMW_LANES, "optimizer.learning_rate": rate})
        for rate in RATES[2:]
    }
    for rate in (0.01, 0.03, 0.1):
        optimizers[f"adafactor-{rate:g}"] = (f"Adafactor, rate {rate:g}", {"optimizer.learning_rate": rate})
    state_spaces = ("dss", "gss", "gss-lanes", "gss-hybrid", "gss-l", "gss-hybrid-l")
    return (
        *_changed(("transformer",), grid),
        *_changed(state_spaces, {**grid, **modes}),
        *_changed(("transformer", *state_spaces), embeddings),
        *_changed(("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip"), optimizers),
    )


_HYBRIDS = tuple(
    replace(start, name=start.name.replace("init-", "init-hybrid-"), model="gss-hybrid")
    for start in INITIALISATIONS
    if start.label in ("1-1000", "half-low-frequencies")
)
_VOCABULARY = replace(SYSTEMS["gss"], name="vocabulary", settings=STUDY_RATE)
STUDIES: dict[str, Target] = {
    **TARGETS,
    "init": Target(name="init", title="How the state spaces start", systems=INITIALISATIONS),
    "init-hybrid": Target(name="init-hybrid", title="How the hybrid's state spaces start", systems=_HYBRIDS),
    "rates": Target(name="rates", title="Learning rates and optimizers", systems=_rates()),
    "vocabulary": Target(name="vocabulary", title="Vocabularies by bits per byte", systems=(_VOCABULARY,)),
}
"""The paper's tables, and the studies."""
EVERY = {system.name: system for target in STUDIES.values() for system in target.systems}
"""Systems by name."""
