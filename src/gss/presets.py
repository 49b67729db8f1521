"""The paper's models, and tiny and small ones of each family, by name."""

from dataclasses import dataclass
from typing import Any

from gss.choices import nearest
from gss.config import ModelConfig, override, parse_assignments


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named configuration."""

    config: ModelConfig
    about: str
    """One line for the list."""
    paper_parameters: int | None = None
    """Parameters that the paper states, in millions."""


def _with(config: ModelConfig, settings: str) -> ModelConfig:
    """The config with settings as `--set` takes them, of which the last of a name counts."""
    return override(config, parse_assignments(settings.split()))


_GSS = ModelConfig()
_HYBRID = _with(_GSS, "pattern=gss,attention,gss,gss attention.chunk=512")
_TRANSFORMER = _with(_GSS, "pattern=attention depth=12 positions=sinusoidal")
# The DSS authors' own: a learned step per channel, Skew-HiPPO frequencies, every mode decaying at 0.5.
_DSS = _with(
    _GSS,
    "pattern=dss depth=12 state_space.imaginary=plain state_space.step_range=[1e-3,1e-1] state_space.readout_init=unit "
    "state_space.decay_range=[0.5,0.5] state_space.frequency_init=skew_hippo",
)
# What people train today: rotary positions, SwiGLU, RMSNorm, no biases, a small embedding.
_LLAMA = _with(
    _TRANSFORMER,
    "depth=13 positions=rotary attention.heads=16 feedforward=gated feedforward_width=2816 activation=swish "
    "norm=rmsnorm bias=false embedding_std=0.02 head_scale=1.0",
)
# GSS2 layers with attention over a sliding window at every third, in a body of Llama's kind.
_GSS2 = _with(
    _LLAMA,
    "depth=12 pattern=gss2,gss2,attention attention.sliding=4096 zero_outputs=true state_space.modes=32 "
    "state_space.decay_range=[0.000125,0.5] state_space.frequency_init=log_uniform "
    "state_space.frequency_range=[1e-3,1.0]",
)
# Hutchins et al.'s backbone; positions come from the relative bias of each layer.
_SLIDE = _with(_GSS, "pattern=slide depth=12 activation=relu norm=rmsnorm bias=false dropout=0.05")
_XL = _with(_SLIDE, "pattern=xl attention.window=2048")
_REC = _with(_SLIDE, f"pattern={'slide,' * 9}recurrent,slide,slide")  # the recurrent layer third from the end
_REC_SMALL = _with(_SLIDE, f"pattern={'slide,' * 6}recurrent,slide,slide")
_REC_TINY = _with(_SLIDE, "pattern=slide,recurrent,slide,slide")
_FEEDBACK = _with(_SLIDE, "pattern=feedback depth=1")
_FEEDBACK_LSTM = _with(_FEEDBACK, "recurrent.gate=lstm recurrent.layout=single")

# Sizes that the smaller presets share. "small" is about 46M parameters with a 32k vocabulary; "tiny" trains on a CPU.
# The larger ones of each size, as in the paper, have twice the layers and everything else the same.
_SMALL = "width=512 depth=9 gate_width=2048 channels=128 feedforward_width=2048"
_TINY = "vocab_size=257 width=128 depth=4 gate_width=512 channels=32 feedforward_width=512 attention.heads=4"
_GSS_SMALL, _GSS_TINY = f"{_SMALL} depth=12 state_space.modes=256", f"{_TINY} state_space.modes=64"
_L_SMALL = f"{_GSS_SMALL} depth=24"
_LLAMA_SMALL, _LLAMA_TINY = f"{_SMALL} feedforward_width=1408 attention.heads=8", f"{_TINY} feedforward_width=352"
_GSS2_SMALL = f"{_LLAMA_SMALL} matrix_state.heads=4"
_GSS2_TINY = f"{_LLAMA_TINY} matrix_state.heads=4 matrix_state.value_width=32 state_space.modes=16 attention.sliding=64"
_FEEDBACK_SMALL = f"{_SMALL} depth=1 recurrent.blocks=9 recurrent.block=7"
# No dropout: what trains on a CPU for a minute sees too little to overfit.
_WINDOW_TINY = f"{_TINY} dropout=0.0 attention.window=64 recurrent.vectors=64"
_FEEDBACK_TINY = f"{_WINDOW_TINY} depth=1 recurrent.blocks=4 recurrent.block=2"

_BRT = "Block-Recurrent Transformer"
_FED = f"{_BRT} with feedback"

# Family, settings, and the line for the list.
_TABLE: dict[str, tuple[ModelConfig, str, str]] = {
    "gss-lm1b": (_GSS, "vocab_size=30000", "GSS for LM1B (table 1)"),
    "gss": (_GSS, "", "GSS, 16 layers (tables 1 and 2)"),
    "gss-l": (_GSS, "depth=32", "GSS-L, 32 layers (table 2)"),
    "gss-hybrid": (_HYBRID, "", "GSS with attention on chunks of 512 at layers 2, 6, 10, 14"),
    "gss-hybrid-l": (_HYBRID, "depth=32", "GSS-Hybrid-L: attention on chunks of 512 at layers 2, 6, …, 30 (table 2)"),
    "dss-lm1b": (_DSS, "vocab_size=30000 state_space.modes=128", "DSS for LM1B (table 1)"),
    "dss": (_DSS, "", "DSS, 12 blocks (table 1)"),
    "transformer-lm1b": (_TRANSFORMER, "vocab_size=30000", "Transformer for LM1B (table 1)"),
    "transformer": (_TRANSFORMER, "", "Transformer, 12 blocks, 32k vocabulary"),
    "llama": (_LLAMA, "", "Transformer of Llama's kind, 13 blocks, 200M parameters"),
    "gss2": (_GSS2, "", "GSS2 with attention over 4,096 tokens at layers 3, 6, 9, 12, 187M parameters"),
    "rec-fixed-skip": (_REC, "", f"{_BRT}, the recurrent layer 10th of 12 (table 2)"),
    "feedback-lstm-single": (_FEEDBACK_LSTM, "", f"{_BRT}, all 12 blocks read the state, LSTM gate (table 2)"),
    "feedback-fixed-skip": (_FEEDBACK, "", f"{_BRT}, all 12 blocks read the state (table 2)"),
    "slide": (_SLIDE, "", "Transformer on a sliding window of 512"),
    "xl": (_XL, "", "Transformer with Transformer-XL's cache, windows of 2,048"),
    "gss-small": (_GSS, _GSS_SMALL, "GSS, 46M parameters"),
    "gss-hybrid-small": (_HYBRID, _GSS_SMALL, "GSS with attention at layers 2, 6, 10, 48M parameters"),
    "gss-l-small": (_GSS, _L_SMALL, "GSS-L: twice the layers of gss-small, 76M parameters"),
    "gss-hybrid-l-small": (
        _HYBRID,
        _L_SMALL,
        "GSS-Hybrid-L: attention at layers 2, 6, …, 22 of 24, 80M parameters",
    ),
    "dss-small": (_DSS, f"{_SMALL} state_space.modes=64", "DSS, 46M parameters"),
    "transformer-small": (_TRANSFORMER, _SMALL, "Transformer, 45M parameters"),
    "llama-small": (_LLAMA, _LLAMA_SMALL, "Transformer of Llama's kind, 45M parameters"),
    "gss2-small": (_GSS2, _GSS2_SMALL, "GSS2 with attention over 4,096 tokens at layers 3, 6, 9, 45M parameters"),
    "rec-fixed-skip-small": (_REC_SMALL, _SMALL, f"{_BRT}, the recurrent layer 7th of 9, 47M parameters"),
    "feedback-lstm-single-small": (_FEEDBACK_LSTM, _FEEDBACK_SMALL, f"{_FED} and LSTM gate, 56M parameters"),
    "feedback-fixed-skip-small": (_FEEDBACK, _FEEDBACK_SMALL, f"{_FED}, 52M parameters"),
    "slide-small": (_SLIDE, _SMALL, "Transformer on a sliding window of 512, 45M parameters"),
    "xl-small": (_XL, _SMALL, "Transformer with Transformer-XL's cache, 45M parameters"),
    "gss-tiny": (_GSS, _GSS_TINY, "GSS on bytes, for a CPU"),
    "gss-hybrid-tiny": (_HYBRID, _GSS_TINY, "GSS with attention at layer 2, for a CPU"),
    "gss-l-tiny": (_GSS, f"{_GSS_TINY} depth=8", "GSS-L: twice the layers of gss-tiny, for a CPU"),
    "gss-hybrid-l-tiny": (_HYBRID, f"{_GSS_TINY} depth=8", "GSS-Hybrid-L: attention at layers 2 and 6 of 8, for a CPU"),
    "transformer-tiny": (_TRANSFORMER, _TINY, "Transformer on bytes, for a CPU"),
    "llama-tiny": (_LLAMA, _LLAMA_TINY, "Transformer of Llama's kind on bytes, for a CPU"),
    "gss2-tiny": (_GSS2, _GSS2_TINY, "GSS2 with attention at layer 3, for a CPU"),
    "dss-tiny": (_DSS, f"{_TINY} state_space.modes=16", "DSS on bytes, for a CPU"),
    "rec-fixed-skip-tiny": (_REC_TINY, _WINDOW_TINY, f"{_BRT} on bytes, windows of 64, for a CPU"),
    "feedback-lstm-single-tiny": (_FEEDBACK_LSTM, _FEEDBACK_TINY, f"{_FED} and LSTM gate, for a CPU"),
    "feedback-fixed-skip-tiny": (_FEEDBACK, _FEEDBACK_TINY, f"{_FED}, for a CPU"),
    "slide-tiny": (_SLIDE, _WINDOW_TINY, "Transformer on a sliding window, for a CPU"),
    "xl-tiny": (_XL, _WINDOW_TINY, "Transformer with Transformer-XL's cache, for a CPU"),
}
# What the paper states, in millions of parameters.
_STATED = {"gss-lm1b": 190, "dss-lm1b": 188, "transformer-lm1b": 182}
_STATED |= {"gss": 192, "gss-l": 352, "gss-hybrid-l": 373, "dss": 209, "rec-fixed-skip": 196}

PRESETS: dict[str, Preset] = {
    name: Preset(config=_with(family, settings), about=about, paper_parameters=_STATED.get(name))
    for name, (family, settings, about) in _TABLE.items()
}


def preset(name: str, /, **overrides: Any) -> ModelConfig:
    """The configuration of a preset, with some fields replaced.

    >>> gss.preset("gss", vocab_size=50_000, state_space={"modes": 256}).vocab_size
    50000

    Nested fields are given as mappings, or with dotted keys: `preset("gss", **{"state_space.modes": 256})`.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}{nearest(name, PRESETS)}")
    return override(PRESETS[name].config, overrides)
