"""Norms, activations, dense layers and the feed-forward: the parts that act on each token independently."""

from torch import Tensor, nn

from gss.choices import ACTIVATIONS, NORMS, load
from gss.config import ModelConfig
from gss.ops.gate import gate_in_fp8
from gss.ops.norm import normalize


def dense(
    inputs: int, outputs: int, config: ModelConfig, blocks: int = 1, bias: bool | None = None, *, last: bool = False
) -> nn.Linear:
    """A linear layer, Xavier-uniform with zero bias; `blocks` stacks that many such layers in one product.

    `bias` overrides the config's choice. `last` marks products that are added to the residual stream, which the config
    may initialize with zero.
    """
    layer = nn.Linear(inputs, outputs * blocks, bias=config.bias if bias is None else bias)
    layer.blocks = blocks  # type: ignore[assignment]  # Muon takes each for a matrix of its own
    layer.last = last  # type: ignore[assignment]  # in 4 bits, its rounding would cost the most
    for block in layer.weight.chunk(blocks):
        nn.init.xavier_uniform_(block)
    if last and config.zero_outputs:
        nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def norm(width: int, config: ModelConfig) -> nn.LayerNorm | nn.RMSNorm:
    """The config's norm over the last dimension."""
    layer: nn.LayerNorm | nn.RMSNorm = load(NORMS[config.norm])(width, eps=config.norm_epsilon)
    return layer


class FeedForward(nn.Module):
    """x + φ(norm(x)·W₁)·W₃; gated (SwiGLU and its kin), x + (φ(norm(x)·W₁) ∗ norm(x)·W₂)·W₃."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config.width, config)
        self.inner = dense(config.width, config.feedforward_width, config)  # W₁
        gated = config.feedforward == "gated"
        self.gated = dense(config.width, config.feedforward_width, config) if gated else None  # W₂
        self.outer = dense(config.feedforward_width, config.width, config, last=True)  # W₃
        self.activation = config.activation  # φ
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = normalize(self.norm, x)
        y = None if self.gated is None else normed
        if (out := gate_in_fp8(normed, y, self.inner, self.gated, self.outer, self.activation)) is not None:
            return x + self.dropout(out)
        hidden = ACTIVATIONS[self.activation](self.inner(normed))
        if self.gated is not None:
            hidden = hidden * self.gated(normed)
        return x + self.dropout(self.outer(hidden))
