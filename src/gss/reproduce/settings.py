"""What `gss reproduce` compares, as data: systems, scales, and the settings that are fixed for every corpus.

Everything that could be tuned stands here and nowhere else. It is chosen once, on the books' validation split
(`gss reproduce rates` and `gss reproduce init` are how), and then holds for the other corpora, as in the paper.
Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gss.reproduce.candidates import INITIALISATIONS

Settings = Mapping[str, Any]
"""Fields of a `TrainConfig` by dotted name."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A row of a table: a model and how it is trained."""

    name: str
    """For files and `--only`."""
    label: str
    """As the paper writes it."""
    model: str
    """The preset, without the scale's suffix."""
    recipe: str = "adamw"
    """Which of a scale's recipes trains it: adamw, study, block-recurrent."""
    settings: Settings = field(default_factory=dict)
    """On top of the recipe."""
    about: str = ""
    """What sets it apart, where the label does not say."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large models are and how long they train."""

    name: str
    suffix: str
    """Of presets."""
    tokens: int
    """That every system sees in training."""
    settings: Settings
    """Of every run."""
    recipes: Mapping[str, Settings]
    """By the names that systems ask for."""
    evaluate_bytes: int | None = None
    """Held-out documents are scored from the first on, whole, until their text has so many bytes: the same text for
    every vocabulary. None: all of them."""
    corpora: Mapping[str, Settings] = field(default_factory=dict)
    """What the paper did otherwise on some corpora, by the paper's name of them."""
    corpus_tokens: Mapping[str, int] = field(default_factory=dict)
    """Where a corpus has another number of tokens than `tokens`, by the same name."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What can be asked for: a table of systems."""

    name: str
    title: str
    systems: tuple[System, ...]
    layout: str
    """Which columns: table1, table2, lengths, candidates, rates, vocabulary."""
    more_seeds: int | None = None
    """How many of the best get the seeds after the first. None: all."""


EMBEDDING_FACTOR = 16.0
"""The embedding's rate in a short run, as a multiple of the others': about √width."""

_ADAMW = {
    "batching": "segments",
    "optimizer.name": "adamw",
    "optimizer.schedule": "cosine",
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 1.0,
    "optimizer.state_space_learning_rate": 1e-3,
    "optimizer.final_learning_rate": 1e-6,
}
# In 800 steps an embedding of 32,000 rows that learns no faster than the rest hardly moves.
_FEW_STEPS = {**_ADAMW, "optimizer.embedding_factor": EMBEDDING_FACTOR}
# What the block-recurrent models are trained with at every scale.
_LANES = {"batching": "lanes"}
# The released configuration's of the Block-Recurrent Transformers: see configs/block-recurrent.toml.
_ADAFACTOR = {
    **_LANES,
    "optimizer.name": "adafactor",
    "optimizer.embedding_factor": 1.0,
    "optimizer.schedule": "cosine",
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 1.0,
    "optimizer.learning_rate": 0.01,
    "optimizer.final_learning_rate": 1e-3,
}
_QUIET = {"report.evaluate_every": 0, "report.sample_every": 0, "checkpoint.keep_last": 2}


def _recipes(adamw: Settings, block_recurrent: Settings, study: Settings | None = None) -> dict[str, Settings]:
    """A scale's recipes. A study compares a model with itself (how it starts, its vocabulary): it has the rate that it
    was made at, and stands when the tables get a better one."""
    return {"adamw": adamw, "study": study or adamw, "block-recurrent": block_recurrent}


