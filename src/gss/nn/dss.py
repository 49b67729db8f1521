"""The DSS block, the paper's state-space baseline: state space → GELU → gated linear unit, then a feed-forward."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gss.config import ModelConfig
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.state_space import DiagonalStateSpace
from gss.nn.state_space_layer import Mix, StateSpaceLayer


class DSSMixer(nn.Module):
    """norm → DSS on all E channels → GELU → dense E→2E → GLU, added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config.width, config)
        self.state_space = DiagonalStateSpace(config.width, config.state_space)
        self.output = dense(config.width, config.width, config, blocks=2)

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        return x + F.glu(self.output(F.gelu(mix(self.norm(x)).to(x.dtype))))


class DSSBlock(StateSpaceLayer):
    """One or two mixers and a feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(DSSMixer(config) for _ in range(config.dss_mixers))
        self.feedforward = FeedForward(config)

    def spaces(self) -> dict[str, DiagonalStateSpace]:
        return {f"modes{i}": mixer.state_space for i, mixer in enumerate(self.mixers) if isinstance(mixer, DSSMixer)}

    def around(self, x: Tensor, mixes: Sequence[Mix]) -> Tensor:
        for mixer, mix in zip(self.mixers, mixes, strict=True):
            x = mixer(x, mix)
        return self.feedforward(x)
