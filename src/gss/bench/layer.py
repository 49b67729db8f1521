"""One GSS layer, and its state-space part alone, forward and backward: time and memory, beside a peer.

Correctness comes first: where the peer's output differs from ours, nothing is reported.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gss.bench.measure import median_seconds, peak_bytes
from gss.bench.peers import PYPI_GSS, pypi_gss
from gss.config import ModelConfig, StateSpaceConfig
from gss.nn.gss import GSSLayer

SHAPES = ((2, 4096), (1, 65_536))
PARTS = ("state space", "layer")


@dataclass(frozen=True)
class Row:
    """One measurement; peer fields are None when no peer ran."""

    part: str
    batch: int
    length: int
    seconds: float
    peak_bytes: int
    peer_seconds: float | None = None
    peer_peak_bytes: int | None = None
    error: float | None = None
    """Largest difference from the peer's output, relative to its largest value."""

    @property
    def speedup(self) -> float | None:
        """The peer's time over ours."""
        return self.peer_seconds / self.seconds if self.peer_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the ratio."""
        return {**asdict(self), "speedup": self.speedup}


def bench_layer(
    *,
    width: int = 512,
    gate_width: int = 2048,
    channels: int = 128,
    modes: int = 256,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    peer: bool = True,
    repeats: int = 5,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Measure both parts at every (batch, length) in float32 on the CPU; `report` is told what runs."""
    sizes = (width, gate_width, channels, modes)
    rows = []
    for part in PARTS:
        for batch, length in shapes:
            report(f"{part}, batch {batch}, length {length:,}")
            rows.append(_measure(part, sizes, batch, length, peer, repeats))
    return rows


def _measure(part: str, sizes: tuple[int, ...], batch: int, length: int, peer: bool, repeats: int) -> Row:
    ours = _Contestant(part, sizes, batch, length, use_peer=False)
    contestants: dict[str, Callable[[], Any]] = {"ours": ours}
    error = peer_peak = None
    if peer:
        theirs = _Contestant(part, sizes, batch, length, use_peer=True)
        error = _difference(ours.forward(), theirs.forward())
        if not error < 1e-4:
            raise ValueError(f"{part} at batch {batch}, length {length}: ours and {PYPI_GSS} differ by {error:.1e}")
        contestants["peer"] = theirs
        peer_peak = peak_bytes(_Contestant, part, sizes, batch, length, True)
    own_peak = peak_bytes(_Contestant, part, sizes, batch, length, False)
    seconds = median_seconds(contestants, repeats)
    return Row(part, batch, length, seconds["ours"], own_peak, seconds.get("peer"), peer_peak, error)


class _Contestant:
    """A layer (or its state space) with fixed weights, input and output gradient; calling it is one training pass."""

    def __init__(self, part: str, sizes: tuple[int, ...], batch: int, length: int, use_peer: bool) -> None:
        torch.manual_seed(0)
        width, gate_width, channels, modes = sizes
        config = ModelConfig(
            width=width,
            gate_width=gate_width,
            channels=channels,
            norm_epsilon=1e-5,
            state_space=StateSpaceConfig(modes=modes),
        )
        layer = GSSLayer(config)
        self.input = torch.randn(batch, length, width if part == "layer" else channels, requires_grad=True)
        self.gradient = torch.randn_like(self.input)
        self.module: nn.Module = layer if part == "layer" else layer.state_space
        self.ours = not use_peer
        if use_peer:
            peer = pypi_gss(layer)
            peer.dss.norm = peer.dss.norm if part == "layer" else nn.Identity()
            self.module = peer if part == "layer" else peer.dss

    def forward(self) -> Tensor:
        return self.module(self.input, keep_state=False)[0] if self.ours else self.module(self.input)

    def __call__(self) -> None:
        self.module.zero_grad()
        self.input.grad = None
        self.forward().backward(self.gradient)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
