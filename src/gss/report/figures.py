"""The figures of a report: training curves, scores by length, and how long the state spaces remember.

The initial state spaces are reconstructed: like training, this seeds torch with the run's seed and builds the model.
All figures are drawn within `theme.style()`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gss.evaluation import Evaluation, PositionLoss
from gss.model import LanguageModel, build_model
from gss.nn.state_space import StateSpace
from gss.paper import PERPLEXITY
from gss.report.runs import RunRecord, Scores
from gss.report.theme import LIGHT, layer_colours, legend, logarithmic, run_colour, tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
KERNEL_LENGTH = 4096
_ROWS = 12  # layers in a figure at most
_POINTS = 400  # drawn of a line at most
_DOTS: dict[str, Any] = {"marker": "o", "markersize": 5}
_HELD_OUT: dict[str, Any] = {
    **_DOTS, "linestyle": "--", "linewidth": 1.1, "markerfacecolor": LIGHT["card"], "markeredgewidth": 1.5
}  # fmt: skip
_PAPER: dict[str, Any] = {"linestyle": ":", "marker": "s", "markersize": 3.5, "linewidth": 1.2}
_COLUMNS = {
    "loss": ("Loss", "loss (nats per token)", "Faint: every step; strong: running mean; "),
    "learning_rate": (
        "Learning rate", "learning rate", "Base rate. State-space parameters have a constant rate of their own."
    ),
    "gradient_norm": ("Gradient norm", "gradient norm", "Norm of all gradients together, before clipping."),
    "tokens_per_second": (
        "Speed", "tokens per second", "Training tokens per second, without evaluations and checkpoints."
    ),
}  # fmt: skip
"""Title, axis label and caption by metric."""


@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption."""

    name: str  # for ids
    title: str
    caption: str
    figure: "Figure"


def _axes(x_label: str, y_label: str, height: float = 3.1) -> "Axes":
    from matplotlib.figure import Figure

    axes: Axes = Figure(figsize=(4.7, height)).subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return axes


def _picture(name: str, title: str, caption: str, axes: "Axes") -> Picture:
    figure = axes.get_figure(root=True)
    assert figure is not None
    legend(figure)
    return Picture(name, title, caption, figure)


