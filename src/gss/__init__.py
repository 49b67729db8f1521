"""Long-range language models built on Gated State Spaces.

>>> lm = gss.load()                       # the bundled model; or a run folder: gss.load("runs/books")
>>> text = lm.generate("It was a dark and stormy night", max_tokens=10, temperature=0.8)
>>> model = gss.build_model(gss.preset("gss-tiny"))
"""

from typing import TYPE_CHECKING, Any

from gss.config import AttentionConfig, ModelConfig, StateSpaceConfig
from gss.presets import PRESETS, preset

if TYPE_CHECKING:
    from gss.evaluation import Evaluation, evaluate
    from gss.io.states import load_state, save_state
    from gss.lm import LM, Score, load
    from gss.model import LanguageModel, build_model
    from gss.nn.state import ModelState
    from gss.training import TrainConfig, TrainResult, train

__version__ = "0.1.0"

# What needs torch is imported on first use, so that `import gss` and `gss --help` stay quick.
_LAZY = {
    **dict.fromkeys(("Evaluation", "evaluate"), "gss.evaluation"),
    **dict.fromkeys(("load_state", "save_state"), "gss.io.states"),
    **dict.fromkeys(("LM", "Score", "load"), "gss.lm"),
    **dict.fromkeys(("LanguageModel", "build_model"), "gss.model"),
    **dict.fromkeys(("TrainConfig", "TrainResult", "train"), "gss.training"),
    "ModelState": "gss.nn.state",
}

__all__ = [
    "LM",
    "PRESETS",
    "AttentionConfig",
    "Evaluation",
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "Score",
    "StateSpaceConfig",
    "TrainConfig",
    "TrainResult",
    "build_model",
    "evaluate",
    "load",
    "load_state",
    "preset",
    "save_state",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gss' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
