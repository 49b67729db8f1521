"""Norms, activations, dense layers and the feed-forward: the pieces that act on each token alone."""

from torch import Tensor, nn

from gss.config import ModelConfig
from gss.ops.gate import ACTIVATIONS
from gss.ops.norm import normed


def dense(inputs: int, outputs: int, config: ModelConfig, blocks: int = 1, bias: bool | None = None) -> nn.Linear:
    """A linear layer, Xavier-uniform with zero bias; `blocks` stacks that many such layers in one product.

    Whether there is a bias is the config's to say, unless `bias` does.
    """
    layer = nn.Linear(inputs, outputs * blocks, bias=config.bias if bias is None else bias)
    for block in layer.weight.chunk(blocks):
        nn.init.xavier_uniform_(block)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def norm(width: int, config: ModelConfig) -> nn.LayerNorm | nn.RMSNorm:
    """The config's norm over the last dimension."""
    kind: type[nn.LayerNorm] | type[nn.RMSNorm] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}[config.norm]
    return kind(width, eps=config.norm_epsilon)


class FeedForward(nn.Module):
    """norm → dense → activation → dense, added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm(config.width, config)
        self.inner = dense(config.width, config.feedforward_width, config)
        self.outer = dense(config.feedforward_width, config.width, config)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(self.activation(self.inner(normed(self.norm, x)))))
