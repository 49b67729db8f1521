"""What `gss reproduce` compares, as data: systems, scales and tables. Training settings come from `gss.recipes`.

As in the paper, everything was tuned once, on the validation split of books, and is used for every corpus. Imports no
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gss.config import flattened
from gss.recipes import read_recipe

Settings = Mapping[str, Any]
"""Fields of a `TrainConfig` by dotted name."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A row of a table: a model and how it is trained."""

    name: str
    """In file names and for `--only`."""
    label: str
    """The name in the paper."""
    model: str
    """The preset, without the scale's suffix."""
    settings: Settings = field(default_factory=dict)
    """On top of the recipe."""
    about: str = ""
    """How it differs from the others, if the label does not say so."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of the models and the length of their training."""

    name: str
    suffix: str
    """Of the presets' names."""
    recipe: str | None
    """None: the paper's recipe for the corpus."""
    tokens: int | None
    """Training tokens of every system. None: the recipe's."""
    settings: Settings = field(default_factory=dict)
    """On top of the recipe."""
    evaluate_bytes: int | None = None
    """The first held-out documents are scored until their text has this many bytes, the same text for every vocabulary.
    None: all of them."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A table of systems."""

    name: str
    title: str
    systems: tuple[System, ...]


# Trained like the Block-Recurrent Transformers: with Adafactor, the state carried along lanes.
_BLOCK_RECURRENT = ("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip", "slide", "xl")
_QUIET = {"report.evaluate_every": 0, "report.sample_every": 0, "checkpoint.keep_last": 2}

SCALES: dict[str, Scale] = {
    "tiny": Scale(name="tiny", suffix="-tiny", recipe="tiny", tokens=192 * 4096, settings=_QUIET),
    "small": Scale(
        name="small",
        suffix="-small",
        recipe="small",
        tokens=800 * 131_072,
        settings={**_QUIET, "compile": True, "checkpoint.every": 1000},
        evaluate_bytes=4_000_000,
    ),
    "paper": Scale(
        name="paper", suffix="", recipe=None, tokens=None, settings={"micro_batch_tokens": 32_768, "compile": True}
    ),
}


SYSTEMS: dict[str, System] = {
    name: System(name=name, label=label, model=name, about="".join(about))
    for name, label, *about in (
        ("transformer", "Transformer"),
        ("dss", "DSS"),
        ("gss", "GSS"),
        ("gss-l", "GSS-L"),
        ("gss-hybrid", "GSS-Hybrid", "not in the paper at this size"),
        ("gss-hybrid-l", "GSS-Hybrid-L"),
        ("rec-fixed-skip", "Rec:fixed:skip"),
        ("feedback-lstm-single", "Feedback:lstm:single"),
        ("feedback-fixed-skip", "Feedback:fixed:skip"),
        ("slide", "Slide", "the block-recurrent models' backbone without recurrence; not in the paper's table"),
        ("xl", "XL:2048", "the same with Transformer-XL's cache of 2,048; not in the paper's table"),
    )
}
SYSTEMS["gss-lanes"] = System(
    name="gss-lanes",
    label="GSS in lanes",
    model="gss",
    settings={"batching": "lanes"},
    about="GSS with the state carried from segment to segment in training, as the block-recurrent models do; "
    "not in the paper",
)


def _target(name: str, title: str, systems: str) -> Target:
    return Target(name=name, title=title, systems=tuple(SYSTEMS[system] for system in systems.split()))


_ALL = "rec-fixed-skip feedback-lstm-single feedback-fixed-skip slide xl gss gss-lanes gss-hybrid gss-l gss-hybrid-l"
TARGETS: dict[str, Target] = {
    "table1": _target("table1", "Table 1: DSS and GSS at equal parameters", "transformer dss gss"),
    "table2": _target("table2", "Table 2: GSS and block-recurrent models", _ALL),
    "lengths": _target("lengths", "Perplexity beyond the training length", "gss gss-hybrid"),
}

_CORPORA: dict[str, tuple[str, ...]] = {
    "PG-19": ("pg19", "books"),
    "ArXiv": ("arxiv", "math"),
    "Github": ("github", "code", "stdlib"),
    "LM1B": ("lm1b",),
}
"""The paper's corpora, each with the prefixes of corpus names that stand for it; the first is also its recipe."""


def paper_corpus(name: str) -> str | None:
    """The paper's corpus that a corpus of this name stands for, if any."""
    return next((paper for paper, starts in _CORPORA.items() if name.lower().startswith(starts)), None)


def preset_name(system: System, scale: Scale, corpus: str | None) -> str:
    """The preset of a system at a scale; the paper has LM1B models of their own. `corpus` is the paper's name."""
    if scale.recipe is None and corpus == "LM1B" and system.model in ("gss", "dss", "transformer"):
        return f"{system.model}-lm1b"
    return f"{system.model}{scale.suffix}"


def recipe_name(system: System, scale: Scale, corpus: str | None) -> str:
    """The recipe that a system's settings start from. `corpus` as above."""
    if system.model in _BLOCK_RECURRENT:
        return f"{scale.recipe}-block-recurrent" if scale.recipe else "block-recurrent"
    return scale.recipe or _CORPORA.get(corpus or "", ("pg19",))[0]


def settings_of(system: System, scale: Scale, corpus: str | None) -> dict[str, Any]:
    """Every setting of a system at a scale, as changes to the defaults. `corpus` as above."""
    settings = {**flattened(read_recipe(recipe_name(system, scale, corpus))), **scale.settings, **system.settings}
    settings.pop("preset", None)
    return settings
