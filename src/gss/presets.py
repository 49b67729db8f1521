"""The paper's models, and tiny and small ones of each family, by name."""

from dataclasses import dataclass
from typing import Any

from gss.config import ModelConfig, StateSpaceConfig, override

_HYBRID = ("gss", "attention", "gss", "gss")
# The DSS authors' own: a learned step a channel, Skew-HiPPO frequencies, every mode decaying at 0.5.
_DSS = StateSpaceConfig(
    imaginary="plain",
    step_range=(1e-3, 1e-1),
    decay_range=(0.5, 0.5),
    frequency_init="skew_hippo",
    readout_init="unit",
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named configuration."""

    config: ModelConfig
    about: str
    """One line for the list."""
    paper_parameters: int | None = None
    """Parameters that the paper states, in millions."""


_GSS = ModelConfig()
_GSS_HYBRID = override(_GSS, {"pattern": _HYBRID, "attention.chunk": 512})
_TRANSFORMER = ModelConfig(pattern=("attention",), depth=12, positions="sinusoidal")
_DSS_MODEL = ModelConfig(pattern=("dss",), depth=12, state_space=_DSS)

# Hutchins et al.'s backbone; positions come from the relative bias of each layer.
_SLIDE = ModelConfig(
    pattern=("slide",),
    depth=12,
    activation="relu",
    norm="rmsnorm",
    bias=False,
    dropout=0.05,
)
_XL = override(_SLIDE, {"pattern": ("xl",), "attention.window": 2048})
_FEEDBACK = override(_SLIDE, {"pattern": ("feedback",), "depth": 1})
_LSTM_SINGLE = {"recurrent.gate": "lstm", "recurrent.layout": "single"}


def _recurrent(depth: int) -> dict[str, Any]:
    """The pattern with the recurrent layer third from the end."""
    return {"depth": depth, "pattern": ("slide",) * (depth - 3) + ("recurrent",) + ("slide",) * 2}


# Sizes that the smaller presets share. "small" is about 46M parameters with a 32k vocabulary; "tiny" trains on a CPU.
# The larger ones of each size, as in the paper, have twice the layers and everything else the same.
_SMALL = {"width": 512, "depth": 12, "gate_width": 2048, "channels": 128, "feedforward_width": 2048}
_TINY = {
    "vocab_size": 257,
    "width": 128,
    "depth": 4,
    "gate_width": 512,
    "channels": 32,
    "feedforward_width": 512,
    "attention.heads": 4,
}
_GSS_TINY = {**_TINY, "state_space.modes": 64}
_WINDOW_SMALL = {**_SMALL, "depth": 9}
_FEEDBACK_SMALL = {**_SMALL, "depth": 1, "recurrent.blocks": 9, "recurrent.block": 7}
# No dropout: what trains on a CPU for a minute sees too little to overfit.
_WINDOW_TINY = {**_TINY, "dropout": 0.0, "attention.window": 64, "recurrent.vectors": 64}
_FEEDBACK_TINY = {**_WINDOW_TINY, "depth": 1, "recurrent.blocks": 4, "recurrent.block": 2}

PRESETS: dict[str, Preset] = {
    "gss-lm1b": Preset(
        config=override(_GSS, {"vocab_size": 30_000}), about="GSS for LM1B (table 1)", paper_parameters=190
    ),
    "gss": Preset(config=_GSS, about="GSS, 16 layers (tables 1 and 2)", paper_parameters=192),
    "gss-l": Preset(config=override(_GSS, {"depth": 32}), about="GSS-L, 32 layers (table 2)", paper_parameters=352),
    "gss-hybrid": Preset(config=_GSS_HYBRID, about="GSS with attention on chunks of 512 at layers 2, 6, 10, 14"),
    "gss-hybrid-l": Preset(
        config=override(_GSS_HYBRID, {"depth": 32}),
        about="GSS-Hybrid-L: attention on chunks of 512 at layers 2, 6, …, 30 (table 2)",
        paper_parameters=373,
    ),
    "dss-lm1b": Preset(
        config=override(_DSS_MODEL, {"vocab_size": 30_000, "state_space.modes": 128}),
        about="DSS for LM1B (table 1)",
        paper_parameters=188,
    ),
    "dss": Preset(config=_DSS_MODEL, about="DSS, 12 blocks (table 1)", paper_parameters=209),
    "transformer-lm1b": Preset(
        config=override(_TRANSFORMER, {"vocab_size": 30_000}),
        about="Transformer for LM1B (table 1)",
        paper_parameters=182,
    ),
    "transformer": Preset(config=_TRANSFORMER, about="Transformer, 12 blocks, 32k vocabulary"),
    "rec-fixed-skip": Preset(
        config=override(_SLIDE, _recurrent(12)),
        about="Block-Recurrent Transformer, the recurrent layer 10th of 12 (table 2)",
        paper_parameters=196,
    ),
    "feedback-lstm-single": Preset(
        config=override(_FEEDBACK, _LSTM_SINGLE),
        about="Block-Recurrent Transformer, all 12 blocks read the state, LSTM gate (table 2)",
    ),
    "feedback-fixed-skip": Preset(
        config=_FEEDBACK, about="Block-Recurrent Transformer, all 12 blocks read the state (table 2)"
    ),
    "slide": Preset(config=_SLIDE, about="Transformer on a sliding window of 512"),
    "xl": Preset(config=_XL, about="Transformer with Transformer-XL's cache, windows of 2,048"),
    "gss-small": Preset(config=override(_GSS, {**_SMALL, "state_space.modes": 256}), about="GSS, 46M parameters"),
    "gss-hybrid-small": Preset(
        config=override(_GSS_HYBRID, {**_SMALL, "state_space.modes": 256}),
        about="GSS with attention at layers 2, 6, 10, 48M parameters",
    ),
    "gss-l-small": Preset(
        config=override(_GSS, {**_SMALL, "depth": 24, "state_space.modes": 256}),
        about="GSS-L: twice the layers of gss-small, 76M parameters",
    ),
    "gss-hybrid-l-small": Preset(
        config=override(_GSS_HYBRID, {**_SMALL, "depth": 24, "state_space.modes": 256}),
        about="GSS-Hybrid-L: attention at layers 2, 6, …, 22 of 24, 80M parameters",
    ),
    "dss-small": Preset(
        config=override(_DSS_MODEL, {**_SMALL, "depth": 9, "state_space.modes": 64}),
        about="DSS, 46M parameters",
    ),
    "transformer-small": Preset(
        config=override(_TRANSFORMER, {**_SMALL, "depth": 9}), about="Transformer, 45M parameters"
    ),
    "rec-fixed-skip-small": Preset(
        config=override(_SLIDE, {**_WINDOW_SMALL, **_recurrent(9)}),
        about="Block-Recurrent Transformer, the recurrent layer 7th of 9, 47M parameters",
    ),
    "feedback-lstm-single-small": Preset(
        config=override(_FEEDBACK, {**_FEEDBACK_SMALL, **_LSTM_SINGLE}),
        about="Block-Recurrent Transformer with feedback and LSTM gate, 56M parameters",
    ),
    "feedback-fixed-skip-small": Preset(
        config=override(_FEEDBACK, _FEEDBACK_SMALL),
        about="Block-Recurrent Transformer with feedback, 51M parameters",
    ),
    "slide-small": Preset(
        config=override(_SLIDE, _WINDOW_SMALL), about="Transformer on a sliding window of 512, 45M parameters"
    ),
    "xl-small": Preset(
        config=override(_XL, _WINDOW_SMALL), about="Transformer with Transformer-XL's cache, 45M parameters"
    ),
    "gss-tiny": Preset(config=override(_GSS, _GSS_TINY), about="GSS on bytes, for a CPU"),
    "gss-hybrid-tiny": Preset(
        config=override(_GSS_HYBRID, _GSS_TINY),
        about="GSS with attention at layer 2, for a CPU",
    ),
    "gss-l-tiny": Preset(
        config=override(_GSS, {**_GSS_TINY, "depth": 8}),
        about="GSS-L: twice the layers of gss-tiny, for a CPU",
    ),
    "gss-hybrid-l-tiny": Preset(
        config=override(_GSS_HYBRID, {**_GSS_TINY, "depth": 8}),
        about="GSS-Hybrid-L: attention at layers 2 and 6 of 8, for a CPU",
    ),
    "dss-tiny": Preset(
        config=override(_DSS_MODEL, {**_TINY, "state_space.modes": 16}), about="DSS on bytes, for a CPU"
    ),
    "transformer-tiny": Preset(config=override(_TRANSFORMER, _TINY), about="Transformer on bytes, for a CPU"),
    "rec-fixed-skip-tiny": Preset(
        config=override(_SLIDE, {**_WINDOW_TINY, **_recurrent(4)}),
        about="Block-Recurrent Transformer on bytes, windows of 64, for a CPU",
    ),
    "feedback-lstm-single-tiny": Preset(
        config=override(_FEEDBACK, {**_FEEDBACK_TINY, **_LSTM_SINGLE}),
        about="Block-Recurrent Transformer with feedback and LSTM gate, for a CPU",
    ),
    "feedback-fixed-skip-tiny": Preset(
        config=override(_FEEDBACK, _FEEDBACK_TINY), about="Block-Recurrent Transformer with feedback, for a CPU"
    ),
    "slide-tiny": Preset(config=override(_SLIDE, _WINDOW_TINY), about="Transformer on a sliding window, for a CPU"),
    "xl-tiny": Preset(config=override(_XL, _WINDOW_TINY), about="Transformer with Transformer-XL's cache, for a CPU"),
}


def preset(name: str, /, **overrides: Any) -> ModelConfig:
    """The configuration of a preset, with some fields replaced.

    >>> gss.preset("gss", vocab_size=50_000, state_space={"modes": 256})

    Nested fields are given as mappings, or with dotted keys: `preset("gss", **{"state_space.modes": 256})`.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; choose from: {', '.join(PRESETS)}")
    return override(PRESETS[name].config, overrides)
