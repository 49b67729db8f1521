"""One GSS layer, and its state space alone, forward and backward: time, memory and error.

On a CPU in float32; on a GPU in bf16 autocast, with and without our kernels. Outputs and gradients of every path are
first compared with float64; if they differ, nothing is reported.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.measurements import Measurement, measurements
from experiments.memory import peak_bytes
from gss.bench.check import Figure, checked
from gss.bench.machine import autocast, intervals, median_seconds, release
from gss.config import ModelConfig
from gss.nn.gss import GSSLayer
from gss.ops import fast

PARTS = ("state space", "layer")
Swap = Callable[[GSSLayer, str], nn.Module]
"""Another implementation of a part of a layer, with its weights."""
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

    def __str__(self) -> str:
        return f"{self.part}, {self.batch}×{self.length}"


def bench_layer(
    config: ModelConfig,
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    rivals: Mapping[str, Swap] | None = None,
    repeats: int = 5,
) -> list[Measurement]:
    """Both parts at every (batch, length), with and without our kernels where there are any."""
    rows: list[Measurement] = []
    for part in PARTS:
        for batch, length in shapes:
            setting = Setting(part, config, batch, length, device)
            rows += _measure(setting, rivals or {}, repeats)
            release(device)
    return rows


def _measure(setting: Setting, rivals: Mapping[str, Swap], repeats: int) -> list[Measurement]:
    device = setting.device
    ways = {"fast": True, "plain": False} if fast.usable(device) else {"plain": False}
    first = next(iter(ways))
    rows = measurements(error for way, on in ways.items() for error in _errors(setting, way, on))
    contestants = {way: TrainingPass(setting, on) for way, on in ways.items()}
    for name, swap in rivals.items():
        try:
            contestants[name] = TrainingPass(setting, False, swap)
        except ValueError as refusal:
            rows.append(Measurement(f"{setting}, {name}", None, "ms", note=str(refusal)))
            continue
        difference = _difference(contestants[first].forward(), contestants[name].forward())
        if not difference < (5e-2 if device.type == "cuda" else 1e-4):
            raise ValueError(f"{setting}: ours and {name} differ by {difference:.1e}")
    memory = {name: _memory(setting, contestant) for name, contestant in contestants.items()}
    if device.type == "cuda":
        seconds = {name: statistics.median(intervals(run, repeats, device)) for name, run in contestants.items()}
    else:
        seconds = median_seconds(contestants, repeats)
    rival = list(contestants)[-1]
    for name in contestants:
        time = Measurement(f"{setting}, {name}", 1e3 * seconds[name], "ms")
        size = Measurement(f"peak memory of {setting}, {name}", memory[name] / 2**20, "MiB")
        if name == first != rival:
            time = time.beside(rival, 1e3 * seconds[rival])
            size = size.beside(rival, memory[rival] / 2**20)
        rows += [time, size]
    return rows


class TrainingPass:
    """A layer (or its state space) with fixed weights and inputs; calling it is one forward and backward pass."""

    def __init__(self, setting: Setting, use_fast: bool, swap: Swap | None = None, precise: bool = False) -> None:
        torch.manual_seed(0)
        self.device, self.use_fast, self.swap, self.precise = setting.device, use_fast, swap, precise
        layer = GSSLayer(setting.config)
        width = setting.config.width if setting.part == "layer" else setting.config.channels
        self.input = torch.randn(setting.batch, setting.length, width)
        self.gradient = torch.randn_like(self.input)
        self.module: nn.Module = layer if setting.part == "layer" else layer.state_space
        if swap is not None:
            self.module = swap(layer, setting.part)
        dtype = torch.float64 if precise else torch.float32
        self.module.to(self.device, dtype)
        self.input = self.input.to(self.device, dtype).requires_grad_()
        self.gradient = self.gradient.to(self.device, dtype)

    def forward(self) -> Tensor:
        """The output."""
        with nullcontext() if self.precise else autocast(self.device):
            return self.module(self.input) if self.swap else self.module(self.input, keep_state=False)[0]

    def __call__(self) -> list[Tensor]:
        """The output, and the gradients with respect to the input and every parameter."""
        self.module.zero_grad()
        self.input.grad = None
        with nullcontext() if self.use_fast else fast.disabled():
            output = self.forward()
            output.backward(self.gradient.to(output.dtype))
        gradients = [tensor.grad for tensor in (self.input, *self.module.parameters())]
        return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _errors(setting: Setting, way: str, use_fast: bool) -> Iterator[Figure]:
    """Errors of one path against float64, each refused where it is too large; short and narrow batches are enough."""
    length = setting.length if setting.device.type == "cuda" else min(setting.length, _CHECKED)
    small = Setting(setting.part, setting.config, min(2, setting.batch), length, setting.device)
    exact = TrainingPass(small, False, precise=True)()
    found = [TrainingPass(small, on)() for on in (use_fast, False)]
    parts = {"output": slice(1), "gradient of the input": slice(1, 2), "gradients of the parameters": slice(2, None)}
    for what, part in parts.items():
        results = (result[part] for result in (*found, exact))
        yield checked(f"error of {setting}, {what}, {way}", f"{small}: the {what}", *results)


def _memory(setting: Setting, contestant: TrainingPass) -> int:
    """How far one pass raises the peak memory: of the GPU, or of a new process."""
    device = setting.device
    if device.type != "cuda":
        return peak_bytes(TrainingPass, setting, contestant.use_fast, contestant.swap)
    contestant()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    contestant()
    return torch.cuda.max_memory_allocated(device) - before


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
