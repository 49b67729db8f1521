"""How the next token is drawn, as settings: listed once for the library, `gss generate` and the server.

A new option is the last field of `Sampling` (and of `SamplingOptions`, for type checkers), with its limits, what it
does and its effect. Imports no torch, so that a command line can list the options at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from gss.choices import Checked

_Limits = dict[str, float] | None


def _option(
    default: Any, about: str, served: _Limits = None, effect: Callable[..., Any] | None = None, **limits: float
) -> Any:
    """Limits by the names that pydantic has for them; a server's, for requests from elsewhere, may be others.

    The effect maps the weights [B, V] of all tokens (1 for the likeliest) and each row's value [B, 1] (0 for None) to
    new weights; at the default it changes nothing. It is applied before `top_k` and `top_p`. Options without an effect
    are handled by `gss.decode.sampler`.
    """
    metadata = {"about": about, "limits": limits, "served": served or limits, "effect": effect}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """How the next token is drawn. The defaults sample from the model's own distribution."""

    temperature: float = _option(
        1.0, "0 takes the most likely token; 1 samples from the model's distribution.", {"ge": 0, "le": 100}, ge=0
    )
    top_k: int | None = _option(None, "Keep only this many of the most likely tokens.", {"ge": 1, "lt": 2**31}, ge=1)
    top_p: float | None = _option(None, "Keep the most likely tokens up to this total probability.", gt=0, le=1)
    min_p: float | None = _option(
        None,
        "Keep only tokens at least this fraction as likely as the most likely one.",
        effect=lambda weight, least: weight.masked_fill(weight < least.float(), 0),
        gt=0,
        le=1,
    )
    repetition_penalty: float = _option(
        1.0, "Above 1, makes tokens that have occurred less likely.", {"ge": 0.01, "le": 100}, gt=0
    )


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float


OPTIONS = {option.name: option for option in fields(Sampling)}
"""By name; `metadata` has what an option does, `about`, its limits and its effect."""
