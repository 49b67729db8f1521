"""A simulation of the paper's models on many GPUs at 65,536 and at 4M tokens: the tables of docs/scaling.md.

    python -m experiments.scaling                     # fill the page
    python -m experiments.scaling --measure 5         # first measure one and two processes here, and keep the figures

A step is simulated from a device's measured time and memory per token, the bytes that `gss.nn.context` and the
gradients exchange, and the speed of the links. Nothing is assumed to overlap. To check this, the same arithmetic is
applied to this machine's CPU and gloo: from a measured step of one process and the measured speed of the links, it
predicts the step of two processes that share a sequence, which is then measured.
"""

import argparse
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.page import fill
from gss.accounting import account
from gss.config import ModelConfig
from gss.presets import preset

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scaling.md"
MEASURED = ROOT / "benchmarks" / "results" / "scaling-cpu.json"
MODELS = ("gss", "gss-l", "gss-hybrid-l")
GPUS = (8, 64, 512)
BATCHES = ((65_536, 8), (1 << 22, 1), (1 << 22, 8))
"""Length and sequences of a step: the paper's 524,288 tokens, one sequence of 4M, and eight of them."""


@dataclass(frozen=True)
class Links:
    """The links between devices."""

    near: float
    """Bytes per second out of a device to others of its machine."""
    far: float
    """Bytes per second around a ring of several machines."""
    latency: float
    """Seconds per collective, in addition."""
    machine: int = 8
    """Devices per machine."""

    def seconds(self, size: float, ranks: int, collectives: float) -> float:
        """The time of collectives among neighbouring ranks, each of which sends `size` bytes in total."""
        return size / (self.near if ranks <= self.machine else self.far) + collectives * self.latency


@dataclass(frozen=True)
class Device:
    """One model on one device, as measured."""

    seconds: float
    """Per token of a training step."""
    activations: float
    """Bytes per token that are kept for the backward pass."""
    sharing: float
    """The share by which a step is longer if it also computes the state after a stretch."""
    host: float = 0.0
    """The least seconds of a forward pass, or a backward pass, however few its tokens: launching it takes that long."""
    key_bytes: int = 2
    """Bytes per number in attention's keys and values."""


@dataclass(frozen=True)
class Layout:
    """How a step is distributed: `sequences` of `length` tokens in `pieces`, each on `context` of the `ranks`."""

    length: int
    sequences: int
    ranks: int
    context: int
    pieces: int = 1

    @property
    def rows(self) -> float:
        """Sequences per group of ranks that share them."""
        return self.sequences * self.context / self.ranks

    @property
    def tokens(self) -> float:
        """Tokens per rank."""
        return self.sequences * self.length / self.ranks


@dataclass(frozen=True)
class Step:
    """The cost of a step, per device."""

    layout: Layout
    state_bytes: float
    """Bytes sent to pass states."""
    gradient_bytes: float
    compute: float
    state_seconds: float
    gradient_seconds: float
    memory: float

    @property
    def seconds(self) -> float:
        """The time of the whole step."""
        return self.compute + self.state_seconds + self.gradient_seconds


@cache
def parameters_of(config: ModelConfig) -> int:
    """The number of a model's parameters."""
    return account(config).parameters


@cache
def exchanged(config: ModelConfig, key_bytes: int) -> tuple[int, int]:
    """The bytes that the layers of a model exchange per sequence, and the number of tensors, each of which is a
    collective."""
    import torch

    from gss.model import build_layer

    size = tensors = 0
    with torch.device("meta"):
        for kind in config.layers:
            width = key_bytes if kind == "attention" else 4
            slots = [slot for slot in build_layer(kind, config).state_slots().values() if not slot.integer]
            size += width * sum(math.prod(size or 0 for size in slot.shape) for slot in slots)
            tensors += len(slots)
    return size, tensors


def simulate(config: ModelConfig, device: Device, links: Links, layout: Layout) -> Step:
    """One optimizer step with DDP."""
    parameters = parameters_of(config)
    state, tensors = exchanged(config, device.key_bytes)
    again = (layout.pieces - 1) / layout.pieces  # the pieces that are read twice
    passes = layout.pieces * (2 + again) if layout.context > 1 else 0.0
    state_bytes = passes * (layout.context - 1) * state * layout.rows
    gradient_bytes = 2 * (layout.ranks - 1) / layout.ranks * 4 * parameters
    compute = layout.tokens * device.seconds * (1 + again / 3) * (1 + device.sharing * (layout.context > 1))
    compute = max(compute, device.host * layout.pieces * (2 + again))
    kept = state * layout.rows * ((layout.pieces > 1) * layout.pieces + (layout.context > 1) * layout.context)
    return Step(
        layout,
        state_bytes,
        gradient_bytes,
        compute,
        links.seconds(state_bytes, layout.context, passes * tensors),
        links.seconds(gradient_bytes, layout.ranks, 1.0 * (layout.ranks > 1)),
        16 * parameters + device.activations * layout.tokens / layout.pieces + kept,
    )


def best(config: ModelConfig, device: Device, links: Links, batch: tuple[int, int], ranks: int, memory: float) -> Step:
    """The fastest layout that fits in memory."""
    length, sequences = batch
    steps = []
    for exponent in range(ranks.bit_length()):
        context = 1 << exponent
        if sequences * context % ranks:
            continue
        for pieces in (1 << p for p in range(12)):
            step = simulate(config, device, links, Layout(length, sequences, ranks, context, pieces))
            if step.memory <= memory:
                steps.append(step)
                break
    return min(steps, key=lambda step: step.seconds)


