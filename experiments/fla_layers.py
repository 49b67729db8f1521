"""Mamba-2 and Gated DeltaNet of `flash-linear-attention` as layers of our models, trained and scored like ours.

`register()` makes `mamba2` and `gated-deltanet` layer kinds that a pattern may name, and PEERS has the settings that
make models of `llama-small`'s size of them (45.3M parameters). They need the package and a GPU. They are read whole:
a state is not carried from piece to piece.
"""

from typing import Any

from torch import Tensor

from gss.choices import LAYERS
from gss.config import ModelConfig
from gss.nn.dense import FeedForward, norm
from gss.nn.state import LayerState, SequenceLayer, Slot

PEERS = {
    "mamba2": "llama-small+model.pattern=mamba2+model.depth=17",
    "gated-deltanet": "llama-small+model.pattern=gated-deltanet+model.feedforward_width=1088",
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
        from fla.layers import Mamba2

        super().__init__(config)
        self.mixer = Mamba2(hidden_size=config.width, num_heads=2 * config.width // 64, head_dim=64, state_size=128)


class GatedDeltaNetLayer(_Peer):
    """As its authors stack it: then a feed-forward; keys of three quarters of the width, values of twice that."""

    def __init__(self, config: ModelConfig) -> None:
        from fla.layers import GatedDeltaNet

        super().__init__(config)
        self.mixer = GatedDeltaNet(
            hidden_size=config.width, head_dim=128, num_heads=3 * config.width // 512, expand_v=2
        )
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> tuple[Tensor, LayerState]:
        mixed, after = super().forward(x, state, keep_state)
        return self.feedforward(mixed), after