def training_pictures(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> list[Picture]:
    """Loss, learning rate, gradient norm and speed by step, where any run has them."""
    return [_by_step(runs, scored, column) for column in _COLUMNS] if any(run.training for run in runs) else []


def _by_step(runs: Sequence[RunRecord], scored: Sequence[Scores], column: str) -> Picture:
    title, label, caption = _COLUMNS[column]
    axes = _axes("step", label)
    settled: list[float] = []  # sets the range, so that the high losses of the first steps do not flatten the rest
    held_out = False
    for index, (run, score) in enumerate(zip(runs, scored, strict=True)):
        rows = [row for row in run.training if row.get(column) is not None]
        if not rows:
            continue
        at, values = (np.array([row[name] for row in rows], float) for name in ("step", column))
        every = -(-len(rows) // _POINTS)
        drawn = slice((len(rows) - 1) % every, None, every)  # the last point among them
        if column in ("loss", "gradient_norm"):
            axes.plot(at[drawn], values[drawn], color=run_colour(index), linewidth=0.7, alpha=0.3)
            smooth = _smoothed(values)
            settled += [values[len(rows) // 20 :].min(), smooth[len(rows) // 20 :].max()]
            values = smooth
        axes.plot(at[drawn], values[drawn], color=run_colour(index), label=run.name)
        points = _held_out_points(run, score) if column == "loss" else {}
        if points:
            held_out = True
            settled += points.values()
            axes.plot([*points], [*points.values()], color=run_colour(index), **_HELD_OUT)
    low, high = (min(settled), max(settled)) if settled else (0.0, 0.0)
    if column == "loss":
        caption += "circles: held-out data at the training length." if held_out else "no evaluation during training."
        if high > low:
            axes.set_ylim(low - 0.04 * (high - low), high + 0.12 * (high - low))
    axes.xaxis.set_major_formatter(tokens)
    if column == "gradient_norm" and high > 20 * low:
        logarithmic(axes.yaxis)
    if column == "tokens_per_second":
        axes.yaxis.set_major_formatter(tokens)
        axes.set_ylim(bottom=0)
    return _picture(column.replace("_", "-"), title, caption, axes)


def _held_out_points(run: RunRecord, score: Scores) -> dict[int, float]:
    """Step → loss at the training length: the run's own evaluations, and the report's at the end."""
    lengths = {row["length"] for row in run.held_out}
    wanted = min(lengths, key=lambda length: abs(length - (run.length or 0)), default=None)
    points = {row["step"]: row["loss"] for row in run.held_out if row["length"] == wanted}
    own = [row.loss for row in score.result.rows if row.length == run.length] if score.result else []
    if own and run.loaded:
        points.setdefault(run.loaded.step, own[0])
    return dict(sorted(points.items()))


def _smoothed(values: Array) -> Array:
    """A running mean over about a twentieth of the steps, unbiased at the beginning."""
    keep = 1 - 1 / max(2.0, len(values) / 40)
    mean = weight = 0.0
    out = np.empty_like(values)
    for index, value in enumerate(values):
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        out[index] = mean / weight
    return out


def length_pictures(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> list[Picture]:
    """Perplexity by length, with the paper's for the same preset dotted; and loss by position in the window."""
    known = [(i, run, score.result) for i, (run, score) in enumerate(zip(runs, scored, strict=True)) if score.result]
    trained = {run.length for run in runs}
    mark = trained.pop() if len(trained) == 1 else None
    dashed = " Dashed: the training length." if mark else ""
    curves: list[tuple[dict[int, float], int, str, dict[str, Any]]] = []
    for index, run, result in known:
        rows = {row.length: row.perplexity for row in result.rows if row.length}
        if rows:
            curves.append((rows, index, run.name, _DOTS))
            curves += [(p, index, f"paper, {name}", _PAPER) for name, p in PERPLEXITY.get(run.preset, {}).items()]
    pictures = []
    if curves:
        axes = _axes("evaluation length (tokens)", "perplexity per token")
        for points, index, label, look in curves:
            axes.plot([*points], [*points.values()], color=run_colour(index), label=label, **look)
        values = [value for points, *_ in curves for value in points.values()]
        low, high = min(values), max(values)
        logarithmic(axes.xaxis)
        ticks = sorted({length for points, *_ in curves for length in points})
        axes.set_xticks(ticks, [length_name(length) for length in ticks])
        axes.set_xticks([], minor=True)
        if high > 5 * low:
            logarithmic(axes.yaxis)
        else:
            room = max(0.12 * (high - low), (0.12 * low - (high - low)) / 2)  # small differences should not look large
            axes.set_ylim(low - room, high + room)
        _mark(axes, mark)
        caption = f"The same tokens count at every length.{dashed}"
        pictures.append(_picture("length", "Perplexity by length", caption, axes))
    if any(row.by_position for _, _, result in known for row in result.rows):
        axes = _axes("position in the window (tokens)", "loss (nats per token)")
        for index, run, result in known:
            bins = _positions(result)
            middles = [math.sqrt((part.start + 1) * part.stop) for part in bins]
            axes.plot(middles, [part.loss for part in bins], color=run_colour(index), label=run.name, **_DOTS)
        logarithmic(axes.xaxis)
        _mark(axes, mark)
        caption = f"How much more context helps, in bins of doubling size.{dashed}"
        pictures.append(_picture("position", "Loss by position", caption, axes))
    return pictures


def _mark(axes: "Axes", place: int | None) -> None:
    """A dashed line at the training length."""
    if place is not None:
        axes.axvline(place, color=LIGHT["before"], linestyle="--", linewidth=1, zorder=0)


def _positions(result: Evaluation) -> list[PositionLoss]:
    """For each bin, the loss at the length with the most tokens in it."""
    found = sorted((part for row in result.rows for part in row.by_position), key=lambda part: part.tokens)
    best = {part.start: part for part in found}  # the last of each
    return [best[start] for start in sorted(best)]


def length_name(length: int | None) -> str:
    """A length as the paper writes it, 512, 4k, 65k; None is a whole document."""
    return "whole" if length is None else f"{length}" if length < 1000 else f"{length // 1000}k"


def context_pictures(runs: Sequence[RunRecord]) -> list[Picture]:
    """The loss of the same targets by the true tokens before them, for runs that `gss probe` has measured."""
    probed = [(index, run) for index, run in enumerate(runs) if run.probe]
    if not probed:
        return []
    axes = _axes("true tokens before the targets", "loss (nats per token)")
    effective = []
    for index, run in probed:
        for way, label, look in (("replaced", run.name, _DOTS), ("fresh", None, {"linestyle": ":", "linewidth": 1.2})):
            rows = run.probe.get(way) or []
            contexts, losses = [row["context"] for row in rows], [row["loss"] for row in rows]
            axes.plot(contexts, losses, color=run_colour(index), label=label, **look)
        found = run.probe.get("effective_context")
        effective.append(f"{run.name}: " + (f"{found:,} tokens" if found else "none"))
    logarithmic(axes.xaxis)
    axes.xaxis.set_major_formatter(tokens)
    caption = (
        "The same targets everywhere. Strong: windows of equal length, filled up with another document's "
        f"tokens; dotted: read from a fresh start. Effective context, {'; '.join(effective)}."
    )
    return [_picture("context", "How far back it looks", caption, axes)]


@dataclass(frozen=True)
class StateSpaceRecord:
    """One state space."""

    name: str  # `3`, or `3b` where a layer has several
    time_constants: Array  # −1/Re λ, tokens until a mode has decayed to 1/e: [N], or [H·N] with a Δ per channel
    taps: Array  # the impulse response of each channel, [H, L]


def state_spaces(run: RunRecord) -> tuple[list[StateSpaceRecord], list[StateSpaceRecord]]:
    """The state spaces of a run's newest checkpoint, and the initial ones. Empty without weights or state spaces; the
    initial ones are also empty if they are not the seed's: the run was imported, or began with trained weights."""
    now = records(run.loaded.model) if run.loaded else []
    # An imported model may differ from its seed's (a larger vocabulary shifts every later random draw).
    drawn = bool(now) and "seed" in run.config and run.environment and not run.config.get("start")
    return now, records(build_model(run.model_config, run.config["seed"])) if drawn else []


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
    """Time constants and the reach of kernels; `name` makes the figures' ids unique."""
    count = len(now)
    rows = sorted({round(float(i)) for i in np.linspace(0, count - 1, min(count, _ROWS))})
    left_out = "" if len(rows) == count else f" Shows {len(rows)} of {count} state spaces."
    then = [start[index] for index in rows] if start else []
    chosen, colours = [now[index] for index in rows], [layer_colours(count)[index] for index in rows]
    caption = f"How long modes last{' (filled: now; outline: initially)' if start else ''}.{left_out}"
    constants = _time_constants(chosen, then, colours)
    lasting = _picture(f"{name}-time-constants", "Time constants by layer", caption, constants)
    caption = f"Effect of an input on the output this many tokens later, over all channels of a layer.{left_out}"
    return [lasting, _picture(f"{name}-reach", "How far back layers look", caption, _reach(chosen, then, colours))]


def _time_constants(now: list[StateSpaceRecord], start: list[StateSpaceRecord], colours: list[str]) -> "Axes":
    """Histograms, a row per layer: initial values in outline, present ones filled."""
    axes = _axes("time constant −1/Re λ (tokens)", "layer, share of its modes", max(3.3, 0.9 + 0.21 * len(now)))
    every = [space.time_constants for space in (*now, *start)]
    edges = np.geomspace(0.95 * min(map(np.min, every)), 1.05 * max(map(np.max, every)), 33)

    def shares(space: StateSpaceRecord) -> Array:
        return np.histogram(space.time_constants, edges)[0] / len(space.time_constants)

    scale = 0.86 / max(shares(space).max() for space in (*now, *start))
    for base, index in enumerate(reversed(range(len(now)))):
        filled: dict[str, Any] = {"color": colours[index], "fill": True, "alpha": 0.75, "zorder": 2}
        axes.stairs(base + scale * shares(now[index]), edges, baseline=base, **filled)
        if start:
            outline: dict[str, Any] = {"color": LIGHT["ink"], "label": "start", "linewidth": 0.9, "zorder": 3}
            axes.stairs(base + scale * shares(start[index]), edges, baseline=base, **outline)
    logarithmic(axes.xaxis)
    axes.set_yticks(range(len(now)), [space.name for space in reversed(now)])
    axes.set_ylim(-0.08, len(now))
    return axes


def _reach(now: list[StateSpaceRecord], start: list[StateSpaceRecord], colours: list[str]) -> "Axes":
    """Root mean square of the kernels over channels, by lag."""
    axes = _axes("tokens back", "size of the kernel (RMS)", 3.3)
    edges = np.unique(np.round(np.geomspace(1, now[0].taps.shape[1], 49)).astype(int)).tolist()
    middles = [np.sqrt(low * (high - 1)) for low, high in pairwise(edges)]

    def energy(space: StateSpaceRecord) -> Array:
        squares = (space.taps**2).mean(0)
        return np.array([np.sqrt(squares[low:high].mean()) for low, high in pairwise(edges)])

    heights = [energy(space) for space in (*start, *now)]
    for before in heights[: len(start)]:
        axes.plot(middles, before, color=LIGHT["before"], label="start", linewidth=1, linestyle="--")
    named = range(len(now)) if len(now) <= 4 else (0, len(now) // 2, len(now) - 1)
    for index, (space, height) in enumerate(zip(now, heights[len(start) :], strict=True)):
        label = f"layer {space.name}" if index in named else None
        axes.plot(middles, height, color=colours[index], label=label, linewidth=1.5)
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    axes.set_ylim(bottom=max(np.min(heights) / 2, np.max(heights) * 1e-6))
    return axes
