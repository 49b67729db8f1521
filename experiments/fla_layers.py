"""Mamba-2 and Gated DeltaNet of `flash-linear-attention` as layers of our models, trained and scored like ours.

`register()` makes `mamba2` and `gated-deltanet` layer kinds that a pattern may name, and PEERS has the settings that
make models of `llama-small`'s size of them (45.3M parameters). They need the package and a GPU. They are read whole:
a state is not carried from piece to piece.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gss.choices import LAYERS
from gss.config import ModelConfig
from gss.nn.dense import FeedForward, dense, norm
from gss.nn.state import LayerState, SequenceLayer, Slot

_BODY = "llama-small+model.zero_outputs=true+compile=false"  # the package's kernels are not for torch.compile
PEERS = {
    "mamba2": f"{_BODY}+model.pattern=mamba2+model.depth=17",
    "gated-deltanet": f"{_BODY}+model.pattern=gated-deltanet+model.feedforward_width=1088",
}
"""Of Mamba-2's own layers there are more, since no feed-forward follows them."""


def register() -> None:
    """Let patterns name these layers."""
    LAYERS["mamba2"] = f"{__name__}.Mamba2Layer"
    LAYERS["gated-deltanet"] = f"{__name__}.GatedDeltaNetLayer"


class _Peer(SequenceLayer):
    """x + mixer(norm(x))."""

    mixer: Any

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config.width, config)

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> tuple[Tensor, LayerState]:
        if state is not None:
            raise ValueError("this layer reads sequences whole: it takes no state")
        return x + self.mixer(self.norm(x))[0], {}

    def state_slots(self) -> dict[str, Slot]:
        return {}

    def mixing_flops(self, length: int) -> float:
        return 0.0


class Mamba2Layer(_Peer):
    """As its authors stack it: without a feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mixer = Mamba2(config)


class Mamba2(nn.Module):
    """Mamba-2 on the package's kernels for a decay per head and token: its own layer needs another package's."""

    def __init__(self, config: ModelConfig, state: int = 128, head: int = 64) -> None:
        from fla.modules import ShortConvolution

        super().__init__()
        inner = 2 * config.width
        self.state, self.heads = state, inner // head
        self.gate, self.project = dense(config.width, inner, config), dense(config.width, inner + 2 * state, config)
        self.step = nn.Linear(config.width, self.heads, bias=False)
        self.short = ShortConvolution(inner + 2 * state, 4, activation="silu")
        start = torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.step_bias = nn.Parameter(start + torch.log(-torch.expm1(-start)))  # whose softplus is the start
        self.log_decay = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.output = dense(inner, config.width, config, last=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        from fla.ops.simple_gla import chunk_simple_gla

        mixed, _ = self.short(self.project(x))
        values, keys, queries = mixed.split([mixed.shape[-1] - 2 * self.state, self.state, self.state], dim=-1)
        values = values.unflatten(-1, (self.heads, -1))
        step = F.softplus(self.step(x).float() + self.step_bias)  # [B, L, h]
        keys, queries = (t.unsqueeze(2).expand(-1, -1, self.heads, -1).contiguous() for t in (keys, queries))
        written = (values * step.unsqueeze(-1)).to(keys)
        y, _ = chunk_simple_gla(queries, keys, written, -self.log_decay.exp() * step, scale=1.0)
        y = y + self.skip.to(y).unsqueeze(-1) * values
        return (self.output(self.norm(y.flatten(2) * F.silu(self.gate(x)))),)


class GatedDeltaNetLayer(_Peer):
    """As its authors stack it: then a feed-forward; keys of three quarters of the width, values of twice that."""

    def __init__(self, config: ModelConfig) -> None:
        from fla.layers import GatedDeltaNet

        super().__init__(config)
        heads = 3 * config.width // 512
        self.mixer = GatedDeltaNet(hidden_size=config.width, head_dim=128, num_heads=heads, expand_v=2)
        if config.zero_outputs:
            nn.init.zeros_(self.mixer.o_proj.weight)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> tuple[Tensor, LayerState]:
        mixed, after = super().forward(x, state, keep_state)
        return self.feedforward(mixed), after