SCALES: dict[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            name="tiny",
            suffix="-tiny",
            tokens=192 * 4096,
            settings={**_QUIET, "length": 512, "batch_tokens": 4096, "optimizer.warmup_steps": 24},
            recipes=_recipes(
                # Narrow models take, and want, more than the paper's rate.
                {**_ADAMW, "optimizer.learning_rate": 8e-3},
                {**_ADAFACTOR, "optimizer.learning_rate": 0.1},
            ),
        ),
        Scale(
            name="small",
            suffix="-small",
            tokens=800 * 131_072,
            evaluate_bytes=4_000_000,
            settings={
                **_QUIET,
                "length": 4096,
                "batch_tokens": 131_072,
                "micro_batch_tokens": 131_072,  # halved where it does not fit
                "compile": True,
                "checkpoint.every": 1000,  # a run is minutes long; a signal to stop saves too
                "optimizer.warmup_steps": 100,
            },
            recipes=_recipes(
                {**_FEW_STEPS, "optimizer.learning_rate": 3.2e-3},
                {**_ADAFACTOR, "optimizer.learning_rate": 0.1},
                study={**_FEW_STEPS, "optimizer.learning_rate": 1.6e-3},
            ),
        ),
        Scale(
            name="paper",
            suffix="",
            tokens=125_000 * 524_288,
            settings={
                "length": 4096,
                "batch_tokens": 524_288,
                "micro_batch_tokens": 32_768,
                "compile": True,
                "optimizer.warmup_steps": 1000,
            },
            recipes=_recipes(
                {**_ADAMW, "optimizer.learning_rate": 1.6e-3},
                # A quarter of the rows and four times the steps: the lanes of a batch are documents side by side.
                {**_ADAFACTOR, "batch_tokens": 131_072},
            ),
            corpora={
                "LM1B": {"length": 512, "batching": "packed"},
                "Github": {"batch_tokens": 1_048_576},
            },
            corpus_tokens={"Github": 125_000 * 1_048_576},
        ),
    )
}

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(name="transformer", label="Transformer", model="transformer"),
        System(name="dss", label="DSS", model="dss"),
        System(name="gss", label="GSS", model="gss"),
        System(name="gss-l", label="GSS-L", model="gss-l"),
        System(name="gss-hybrid", label="GSS-Hybrid", model="gss-hybrid", about="not in the paper at this size"),
        System(name="gss-hybrid-l", label="GSS-Hybrid-L", model="gss-hybrid-l"),
        System(
            name="gss-lanes",
            label="GSS in lanes",
            model="gss",
            settings={"batching": "lanes"},
            about="GSS with the state carried from segment to segment in training, as the block-recurrent have it; "
            "not in the paper",
        ),
        System(name="rec-fixed-skip", label="Rec:fixed:skip", model="rec-fixed-skip", recipe="block-recurrent"),
        System(
            name="feedback-lstm-single",
            label="Feedback:lstm:single",
            model="feedback-lstm-single",
            recipe="block-recurrent",
        ),
        System(
            name="feedback-fixed-skip",
            label="Feedback:fixed:skip",
            model="feedback-fixed-skip",
            recipe="block-recurrent",
        ),
        System(
            name="slide",
            label="Slide",
            model="slide",
            recipe="block-recurrent",
            about="the block-recurrent models' backbone without recurrence; not in the paper's table",
        ),
        System(
            name="xl",
            label="XL:2048",
            model="xl",
            recipe="block-recurrent",
            about="the same with Transformer-XL's cache of 2,048; not in the paper's table",
        ),
    )
}


def _named(*names: str) -> tuple[System, ...]:
    return tuple(SYSTEMS[name] for name in names)


RATES = (6.4e-3, 3.2e-3, 1.6e-3, 8e-4)
"""The paper's grid of learning rates."""
FASTER_MODES = 1e-2
"""A rate for state-space parameters that is tried beside the paper's, 1e-3."""


def _changed(
    names: Sequence[str], changes: Mapping[str, tuple[str, Settings]], recipe: str | None = None
) -> tuple[System, ...]:
    """Each of these systems with each of the changes: what its name ends with, its label's end, settings."""
    return tuple(
        replace(
            SYSTEMS[name],
            recipe=recipe or SYSTEMS[name].recipe,
            name=f"{name}-{end}",
            label=f"{SYSTEMS[name].label}, {label}",
            settings={**SYSTEMS[name].settings, **settings},
        )
        for name in names
        for end, (label, settings) in changes.items()
    )