# An H200 (141 GB) with NVLink, 450 GB/s in each direction, in machines of eight with a port of 400 Gbit/s for each GPU.
# Groups of consecutive ranks fill machines, so that a ring leaves one by all of its ports. Of both, 80% is reached.
H200_MEMORY = 130e9
H200_LINKS = Links(near=0.8 * 450e9, far=0.8 * 8 * 50e9, latency=30e-6)
# docs/performance.md, the profile of a step: convolution, taps and passing states, 22 of 171 ms.
H200_SHARING = 22 / 171
# The same page, on prefill: a piece of `gss`, 16 layers, takes the host 40 ms.
H200_HOST = 40e-3


def h200(name: str) -> Device:
    """A model on one H200, from benchmarks/results/h200.json: measured for `gss` at 65,536 tokens and, by its share of
    the matrix rate, for `gss-hybrid-l`; `gss-l` does as `gss` per parameter, and activations grow with the layers.
    """
    kept = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    row = {row["name"]: row["value"] for row in reversed(kept["rows"])}
    base, own = parameters_of(preset("gss")), parameters_of(preset(name))
    rate = row["training gss, L=65536, best batch"] * base / own
    if "hybrid" in name:
        longer = row["training gss, L=65536, best batch"] / row["training gss, L=4096, best batch"]
        peak = kept["ceilings"]["bf16 matmul 8192³, TFLOP/s"] * 1e12
        rate = longer * row["MFU of gss-hybrid-l, L=4096"] * peak / (6 * own)
    layers = preset(name).depth / preset("gss").depth
    activations = (row["peak memory of gss, 16×4096"] * 1e9 - 16 * base) / 65_536
    return Device(1 / rate, activations * layers, H200_SHARING, H200_HOST * layers)


def table() -> str:
    """The table of simulated steps."""
    lines = [
        "| model | length × sequences | GPUs | context × data, pieces | states, GB | gradients, GB | compute, ms "
        "| states, ms | gradients, ms | step, ms | tokens/s | of ideal | memory, GB |",
        "|---|---:|---:|---|" + "---:|" * 9,
    ]
    for name in MODELS:
        device = h200(name)
        for batch in BATCHES:
            for ranks in GPUS if batch[1] * batch[0] <= 1 << 22 else GPUS[-1:]:
                step = best(preset(name), device, H200_LINKS, batch, ranks, H200_MEMORY)
                lines.append(f"| {name} | {' | '.join(_cells(step, device))} |")
    return "\n".join(lines)


def _cells(step: Step, device: Device) -> list[str]:
    layout = step.layout
    seconds = (step.compute, step.state_seconds, step.gradient_seconds, step.seconds)
    tokens = layout.length * layout.sequences
    return [
        f"{layout.length:,} × {layout.sequences}",
        str(layout.ranks),
        f"{layout.context} × {layout.ranks // layout.context}, {layout.pieces}",
        *(f"{size / 1e9:.2f}" for size in (step.state_bytes, step.gradient_bytes)),
        *(f"{1e3 * part:,.1f}" for part in seconds),
        f"{tokens / step.seconds / 1e6:,.1f}M",
        f"{tokens * device.seconds / layout.ranks / step.seconds:.0%}",
        f"{step.memory / 1e9:.0f}",
    ]


def check(measured: dict[str, Any]) -> str:
    """Predicted and measured steps of two processes: from one process on all of the sequence, and on half of it."""
    lines = [
        "| model, length | one process, s | two that share it: predicted, s | measured, s | measured ÷ predicted "
        "| exchanges: predicted, s | states sent: predicted, bytes | measured, bytes |",
        "|---|---:|---|---:|---|" + "---:|" * 3,
    ]
    links = Links(**measured["links"])
    for row in measured["rows"]:
        sharing = row["shared_alone"] / row["half"] - 1
        rates = (row["alone"] / row["length"], 2 * row["half"] / row["length"])
        layout = Layout(row["length"], 1, 2, 2)
        steps = [
            simulate(preset(row["model"]), Device(rate, 0.0, sharing, key_bytes=4), links, layout) for rate in rates
        ]
        cells = [
            f"`{row['model']}`, {row['length']:,}",
            f"{row['alone']:.2f}",
            ", ".join(f"{step.compute:.2f}" for step in steps),
            f"{row['shared']:.2f}",
            ", ".join(f"{row['shared'] / step.compute:.2f}" for step in steps),
            f"{steps[0].state_seconds + steps[0].gradient_seconds:.2f}",
            f"{steps[0].state_bytes:,.0f}",
            f"{row['state_bytes']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def links_text(measured: dict[str, Any]) -> str:
    """The speed of gloo on this machine."""
    links = Links(**measured["links"])
    return (
        f"gloo between two processes here: {links.near / 1e9:.2f} GB/s and {links.latency * 1e3:.2f} ms per collective."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="REPEATS", help="measure here first, the least of so many steps")
    arguments = parser.parse_args()
    if arguments.measure:
        from experiments.scaling_check import measure

        MEASURED.write_text(json.dumps(measure(arguments.measure), indent=2) + "\n")
    measured = json.loads(MEASURED.read_text())
    parts = {"scaling": table, "check": lambda: check(measured), "links": lambda: links_text(measured)}
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")
    print(f"filled {PAGE}")


if __name__ == "__main__":
    main()
