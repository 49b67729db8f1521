"""Long-range language models built on Gated State Spaces.

>>> import gss
>>> model = gss.build_model(gss.preset("gss-tiny"))
"""

from typing import TYPE_CHECKING, Any

from gss.config import AttentionConfig, ModelConfig, StateSpaceConfig
from gss.presets import PRESETS, preset

if TYPE_CHECKING:
    from gss.loading import load
    from gss.model import LanguageModel, build_model
    from gss.nn.state import ModelState

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "StateSpaceConfig",
    "build_model",
    "load",
    "preset",
]

# What needs torch is imported on first use, so that `import gss` and `gss --help` stay quick.
_LAZY = {
    "LanguageModel": "gss.model",
    "ModelState": "gss.nn.state",
    "build_model": "gss.model",
    "load": "gss.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gss' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