def _rates() -> tuple[System, ...]:
    grid: dict[str, tuple[str, Settings]] = {
        f"{rate:g}": (f"rate {rate:g}", {"optimizer.learning_rate": rate}) for rate in RATES
    }
    modes: dict[str, tuple[str, Settings]] = {
        f"{end}-modes": (
            f"{label}, state spaces {FASTER_MODES:g}",
            {**settings, "optimizer.state_space_learning_rate": FASTER_MODES},
        )
        for end, (label, settings) in grid.items()
    }
    embeddings: dict[str, tuple[str, Settings]] = {
        f"embedding-{factor:g}": (f"embedding's rate × {factor:g}", {"optimizer.embedding_factor": factor})
        for factor in (1.0, EMBEDDING_FACTOR / 2)
    }
    optimizers: dict[str, tuple[str, Settings]] = {}
    for rate in RATES[2:]:
        adamw: Settings = {**_FEW_STEPS, **_LANES, "optimizer.learning_rate": rate}
        optimizers[f"adamw-{rate:g}"] = (f"AdamW, rate {rate:g}", adamw)
    for rate in (0.01, 0.03, 0.1):
        adafactor: Settings = {**_ADAFACTOR, "optimizer.learning_rate": rate}
        optimizers[f"adafactor-{rate:g}"] = (f"Adafactor, rate {rate:g}", adafactor)
    state_spaces = ("dss", "gss", "gss-lanes", "gss-hybrid", "gss-l", "gss-hybrid-l")
    return (
        *_changed(("transformer",), grid),
        *_changed(state_spaces, {**grid, **modes}),
        *_changed(("transformer", *state_spaces), embeddings, recipe="study"),
        *_changed(("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip"), optimizers),
    )


def _starts(model: str, names: Sequence[str] = ()) -> tuple[System, ...]:
    """A model from the starts of these names, or from all."""
    prefix = "init" if model == "gss" else f"init-{model.removeprefix('gss-')}"
    return tuple(
        System(
            name=f"{prefix}-{start.name}",
            label=start.name,
            model=model,
            recipe="study",
            settings=start.settings,
            about=start.about,
        )
        for start in INITIALISATIONS
        if not names or start.name in names
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="table1",
            title="Table 1: DSS and GSS at equal parameters",
            systems=_named("transformer", "dss", "gss"),
            layout="table1",
        ),
        Target(
            name="table2",
            title="Table 2: GSS and block-recurrent models",
            systems=_named(
                "rec-fixed-skip",
                "feedback-lstm-single",
                "feedback-fixed-skip",
                "slide",
                "xl",
                "gss",
                "gss-lanes",
                "gss-hybrid",
                "gss-l",
                "gss-hybrid-l",
            ),
            layout="table2",
        ),
        Target(
            name="lengths",
            title="Perplexity beyond the training length",
            systems=_named("gss", "gss-hybrid"),
            layout="lengths",
        ),
        Target(
            name="init",
            title="How the state spaces start",
            systems=_starts("gss"),
            layout="candidates",
            more_seeds=2,
        ),
        Target(
            name="init-hybrid",
            title="How the hybrid's state spaces start",
            systems=_starts("gss-hybrid", ("1-1000", "half-low-frequencies")),
            layout="candidates",
        ),
        Target(
            name="rates",
            title="Learning rates and optimizers",
            systems=_rates(),
            layout="rates",
        ),
        Target(
            name="vocabulary",
            title="Vocabularies by bits a byte",
            systems=(replace(SYSTEMS["gss"], name="vocabulary", recipe="study"),),
            layout="vocabulary",
        ),
    )
}

PAPER_CORPORA = {
    "books": "PG-19",
    "pg19": "PG-19",
    "math": "ArXiv",
    "arxiv": "ArXiv",
    "code": "Github",
    "github": "Github",
    "stdlib": "Github",
    "lm1b": "LM1B",
}
"""By how a corpus's name begins: the corpus of the paper whose figures stand beside ours."""


def paper_corpus(name: str) -> str | None:
    """The paper's corpus that a corpus of this name stands for, if there is one."""
    return next((paper for start, paper in PAPER_CORPORA.items() if name.lower().startswith(start)), None)


def preset_name(system: System, scale: Scale, corpus: str | None) -> str:
    """The preset of a system at a scale; the paper has LM1B models of their own. `corpus` is the paper's name."""
    if not scale.suffix and corpus == "LM1B" and system.model in ("gss", "dss", "transformer"):
        return f"{system.model}-lm1b"
    return f"{system.model}{scale.suffix}"


def settings_of(system: System, scale: Scale, corpus: str | None) -> dict[str, Any]:
    """Every setting of a system at a scale, as changes to the defaults; later ones win. `corpus` as above."""
    return {
        **scale.settings,
        **scale.recipes[system.recipe],
        **(scale.corpora.get(corpus or "", {}) if system.recipe != "block-recurrent" else {}),
        **system.settings,
    }
