"""Figures of what a model's state spaces remember: where the modes are, how long they last, what kernels they make."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gss.report.curves import Picture, legend_above
from gss.report.memory import Memory, Space
from gss.report.theme import LIGHT, layer_colours, log_axis, power_of_ten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MODES = 360  # drawn in the plane at most
_ROWS = 12  # layers in a figure of rows at most
_KERNELS = 3


def memory_pictures(name: str, memory: Memory) -> list[Picture]:
    """Four figures of a run; `name` keeps their files apart from other runs'."""
    drawn = [_plane(memory), _time_constants(memory), _reach(memory), _kernels(memory)]
    return [Picture(f"{name}-{p.name}", p.title, p.caption, p.figure) for p in drawn]


def _plane(memory: Memory) -> Picture:
    """Λ in the complex plane, both axes logarithmic, each mode joined to where it started."""
    figure = _figure(3.3)
    axes = figure.subplots()
    now, colours = memory.now, layer_colours(len(memory.now))
    each = max(1, _MODES // len(now))
    positive = all((space.log_a.imag > 0).all() for space in now + (memory.start or []))
    total = shown = 0
    for index, space in enumerate(now):
        pick = np.unique(np.linspace(0, len(space.log_a) - 1, each).astype(int))
        total, shown = total + len(space.log_a), shown + len(pick)
        here = space.log_a[pick]
        if memory.start:
            there = memory.start[index].log_a[pick]
            gap = np.full(len(pick), np.nan)
            x, y = (
                np.stack([part(there), part(here), gap], 1).ravel() for part in (lambda a: -a.real, lambda a: a.imag)
            )
            axes.plot(x, y, color=LIGHT["before"], linewidth=0.6, alpha=0.6, zorder=1)
            axes.plot(-there.real, there.imag, linestyle="none", marker="o", markersize=2.4, zorder=2,
                      markerfacecolor="none", markeredgecolor=LIGHT["before"], markeredgewidth=0.7,
                      label=None if index else "start")  # fmt: skip
        label = space.name if index in _named(len(now)) else None
        axes.plot(-here.real, here.imag, linestyle="none", marker="o", markersize=3.4, markeredgewidth=0, zorder=3,
                  color=colours[index], alpha=0.9, label=label)  # fmt: skip
    log_axis(axes, "x")
    axes.invert_xaxis()
    axes.xaxis.set_major_formatter(_negative)
    if positive:
        log_axis(axes, "y")
    axes.set_xlabel("Re λ (1/token; to the right modes last longer)")
    axes.set_ylabel("Im λ (radians a token)")
    legend_above(figure, axes)
    some = "" if shown == total else f" {shown} of the {total:,} modes are drawn."
    moved = " Lines join each mode to its start." if memory.start else ""
    return Picture("spectrum", "Λ in the complex plane", f"Eigenvalues by layer.{moved}{some}", figure)


def _time_constants(memory: Memory) -> Picture:
    """Histograms of −1/Re λ, a row a layer: the start in outline, now filled."""
    rows = _spread(memory.now)
    figure = _figure(max(3.3, 0.9 + 0.21 * len(rows)))
    axes = figure.subplots()
    every = memory.now + (memory.start or [])
    low = min(space.time_constants.min() for space in every)
    high = max(space.time_constants.max() for space in every)
    edges = np.geomspace(low * 0.95, high * 1.05, 33)
    colours = layer_colours(len(memory.now))
    tallest = max(_shares(memory.now[index], edges).max() for index in rows)
    if memory.start:
        tallest = max(tallest, *(_shares(memory.start[index], edges).max() for index in rows))
    scale = 0.86 / tallest
    for row, index in enumerate(rows):
        base = len(rows) - 1 - row
        heights = base + scale * _shares(memory.now[index], edges)
        axes.stairs(heights, edges, baseline=base, fill=True, color=colours[index], alpha=0.75, zorder=2)
        if memory.start:
            before = base + scale * _shares(memory.start[index], edges)
            axes.stairs(before, edges, baseline=base, color=LIGHT["ink"], linewidth=0.9, zorder=3,
                        label=None if row else "start")  # fmt: skip
    log_axis(axes, "x")
    axes.set_yticks(range(len(rows)), [memory.now[index].name.removeprefix("layer ") for index in reversed(rows)])
    axes.grid(visible=False, axis="y")
    axes.set_ylim(-0.08, len(rows))
    axes.set_xlabel("time constant −1/Re λ (tokens)")
    axes.set_ylabel("layer, share of its modes")
    caption = "How long modes last, filled now" + (", in outline at the start." if memory.start else ".")
    return Picture("time-constants", "Time constants by layer", caption + _left_out(memory, rows), figure)


def _reach(memory: Memory) -> Picture:
    """RMS of the kernels by lag."""
    figure = _figure(3.3)
    axes = figure.subplots()
    colours = layer_colours(len(memory.now))
    rows = _spread(memory.now)
    for place, index in enumerate(rows):
        space = memory.now[index]
        if memory.start:
            before = memory.start[index]
            axes.plot(before.lags, before.energy, color=LIGHT["before"], linewidth=1, linestyle="--", zorder=1,
                      label=None if place else "start")  # fmt: skip
        label = space.name if index in _named(len(memory.now)) else None
        axes.plot(space.lags, space.energy, color=colours[index], linewidth=1.5, label=label, zorder=2)
    log_axis(axes, "x")
    log_axis(axes, "y")
    top = axes.get_ylim()[1]
    axes.set_ylim(bottom=max(axes.get_ylim()[0], top * 1e-6))
    axes.set_xlabel("tokens back")
    axes.set_ylabel("size of the kernel (RMS)")
    legend_above(figure, axes)
    caption = "What an input still adds to the output so many tokens later, over all channels of a layer."
    return Picture("reach", "How far back layers look", caption + _left_out(memory, rows), figure)


def _kernels(memory: Memory) -> Picture:
    """The kernel of the channel that looks farthest back in the first, the middle and the last layer."""
    picked = sorted({0, len(memory.now) // 2, len(memory.now) - 1})[:_KERNELS]
    figure = _figure(3.3)
    colours = layer_colours(len(memory.now))
    panels = figure.subplots(len(picked), 1, sharex=True, squeeze=False)[:, 0]
    for axes, index in zip(panels, picked, strict=True):
        space = memory.now[index]
        at = np.arange(1, space.taps.shape[1])  # what the present token adds would dwarf the rest
        if memory.start:
            before = memory.start[index].taps[space.farthest, 1:]
            axes.plot(at, before, color=LIGHT["before"], linewidth=0.9, label="start")
        axes.plot(at, space.taps[space.farthest, 1:], color=colours[index], linewidth=1.2, label="now")
        log_axis(axes, "x")
        axes.locator_params(axis="y", nbins=3)
        axes.set_ylabel(space.name)
        axes.text(0.99, 0.95, f"channel {space.farthest + 1}", transform=axes.transAxes, ha="right", va="top",
                  fontsize=8.5, color=LIGHT["muted"])  # fmt: skip
    panels[-1].set_xlabel("tokens back")
    caption = "K of the channel that has most of it beyond 32 tokens" + (
        "; grey at the start." if memory.start else "."
    )
    return Picture("kernels", "Kernels", caption, figure)


def _shares(space: Space, edges: Any) -> Any:
    counts, _ = np.histogram(space.time_constants, edges)
    return counts / len(space.time_constants)


def _spread(spaces: list[Space]) -> list[int]:
    """All layers, or as many as fit, evenly, first and last among them."""
    return sorted({round(float(i)) for i in np.linspace(0, len(spaces) - 1, min(len(spaces), _ROWS))})


def _left_out(memory: Memory, rows: list[int]) -> str:
    return "" if len(rows) == len(memory.now) else f" {len(rows)} of {len(memory.now)} state spaces are drawn."


def _named(count: int) -> set[int]:
    """Which layers a legend names: all of a few, else the first, the middle and the last."""
    return set(range(count)) if count <= 4 else {0, count // 2, count - 1}


def _negative(value: float, _position: Any = None) -> str:
    return "−" + power_of_ten(value)


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(4.7, height))
