"""The DSS block, the paper's state-space baseline: state space → GELU → gated linear unit, then a feed-forward."""

import torch.nn.functional as F
from torch import Tensor, nn

from gss.config import ModelConfig
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.state import LayerState, Outputs
from gss.nn.state_space import DiagonalStateSpace, StateSpaceLayer


class DSSMixer(nn.Module):
    """x + GLU(GELU(DSS(norm x))·W), the state space on all E channels and W [2E, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config.width, config)
        self.state_space = DiagonalStateSpace(config.width, config.state_space)
        self.output = dense(config.width, config.width, config, blocks=2, last=True)

    def forward(self, x: Tensor, modes: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor]:
        y, modes = self.state_space(self.norm(x), modes, keep_state)
        return x + F.glu(self.output(F.gelu(y.to(x.dtype)))), modes


class DSSBlock(StateSpaceLayer):
    """One or two mixers and a feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(DSSMixer(config) for _ in range(config.dss_mixers))
        self.feedforward = FeedForward(config)

    def spaces(self) -> dict[str, DiagonalStateSpace]:
        return {f"modes{i}": mixer.state_space for i, mixer in enumerate(self.mixers) if isinstance(mixer, DSSMixer)}

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        after: LayerState = {}
        for i, mixer in enumerate(self.mixers):
            x, after[f"modes{i}"] = mixer(x, state and state[f"modes{i}"], keep_state)
        return self.feedforward(x), after if keep_state else {}
