"""A GSS layer inside another model: here a classifier of signals that uses the layer as its memory.

A layer maps [batch, length, width] to the same shape and returns the state, so the sequence may come in pieces.

    python examples/layer_inside.py --steps 100
"""

import argparse

import torch
from torch import Tensor, nn

import gss
from gss.model import build_layer


class Classifier(nn.Module):
    """Which way a pulse at the start of a noisy signal went, decided after its last sample."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        config = gss.ModelConfig(
            width=width, gate_width=2 * width, channels=16, state_space=gss.StateSpaceConfig(modes=16)
        )
        self.into = nn.Linear(1, width)
        self.memory = build_layer("gss", config)
        self.out = nn.Linear(width, 2)

    def forward(self, signal: Tensor, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        x, state = self.memory(self.into(signal.unsqueeze(-1)), state)
        return self.out(x[:, -1]), state


def signals(count: int, length: int = 200) -> tuple[Tensor, Tensor]:
    """A pulse up or down at the start, and noise to the end."""
    which, signal = torch.randint(2, (count,)), 0.3 * torch.randn(count, length)
    signal[:, :5] += 2.0 * which[:, None] - 1
    return signal, which


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(options.steps):
    signal, which = signals(32)
    loss = nn.functional.cross_entropy(model(signal)[0], which)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
with torch.no_grad():
    signal, which = signals(500)
    whole, _ = model(signal)
    _, state = model(signal[:, :150])  # the same signal in two pieces
    pieces, _ = model(signal[:, 150:], state)
    right = (whole.argmax(1) == which).float().mean().item()
    print(f"{right:.0%} right; in pieces the same to {(whole - pieces).abs().max().item():.0e}")
