"""The Gated State Space layer (the paper's figure 1)."""

from torch import Tensor

from gss.config import ModelConfig
from gss.nn.dense import ACTIVATIONS, dense, norm
from gss.nn.documents import Documents
from gss.nn.state import LayerState, SequenceLayer, Slot
from gss.nn.state_space import DiagonalStateSpace


class GSSLayer(SequenceLayer):
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
        self.activation = ACTIVATIONS[config.activation]

    def state_slots(self) -> dict[str, Slot]:
        return {"modes": Slot((self.state_space.channels, self.state_space.config.modes, 2))}

    def mixing_flops(self, length: int) -> float:
        return self.state_space.mixing_flops(length)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        keep_state: bool = True,
        documents: Documents | None = None,
    ) -> tuple[Tensor, LayerState]:
        normed = self.norm(x)
        v = self.activation(self.gate(normed))  # [B, L, F]
        u = self.inner_norm(self.activation(self.inner(normed)))  # [B, L, H]
        y, modes = self.state_space(u, state and state["modes"], keep_state, documents)
        out = self.output(self.context(y.to(v.dtype)) * v) + x
        return out, {} if modes is None else {"modes": modes}
