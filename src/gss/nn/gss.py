"""The Gated State Space layer (the paper's figure 1)."""

from collections.abc import Sequence

from torch import Tensor

from gss.config import ModelConfig
from gss.nn.dense import dense, norm
from gss.nn.state_space import DiagonalStateSpace
from gss.nn.state_space_layer import Mix, StateSpaceLayer
from gss.ops.gate import ACTIVATIONS, add_gated
from gss.ops.norm import normed


class GSSLayer(StateSpaceLayer):
    """O = (DSS(norm(φ(XW₁)))·W₃ ∗ φ(XW₂))·W₄ + X, with X normed first: a wide gate, a narrow state space."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config.width, config)
        self.gate = dense(config.width, config.gate_width, config)  # W₂
        self.inner = dense(config.width, config.channels, config)  # W₁
        self.inner_norm = norm(config.channels, config)
        self.state_space = DiagonalStateSpace(config.channels, config.state_space)
        self.context = dense(config.channels, config.gate_width, config)  # W₃
        self.output = dense(config.gate_width, config.width, config)  # W₄
        self.activation = config.activation

    def spaces(self) -> dict[str, DiagonalStateSpace]:
        return {"modes": self.state_space}

    def around(self, x: Tensor, mixes: Sequence[Mix]) -> Tensor:
        (mix,) = mixes
        above = normed(self.norm, x)
        u = normed(self.inner_norm, ACTIVATIONS[self.activation](self.inner(above)))  # [B, L, H]
        gate, context, output = ((layer.weight, layer.bias) for layer in (self.gate, self.context, self.output))
        return add_gated(x, above, mix(u), gate, context, output, self.activation)
