"""What a model's state spaces remember: how long their modes last and how far back their kernels reach.

At the start and now. The start is drawn again: training seeds torch with the run's seed and builds the model, and so
does this. Models without state spaces have none of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from gss.model import LanguageModel, build_model
from gss.nn.state_space import StateSpace
from gss.report.figures import Line, Panel, Picture
from gss.report.runs import RunRecord
from gss.report.theme import LIGHT, layer_colours

KERNEL_LENGTH = 4096
_ROWS = 12  # layers in a figure at most
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StateSpaceRecord:
    """One state space."""

    name: str
    """`3`, or `3b` where a layer has several."""
    time_constants: Array
    """−1/Re λ, the tokens after which a mode has faded to 1/e: [N], or H·N where each channel has its own Δ."""
    taps: Array
    """What each channel still adds after each number of tokens, [H, L]."""


def state_spaces(run: RunRecord) -> tuple[list[StateSpaceRecord], list[StateSpaceRecord]]:
    """Those of a run's newest checkpoint, and of its start; empty without weights or state spaces, and the start where
    it cannot be drawn again: the folder has no seed, or the run was imported."""
    now = records(run.loaded.model) if run.loaded else []
    # What was imported may have changed on the way (a grown vocabulary moves every later draw).
    trained_here = bool(now) and "seed" in run.config and run.environment
    return now, records(build_model(run.model_config, run.config["seed"])) if trained_here else []


@torch.no_grad()
def records(model: LanguageModel, length: int = KERNEL_LENGTH) -> list[StateSpaceRecord]:
    """Every state space of a model, first to last."""
    found = []
    for number, layer in enumerate(model.sequence_layers(), 1):
        inside = [module for module in layer.modules() if isinstance(module, StateSpace)]
        for index, space in enumerate(inside):
            name = f"{number}{'abcdef'[index] if len(inside) > 1 else ''}"
            constants = space.time_constants().double().cpu().numpy()
            found.append(StateSpaceRecord(name, constants, space.responses(length).double().cpu().numpy()))
    return found


def memory_pictures(name: str, now: Sequence[StateSpaceRecord], start: Sequence[StateSpaceRecord]) -> list[Picture]:
    """Time constants and the reach of kernels; `name` keeps the figures apart from other runs'."""
    count = len(now)
    rows = sorted({round(float(i)) for i in np.linspace(0, count - 1, min(count, _ROWS))})
    left_out = "" if len(rows) == count else f" {len(rows)} of {count} state spaces are drawn."
    then = [start[index] for index in rows] if start else []
    chosen, colours = [now[index] for index in rows], [layer_colours(count)[index] for index in rows]
    caption = f"How long modes last, filled now{', in outline at the start' if start else ''}.{left_out}"
    size = (4.7, max(3.3, 0.9 + 0.21 * len(rows)))
    constants = _time_constants(chosen, then, colours)
    lasting = Picture(f"{name}-time-constants", "Time constants by layer", caption, [constants], size)
    caption = f"What an input still adds to the output this many tokens later, over all channels of a layer.{left_out}"
    reach = _reach(chosen, then, colours)
    return [lasting, Picture(f"{name}-reach", "How far back layers look", caption, [reach], (4.7, 3.3))]


def _time_constants(now: list[StateSpaceRecord], start: list[StateSpaceRecord], colours: list[str]) -> Panel:
    """Histograms, a row per layer: the start in outline, now filled."""
    every = [space.time_constants for space in (*now, *start)]
    edges = np.geomspace(0.95 * min(map(np.min, every)), 1.05 * max(map(np.max, every)), 33)

    def shares(space: StateSpaceRecord) -> Array:
        return np.histogram(space.time_constants, edges)[0] / len(space.time_constants)

    scale = 0.86 / max(shares(space).max() for space in (*now, *start))
    lines, ticks = [], []
    for base, index in enumerate(reversed(range(len(now)))):
        filled = {"baseline": base, "fill": True, "alpha": 0.75, "zorder": 2}
        lines.append(Line(edges, base + scale * shares(now[index]), colours[index], look=filled))
        ticks.append((base, now[index].name))
        if start:
            outline = {"baseline": base, "linewidth": 0.9, "zorder": 3}
            lines.append(Line(edges, base + scale * shares(start[index]), LIGHT["ink"], "start", outline))
    x_label, y_label = "time constant −1/Re λ (tokens)", "layer, share of its modes"
    return Panel(x_label, y_label, lines, log="x", y_ticks=ticks, y_range=(-0.08, len(now)))


def _reach(now: list[StateSpaceRecord], start: list[StateSpaceRecord], colours: list[str]) -> Panel:
    """Root mean square of the kernels over channels, by lag."""
    edges = np.unique(np.round(np.geomspace(1, now[0].taps.shape[1], 49)).astype(int)).tolist()
    middles = [np.sqrt(low * (high - 1)) for low, high in pairwise(edges)]

    def energy(space: StateSpaceRecord) -> Array:
        squares = (space.taps**2).mean(0)
        return np.array([np.sqrt(squares[low:high].mean()) for low, high in pairwise(edges)])

    dashed = {"linewidth": 1, "linestyle": "--"}
    lines = [Line(middles, energy(space), LIGHT["before"], "start", dashed) for space in start]
    named = range(len(now)) if len(now) <= 4 else (0, len(now) // 2, len(now) - 1)
    for index, space in enumerate(now):
        label = f"layer {space.name}" if index in named else ""
        lines.append(Line(middles, energy(space), colours[index], label, {"linewidth": 1.5}))
    heights = [value for line in lines for value in line.y]
    floor = max(min(heights) / 2, max(heights) * 1e-6)
    return Panel("tokens back", "size of the kernel (RMS)", lines, log="xy", y_range=(floor, None))
