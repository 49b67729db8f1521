"""Configurations: validated frozen dataclasses, and their conversion from and to plain data.

A configuration comes from a preset, a TOML file, a dictionary or `key=value` overrides with dotted keys. This module
imports no torch, so that commands can check their arguments at once.
"""

import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from gss.choices import ACTIVATIONS, DISCRETIZATIONS, LAYERS, NORMS, WITH_DROPOUT, Checked, chosen, limited, nearest

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig(Checked):
    """A diagonal state space: its size, its discretization and its initialization.

    >>> gss.StateSpaceConfig(modes=64).modes
    64
    """

    modes: int = limited(512, ge=1)
    """N, complex modes per channel."""
    discretization: str = chosen("zoh", DISCRETIZATIONS)
    """Zero-order hold (the paper's) or the bilinear transform (the paper found little difference)."""
    imaginary: Literal["exp", "plain"] = "exp"
    """exp: the parameter is log(Im λ), as in the paper's code; plain: it is Im λ itself, as in DSS and S4D."""
    step_range: tuple[float, float] | None = None
    """Range in which each channel's own learned sample time Δ starts, log-uniformly (DSS: 0.001 to 0.1), or None, where
    Δ is fixed at 1 (the paper's simplification)."""
    decay_init: Literal["log_uniform", "log_normal", "mixed"] = "log_uniform"
    """Initial −Re λ: log-uniform in `decay_range`; exp(N(0,1)); or, with mixed, half of the modes each."""
    decay_range: tuple[float, float] = (1e-3, 1.0)
    """Range of the initial −Re λ, in 1/tokens for Δ = 1. The default means time constants of 1 to 1,000 tokens."""
    frequency_init: Literal["log_normal", "log_uniform", "mixed", "linear", "skew_hippo"] = "mixed"
    """Initial Im λ: exp(N(0,1)); log-uniform in `frequency_range`; half of the modes each; 2π(n+½)/N; or Skew-HiPPO's
    (DSS)."""
    frequency_range: tuple[float, float] = (1e-2, 0.3)
    """Range of the initial Im λ, in radians per token."""
    readout_init: Literal["equal_energy", "unit", "inverse_sqrt", "inverse", "mixed"] = "equal_energy"
    """Initial scale of C: every mode contributes the same energy to a kernel of energy 1; N(0,1); N(0,1)/√N; N(0,1)/N;
    or, for mixed decays, N(0,1)/√N for the first half of the modes and 0.3 of equal energy for the second."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("decay_range", "frequency_range", "step_range"):
            bounds = getattr(self, name)
            if bounds is not None and not (len(bounds) == 2 and 0 < bounds[0] <= bounds[1] < math.inf):
                raise ValueError(f"{name} must be two numbers with 0 < low <= high, not {bounds!r}")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Checked):
    """Self-attention of a Transformer block.

    >>> gss.AttentionConfig(heads=4, chunk=512).chunk
    512
    """

    heads: int = limited(8, ge=1)
    """Number of heads."""
    head_width: int | None = limited(None, ge=1)
    """Width of a head. None: the model's width ÷ heads, which must divide it."""
    chunk: int | None = limited(None, ge=1)
    """Tokens in each of the independent chunks that attention is limited to, counted from the start of the sequence
    (512 in the hybrid), or None: causal attention over the whole sequence."""
    sliding: int | None = limited(None, ge=1)
    """A number W: sliding-window attention, in which a token sees itself and the W − 1 tokens before it. Cannot be
    combined with `chunk`."""
    window: int = limited(512, ge=1)
    """W, how far slide, xl, recurrent and feedback layers look back; also how often a recurrent state is updated."""
    rotary_base: float = limited(500_000.0, gt=1)
    """Base of rotary positions: the slowest pair rotates by about 1/base radians per token."""
    qk_norm: bool = False
    """Whether attention layers normalize queries and keys per head, with the model's norm and one learned scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None and self.sliding is not None:
            raise ValueError("attention.chunk and attention.sliding cannot both be set: choose one")


@dataclass(frozen=True, kw_only=True)
class MatrixStateConfig(Checked):
    """The matrix state of GSS2 layers: `state_space.modes` complex modes × `value_width` values per head."""

    heads: int = limited(8, ge=1)
    """h, number of heads."""
    value_width: int = limited(128, ge=1)
    """D, values per head."""
    taps: int = limited(4, ge=1)
    """Tokens seen by the short convolution before the state space, including the current one."""
    feature_map: str = chosen("swish", ACTIVATIONS)
    """Activation of queries and keys after the short convolution; values have swish."""
    skip: float = 1.0
    """Initial skip weight d: how much of each value goes directly into its own output. A mode that decays over T tokens
    writes with weight √(2/T), so next to a skip of 1 distant tokens hardly count; 0 suits very slow modes."""
    multiscale: bool = False
    """Whether heads start with different decays, from the fastest in the first to the slowest in the last, instead of
    drawing from the whole range each. Better without attention layers, worse beside them (docs/results.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.skip):
            raise ValueError(f"skip must be a finite number, not {self.skip!r}")


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Checked):
    """The recurrent state of recurrent and feedback layers; its window is the attention's."""

    vectors: int = limited(512, ge=1)
    """S, vectors of the state, each of the model's width."""
    gate: Literal["fixed", "lstm"] = "fixed"
    """The gate of an update: a learned share per channel, or LSTM gates that depend on the input."""
    layout: Literal["skip", "single"] = "skip"
    """What computes an update: a dense layer, or a feed-forward that ends in a tanh."""
    blocks: int = limited(12, ge=1)
    """Blocks in a feedback layer, which is a whole stack (`depth` counts such stacks). A recurrent layer has one."""
    block: int = limited(10, ge=1)
    """The block of a feedback layer that writes the state, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """A language model: embedding, the layers of `pattern`, a norm, and the embedding again as the head.

    >>> gss.ModelConfig(pattern=("gss", "attention"), depth=4, width=256).layers
    ('gss', 'attention', 'gss', 'attention')
    """

    vocab_size: int = limited(32_000, ge=1)
    """Number of token ids."""
    width: int = limited(1024, ge=1)
    """E, width of the residual stream."""
    depth: int = limited(16, ge=1)
    """Number of layers."""
    pattern: tuple[str, ...] = chosen(("gss",), LAYERS)
    """The kinds of layers, in order, repeated until there are `depth` layers. The hybrid has ("gss", "attention",
    "gss", "gss"): attention at layers 2, 6, 10, …"""
    gate_width: int = limited(4096, ge=1)
    """F, width of a GSS layer's gate."""
    channels: int = limited(256, ge=1)
    """H, channels of a GSS layer's state space. (In DSS layers it has `width` channels.)"""
    dss_mixers: int = limited(2, ge=1)
    """State-space sublayers of a DSS block before its feed-forward: 2 gives the paper's parameter counts, 1 follows its
    text literally."""
    feedforward_width: int = limited(4096, ge=1)
    """Hidden width of the feed-forward in every block that has one (all except GSS layers)."""
    feedforward: Literal["plain", "gated"] = "plain"
    """plain: φ(xW₁)·W₃; gated: (φ(xW₁) ∗ xW₂)·W₃, which is SwiGLU if the activation is swish."""
    activation: str = chosen("gelu", ACTIVATIONS)
    """φ, the activation of GSS layers and feed-forwards."""
    norm: str = chosen("layernorm", NORMS)
    """The kind of all norms: layernorm (scale and bias) or rmsnorm (scale only)."""
    norm_epsilon: float = limited(1e-6, gt=0)
    """Added to the variance in every norm."""
    bias: bool = True
    """Whether dense layers have biases."""
    dropout: float = limited(0.0, ge=0, lt=1)
    """Dropout rate in training, on what attention, GSS2 layers and feed-forwards add to the residual stream. In slide,
    xl, recurrent and feedback layers, it is at the input of attention instead. GSS and DSS layers don't support it."""
    positions: Literal["none", "sinusoidal", "rotary"] = "none"
    """Positions for attention: none (state spaces know the order), sinusoids added to the embedding (the paper's
    Transformer), or rotary queries and keys (Llama)."""
    embedding_std: float = limited(1.0, gt=0)
    """Initial standard deviation of the embedding."""
    zero_outputs: bool = False
    """Whether matrices that write to the residual stream start at zero, so that every layer starts as the identity."""
    head_scale: float | None = limited(None, gt=0)
    """Scale factor of the logits, hidden · embeddingᵀ. None: 1/√width, which suits an embedding of order 1."""
    state_space: StateSpaceConfig = field(default_factory=StateSpaceConfig)
    """The state space of GSS, GSS2 and DSS layers."""
    matrix_state: MatrixStateConfig = field(default_factory=MatrixStateConfig)
    """Settings of GSS2 layers."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention of Transformer blocks and of windowed layers."""
    recurrent: RecurrentConfig = field(default_factory=RecurrentConfig)
    """The recurrent state of recurrent and feedback layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern:
            raise ValueError('pattern is empty: name at least one kind of layer, for example ["gss"]')
        if self.recurrent.block > self.recurrent.blocks:
            raise ValueError(
                f"recurrent.block is {self.recurrent.block}, but the stack has only "
                f"recurrent.blocks = {self.recurrent.blocks}: choose a block from 1 to {self.recurrent.blocks}"
            )
        without = [kind for kind in self.kinds if kind not in WITH_DROPOUT]
        if self.dropout and without:
            raise ValueError(f"{without[0]} layers don't support dropout: set dropout to 0, not {self.dropout!r}")
        if self.attention.head_width is None and self.width % self.attention.heads:
            raise ValueError(
                f"the width {self.width} is not divisible by {self.attention.heads} heads: "
                "change attention.heads, or set attention.head_width"
            )
        if self.positions == "sinusoidal" and self.width % 2:
            raise ValueError(f"sinusoidal positions need an even width, not {self.width}")
        head_width = self.attention.head_width or self.width // self.attention.heads
        if self.positions == "rotary" and head_width % 2:
            raise ValueError(f"rotary positions need an even head width, not {head_width}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers, each once, in order of first appearance."""
        return tuple(dict.fromkeys(self.pattern[: self.depth]))

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of every layer, first to last."""
        repeats = -(-self.depth // len(self.pattern))
        return (self.pattern * repeats)[: self.depth]

    @property
    def unused(self) -> tuple[str, ...]:
        """Initialization fields that have no effect, as dotted names: all of them in a model without state spaces."""
        space, without = self.state_space, not {"gss", "gss2", "dss"} & set(self.kinds)
        used = {"decay_range": space.decay_init != "log_normal"}
        used["frequency_range"] = space.frequency_init in ("log_uniform", "mixed")
        names = [each.name for each in fields(space) if without or not used.get(each.name, True)]
        return tuple(f"state_space.{name}" for name in names)


def from_mapping(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """A config of class `kind` from plain data (parsed TOML or JSON); nested tables become nested configs."""
    return override(kind(), values)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, as plain data."""
    if not Path(path).is_file():
        raise ValueError(f"there is no settings file {path}")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with some fields replaced; keys may be dotted, and nested mappings apply to nested configs."""
    assert is_dataclass(config)
    assert not isinstance(config, type)
    kinds = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}  # applied together, so that no order of settings is refused half-way
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if name not in kinds:
            near = nearest(key, kinds, flattened(asdict(config)))
            raise ValueError(f"{type(config).__name__} has no field {name!r}{near}")
        current = getattr(config, name)
        if is_dataclass(current) and not isinstance(value, type(current)):
            own = {rest: value} if rest else value
            if isinstance(own, str) and hasattr(current, "shorthand"):
                own = {current.shorthand: own}
            if not isinstance(own, Mapping):
                raise ValueError(f"{name} is a group of settings: set {name}.<field>, not {name}={value!r}")
            nested[name] = nested.get(name, {}) | dict(own)
        elif rest:
            raise ValueError(f"{name} has no field {rest!r}: it is a single value")
        else:
            changes[name] = _coerce(name, value, kinds[name])
    for name, own in nested.items():
        changes[name] = override(changes.get(name, getattr(config, name)), own)
    return replace(config, **changes)


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key=value` strings as a mapping; values in TOML's syntax (512, 1e-3, true, [1, 2], "text"), else as text."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not (equals and key.strip()):
            raise ValueError(f"{assignment!r} is not of the form key=value, for example steps=1000")
        values[key.strip()] = _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as plain data, as JSON gives it back: the inverse of `from_mapping`."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return values


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _coerce(name: str, value: Any, kind: Any) -> Any:
    """The value converted to the field's type: lists from TOML become tuples, and "none" clears an optional field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or value == "none":
            return None
        return _coerce(name, value, next(a for a in arguments if a is not type(None)))
    if origin is Literal:
        return value  # __post_init__ names the choices
    if origin is tuple:
        if isinstance(value, str):
            value = [_value(part) for part in value.split(",")]
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, not {value!r}")
        return tuple(_coerce(name, item, arguments[0]) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} must be a number with at most 300 digits") from None
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r}")
    return value
