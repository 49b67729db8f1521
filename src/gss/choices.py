"""The registries of choices: activations, norms, discretizations and kinds of layers.

To add one, add it here: configurations, the command line, layers and kernels read these tables. This module imports no
torch until a choice is used, so that commands can check their arguments at once.
"""

import difflib
import importlib
import operator
import typing
from collections.abc import Callable, Collection, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


def nearest(name: str, names: Iterable[str], dotted: Iterable[str] = (), otherwise: str = "") -> str:
    """The end of an error about an unknown name: similar names, or else all of them, or what lists so many.

    `dotted` are full names of nested settings, of which the user may have given only the last part.
    """
    known, deep = list(names), list(dotted)
    close = [each for each in deep if each.endswith(f".{name}")]
    close = close or difflib.get_close_matches(name, dict.fromkeys([*known, *deep]), 3)
    return f"; did you mean {' or '.join(close)}?" if close else f"; {otherwise or 'choose from: ' + ', '.join(known)}"


_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("over", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("under", operator.lt),
}


def limited(default: Any, **limits: float) -> Any:
    """A field of a configuration with limits, named as in pydantic: ge, gt, le, lt."""
    return field(default=default, metadata={"limits": limits})


def chosen(default: Any, choices: Collection[str]) -> Any:
    """A field of a configuration whose value, or each of whose values, is the name of something registered."""
    return field(default=default, metadata={"choices": choices})


def choices_of(each: Field[Any], kind: Any) -> Collection[str]:
    """What a field of this type may hold; empty where that is not a list."""
    return each.metadata.get("choices") or (typing.get_args(kind) if typing.get_origin(kind) is Literal else ())


@dataclass(frozen=True)
class Checked:
    """A configuration that refuses a value outside its field's limits, or not among the choices of its field or type.

    Errors name fields with `prefix` in front.
    """

    prefix = ""  # without a type: it is no field

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for each in fields(self):
            name, kind, given = self.prefix + each.name, hints[each.name], getattr(self, each.name)
            limits, choices = each.metadata.get("limits", {}), choices_of(each, kind)
            if given is None and type(None) in typing.get_args(kind):
                continue
            for value in given if typing.get_origin(kind) is tuple else (given,):
                if limits and int in (kind, *typing.get_args(kind)) and type(value) is not int:
                    raise ValueError(f"{name} must be a whole number, not {value!r}")
                if not all(_LIMITS[limit][1](value, bound) for limit, bound in limits.items()):
                    said = " and ".join(f"{_LIMITS[limit][0]} {bound}" for limit, bound in limits.items())
                    raise ValueError(f"{name} must be {said}, not {value!r}")
                if choices and value not in choices:
                    raise ValueError(f"{name} cannot be {value!r}; choose from: {', '.join(choices)}")


# Activations: elementwise functions. A GPU kernel that lacks one leaves it to PyTorch.


def _functional() -> Any:
    import torch.nn.functional as F

    return F


ACTIVATIONS: "dict[str, Callable[[Tensor], Tensor]]" = {
    "gelu": lambda x: _functional().gelu(x),
    "relu2": lambda x: x.relu().square(),
    "swish": lambda x: _functional().silu(x),
    "relu": lambda x: x.relu(),
}

NORMS: dict[str, str] = {"layernorm": "torch.nn.LayerNorm", "rmsnorm": "torch.nn.RMSNorm"}
"""Classes over the last dimension: with scale and bias, or with scale alone."""


# Discretizations: (λ, Δ) to (log Ā, B̄), where the continuous x' = λx + u becomes x_k = Ā x_{k−1} + B̄ u_k.


def _zero_order_hold(eigenvalue: "Tensor", step: "Tensor") -> "tuple[Tensor, Tensor]":
    """The input is constant between samples: Ā = e^λΔ, B̄ = (e^λΔ − 1)/λ, whose limit at λ = 0 is Δ + λΔ²/2."""
    scaled = eigenvalue * step
    still = eigenvalue == 0
    return scaled, (scaled.expm1() / eigenvalue.masked_fill(still, 1)).where(~still, step * (1 + scaled / 2))


def _bilinear(eigenvalue: "Tensor", step: "Tensor") -> "tuple[Tensor, Tensor]":
    """The trapezoidal rule: Ā = (1 + λΔ/2)/(1 − λΔ/2), B̄ = Δ/(1 − λΔ/2). At λΔ = −2, Ā is 0: so is e^−1000."""
    half = eigenvalue * step / 2
    gone = half == -1
    return (2 * half.masked_fill(gone, 0).atanh()).masked_fill(gone, -1000), step / (1 - half)


DISCRETIZATIONS: "dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]" = {
    "zoh": _zero_order_hold,
    "bilinear": _bilinear,
}


LAYERS: dict[str, str] = {
    "gss": "gss.nn.gss.GSSLayer",
    "gss2": "gss.nn.gss2.GSS2Layer",
    "dss": "gss.nn.dss.DSSBlock",
    "attention": "gss.nn.attention.TransformerBlock",
    "slide": "gss.nn.window_attention.SlideLayer",
    "xl": "gss.nn.window_attention.XLLayer",
    "recurrent": "gss.nn.block_recurrent.RecurrentLayer",
    "feedback": "gss.nn.block_recurrent.FeedbackLayer",
}
"""The kinds of layers that a model's pattern may name: each a class, which is made from a `ModelConfig`."""
WITH_DROPOUT = {"attention", "gss2", "slide", "xl", "recurrent", "feedback"}
"""The kinds that support dropout; the paper's own state-space layers are trained without."""


def load(path: str) -> Any:
    """The class at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
