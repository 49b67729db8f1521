"""The DSS block, the paper's state-space baseline: state space → GELU → gated linear unit, then a feed-forward."""

import torch.nn.functional as F
from torch import Tensor, nn

from gss.config import ModelConfig
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.documents import Documents
from gss.nn.state import LayerState, SequenceLayer, Slot
from gss.nn.state_space import DiagonalStateSpace


class DSSMixer(nn.Module):
    """norm → DSS on all E channels → GELU → dense E→2E → GLU, added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config.width, config)
        self.state_space = DiagonalStateSpace(config.width, config.state_space)
        self.output = dense(config.width, config.width, config, blocks=2)

    def forward(
        self, x: Tensor, state: Tensor | None, keep_state: bool, documents: Documents | None
    ) -> tuple[Tensor, Tensor | None]:
        y, state = self.state_space(self.norm(x), state, keep_state, documents)
        return x + F.glu(self.output(F.gelu(y.to(x.dtype)))), state


class DSSBlock(SequenceLayer):
    """One or two mixers and a feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(DSSMixer(config) for _ in range(config.dss_mixers))
        self.feedforward = FeedForward(config)
        self.slot = Slot((config.width, config.state_space.modes, 2))

    def state_slots(self) -> dict[str, Slot]:
        return {f"modes{i}": self.slot for i in range(len(self.mixers))}

    def mixing_flops(self, length: int) -> float:
        spaces = [module for module in self.modules() if isinstance(module, DiagonalStateSpace)]
        return sum(space.mixing_flops(length) for space in spaces)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        keep_state: bool = True,
        documents: Documents | None = None,
    ) -> tuple[Tensor, LayerState]:
        after: LayerState = {}
        for name, mixer in zip(self.state_slots(), self.mixers, strict=True):
            x, modes = mixer(x, state and state[name], keep_state, documents)
            if modes is not None:
                after[name] = modes
        return self.feedforward(x), after
