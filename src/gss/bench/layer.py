"""One GSS layer, and its state-space part alone, forward and backward: time, memory and error, beside a peer.

On a CPU in float32; on a GPU in bf16 autocast, with our kernels and without. Correctness comes first: every path's
output and gradients are compared with float64 ones, and a peer's output with ours; where they differ nothing is
reported.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gss.bench.check import Errors, autocast, joint_error, limited, paths, relative_error
from gss.bench.measure import intervals, median_seconds, peak_bytes, release
from gss.bench.peers import PYPI_GSS, pypi_gss
from gss.bench.results import Row, missing
from gss.config import ModelConfig
from gss.nn.gss import GSSLayer
from gss.ops import fast

PARTS = ("state space", "layer")
_CHECKED = 2048
"""Tokens of a row that a CPU's errors are taken over."""


@dataclass(frozen=True)
class Setting:
    """What is measured: a part of a layer at one shape, on one device."""

    part: str
    config: ModelConfig
    batch: int
    length: int
    device: torch.device
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.part}, {self.batch}×{self.length}"


def bench_layer(
    *,
    config: ModelConfig,
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    peers: Sequence[str] = (),
    compiled: bool = False,
    use_fast: bool = True,
    repeats: int = 5,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Both parts at every (batch, length), with and without our kernels where there are any; `report` says what runs.

    The only peer that has such a layer is PyPI's (`pypi-gss`).
    """
    unknown = [peer for peer in peers if peer != "pypi-gss"]
    if unknown:
        raise ValueError(f"{unknown[0]!r} has no such layer to measure beside: the one peer here is pypi-gss")
    rows: list[Row] = []
    for part in PARTS:
        for batch, length in shapes:
            setting = Setting(part, config, batch, length, device, compiled)
            report(str(setting))
            rows += _measure(setting, bool(peers), use_fast, repeats)
            release(device)
    return rows


def _measure(setting: Setting, beside_peer: bool, use_fast: bool, repeats: int) -> list[Row]:
    device = setting.device
    with paths(use_fast):
        kernels = fast.usable(device)
    ways = {"fast": True, "plain": False} if kernels else {"plain": False}
    first = next(iter(ways))
    rows = [
        Row(f"error of {setting}, {what}, {way}", error.measured, "relative error", error.limit)
        for way, on in ways.items()
        for what, error in _errors(setting, on)
    ]
    contestants: dict[str, _Contestant] = {way: _Contestant(setting, use_fast=on) for way, on in ways.items()}
    if beside_peer:
        try:
            contestants["pypi-gss"] = _Contestant(setting, use_peer=True)
        except ValueError as refusal:
            rows.append(missing(f"{setting}, pypi-gss", "ms", str(refusal)))
        else:
            difference = _difference(contestants[first].forward(), contestants["pypi-gss"].forward())
            if not difference < (5e-2 if device.type == "cuda" else 1e-4):
                raise ValueError(f"{setting}: ours and {PYPI_GSS} differ by {difference:.1e}")
    memory = {name: _memory(setting, contestant) for name, contestant in contestants.items()}
    if device.type == "cuda":
        seconds = {name: statistics.median(intervals(run, repeats, device)) for name, run in contestants.items()}
    else:
        seconds = median_seconds(contestants, repeats)
    rival = "pypi-gss" if "pypi-gss" in contestants else "plain"
    for name in contestants:
        time = Row(f"{setting}, {name}", 1e3 * seconds[name], "ms")
        size = Row(f"peak memory of {setting}, {name}", memory[name] / 2**20, "MiB")
        if name == first != rival:
            time = time.beside(rival, 1e3 * seconds[rival])
            size = size.beside(rival, memory[rival] / 2**20)
        rows += [time, size]
    return rows


class _Contestant:
    """A layer (or its state space) with fixed weights, input and output gradient; calling it is one training pass."""

    def __init__(self, setting: Setting, use_fast: bool = False, use_peer: bool = False, precise: bool = False) -> None:
        torch.manual_seed(0)
        self.device, self.use_fast, self.ours, self.precise = setting.device, use_fast, not use_peer, precise
        layer = GSSLayer(setting.config)
        width = setting.config.width if setting.part == "layer" else setting.config.channels
        self.input = torch.randn(setting.batch, setting.length, width)
        self.gradient = torch.randn_like(self.input)
        self.module: nn.Module = layer if setting.part == "layer" else layer.state_space
        if use_peer:
            peer = pypi_gss(layer)
            peer.dss.norm = peer.dss.norm if setting.part == "layer" else nn.Identity()
            self.module = peer if setting.part == "layer" else peer.dss
        dtype = torch.float64 if precise else torch.float32
        self.module.to(self.device, dtype)
        self.input = self.input.to(self.device, dtype).requires_grad_()
        self.gradient = self.gradient.to(self.device, dtype)
        if setting.compiled and self.ours and setting.part == "layer" and not precise:
            self.module.compile()

    def forward(self) -> Tensor:
        with (
            paths(self.use_fast),
            torch.autocast(self.device.type, enabled=False) if self.precise else autocast(self.device),
        ):
            return self.module(self.input, keep_state=False)[0] if self.ours else self.module(self.input)

    def __call__(self) -> None:
        self.module.zero_grad()
        self.input.grad = None
        output = self.forward()
        with paths(self.use_fast):
            output.backward(self.gradient.to(output.dtype))

    def results(self) -> tuple[Tensor, list[Tensor]]:
        """The output, and the gradients of the input and of every parameter."""
        output = self.forward()
        wanted = [self.input, *self.module.parameters()]
        with paths(self.use_fast):
            return output.detach(), list(torch.autograd.grad(output, wanted, self.gradient.to(output.dtype)))


def _errors(setting: Setting, use_fast: bool) -> Iterator[tuple[str, Errors]]:
    """Errors of one path against float64, each refused where it is too large; short and narrow batches are enough."""
    length = setting.length if setting.device.type == "cuda" else min(setting.length, _CHECKED)
    small = Setting(setting.part, setting.config, min(2, setting.batch), length, setting.device)
    exact_output, exact_gradients = _Contestant(small, precise=True).results()
    found = [_Contestant(small, use_fast=on).results() for on in dict.fromkeys((use_fast, False))]
    two = [
        (
            relative_error(out, exact_output),
            relative_error(g[0], exact_gradients[0]),
            joint_error(g[1:], exact_gradients[1:]),
        )
        for out, g in found
    ]
    for i, what in enumerate(("output", "gradient of the input", "gradients of the parameters")):
        errors = limited(two[0][i], two[-1][i], setting.device)
        yield what, errors.demand(f"{small}: the {what}" if i < 2 else f"{small}: all {what}")


def _memory(setting: Setting, contestant: _Contestant) -> int:
    """How far one pass raises the peak memory: of the GPU, or of a new process."""
    device = setting.device
    if device.type != "cuda":
        return peak_bytes(_Contestant, setting, contestant.use_fast, not contestant.ours)
    contestant()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    contestant()
    return torch.cuda.max_memory_allocated(device) - before


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
