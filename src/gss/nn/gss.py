"""The Gated State Space layer (the paper's figure 1)."""

from torch import Tensor

from gss.choices import ACTIVATIONS
from gss.config import ModelConfig
from gss.nn.decoding import Block, DecodePlan, GPUPlan
from gss.nn.dense import dense, norm
from gss.nn.state import LayerState, Outputs
from gss.nn.state_space import DiagonalStateSpace, StateSpaceLayer
from gss.ops.gate import add_gated
from gss.ops.norm import normalize


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
        self.output = dense(config.gate_width, config.width, config, last=True)  # W₄
        self.activation = config.activation  # φ
        self.keep_products = False
        """Whether wide products are kept for the backward pass on a GPU, instead of computed twice."""

    def spaces(self) -> dict[str, DiagonalStateSpace]:
        return {"modes": self.state_space}

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        phi = ACTIVATIONS[self.activation]
        normed = normalize(self.norm, x)  # [B, L, E]
        u = normalize(self.inner_norm, phi(self.inner(normed)))  # [B, L, H]
        y, modes = self.state_space(u, state and state["modes"], keep_state)
        # (y·W₃ ∗ φ(normed·W₂))·W₄ + x, in one operation because the gate is the widest thing in the layer
        out = add_gated(x, normed, y, self.gate, self.context, self.output, self.activation, self.keep_products)
        return out, {"modes": modes} if keep_state else {}

    def decode_plan(self, state: LayerState, block: Block) -> DecodePlan:
        from gss.nn.cpu_plans import CompiledGSSPlan, usable

        if usable(self, self.activation):
            return CompiledGSSPlan(self, state, block)
        return super().decode_plan(state, block)

    def gpu_plan(self, block: int) -> GPUPlan | None:
        from gss.nn.gpu_plans import GSSPlan

        return GSSPlan(self, block) if GSSPlan.fits(self) else None
