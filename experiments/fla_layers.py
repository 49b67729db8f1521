"""Mamba-2 and Gated DeltaNet of `flash-linear-attention` as layers of our models, trained and scored like ours.

`register()` makes `mamba2` and `gated-deltanet` layer kinds that a pattern may name, and PEERS has the settings that
make models of `llama-small`'s size of them (45.3M parameters). They need the package and a GPU. They are read whole:
a state is not carried from piece to piece.

The package refuses gated gradients on Hopper GPUs with Triton before 3.7.1, which compiled them wrongly where a tile
has 64 keys (its issue 640). With the 128 keys per head of both layers a tile has 128, so the refusal is lifted, and
`register()` compares outputs and gradients with the recurrence in float64 before anything is trained.
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

# The package's kernels are not for torch.compile, and without it a whole batch takes 87 GB (Mamba-2).
_BODY = "llama-small+model.zero_outputs=true+compile=false+micro_batch_tokens=32768"
PEERS = {
    "mamba2": f"{_BODY}+model.pattern=mamba2+model.depth=17",
    "gated-deltanet": f"{_BODY}+model.pattern=gated-deltanet+model.feedforward_width=1088",
}
"""Of Mamba-2's own layers there are more, since no feed-forward follows them."""


KEYS = 128
"""Per head, in both layers."""
_MOST_ERROR = 0.02  # relative, of 16-bit kernels


def register() -> None:
    """Let patterns name these layers, once the package's kernels are right on this GPU."""
    if torch.cuda.is_available():
        from fla.ops.common import chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
        for name, error in kernel_errors().items():
            if not error <= _MOST_ERROR:
                raise ValueError(f"{name} of flash-linear-attention is off by {error:.1%} on this machine: {_ADVICE}")
    LAYERS["mamba2"] = f"{__name__}.Mamba2Layer"
    LAYERS["gated-deltanet"] = f"{__name__}.GatedDeltaNetLayer"


_ADVICE = "use another version of Triton"


def recurrence(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, strength: Tensor | None = None
) -> Tensor:
    """Both state spaces token by token: q, k [B, L, h, K], v [B, L, h, V], decay and strength [B, L, h].

    With a strength β a value replaces that share of what its key finds (the delta rule); without one it is added.
    """
    state = values.new_zeros(len(values), values.shape[2], keys.shape[-1], values.shape[-1])
    found = []
    for t in range(values.shape[1]):
        key, written = keys[:, t].unsqueeze(-1), values[:, t].unsqueeze(-2)  # [B, h, K, 1], [B, h, 1, V]
        state = state * log_decay[:, t].exp()[..., None, None]
        if strength is not None:
            written = strength[:, t][..., None, None] * (written - key.mT @ state)
        state = state + key * written
        found.append((queries[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(found, dim=1)


def kernel_errors(length: int = 200, heads: int = 2, values: int = 256) -> dict[str, float]:
    """The largest relative error of an output or a gradient, in bf16 against the recurrence in float64."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla

    draw = torch.Generator("cuda").manual_seed(0)
    shape = (2, length, heads)
    normal = lambda *sizes: torch.randn(*shape, *sizes, device="cuda", generator=draw)  # noqa: E731
    queries, keys = (F.normalize(normal(KEYS), dim=-1).bfloat16() for _ in range(2))
    sequence = [queries, keys, normal(values).bfloat16(), -0.1 * normal().abs()]
    found = {}
    for name, given in (("Mamba-2", sequence), ("Gated DeltaNet", [*sequence, normal().sigmoid()])):
        inputs = [t.detach().requires_grad_() for t in given]
        exact = [t.detach().double().requires_grad_() for t in given]
        if name == "Mamba-2":
            y, _ = chunk_simple_gla(*inputs, scale=1.0)
        else:
            y, _ = chunk_gated_delta_rule(*inputs, scale=1.0)
        expected = recurrence(*exact)
        weight = torch.randn(y.shape, device="cuda", generator=draw)
        grads = torch.autograd.grad((y.float() * weight).sum(), inputs)
        pairs = zip((y, *grads), (expected, *torch.autograd.grad((expected * weight).sum(), exact)), strict=True)
        found[name] = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    return found


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

    def __init__(self, config: ModelConfig, state: int = KEYS, head: int = 64) -> None:
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
        self.mixer = GatedDeltaNet(hidden_size=config.width, head_dim=KEYS, num_heads=heads, expand_v=2)
        if config.zero_outputs:
            nn.init.zeros_(self.mixer.o_proj.weight)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> tuple[Tensor, LayerState]:
        mixed, after = super().forward(x, state, keep_state)
        return self.feedforward(mixed), after
