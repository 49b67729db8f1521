"""Figures of a page of results as plain data, and how they are drawn: panels of lines, in the look of reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gss.report.theme import LIGHT, legend, logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Line:
    """Points, joined."""

    x: Any
    y: Any
    colour: str
    label: str = ""
    look: dict[str, Any] = field(default_factory=dict)
    """Whatever else matplotlib is to know: width, style, marker."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    log: str = ""
    """Which axes are logarithmic: "", x, y or xy."""
    x_ticks: Sequence[tuple[float, str]] = ()
    y_ticks: Sequence[tuple[float, str]] = ()
    x_format: Callable[..., str] | None = None
    y_format: Callable[..., str] | None = None
    y_range: tuple[float | None, float | None] = (None, None)
    mark: float | None = None
    """A dashed line at this x."""


@dataclass(frozen=True)
class Picture:
    """A figure and what is said around it."""

    name: str
    """For file names and ids."""
    title: str
    caption: str
    panels: Sequence[Panel]
    """Beside each other."""
    size: tuple[float, float] = (4.7, 3.1)


def draw(picture: Picture) -> "Figure":
    """The figure; to be called, like what saves it, within `theme.style()`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=picture.size)
    row = figure.subplots(1, len(picture.panels), squeeze=False)[0]
    for axes, panel in zip(row, picture.panels, strict=True):
        _draw_panel(axes, panel)
    legend(figure)
    return figure


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    for line in panel.lines:
        axes.plot(line.x, line.y, color=line.colour, label=line.label or None, **line.look)
    for which in panel.log:
        logarithmic(getattr(axes, f"{which}axis"))
    for axis, ticks, form in (
        (axes.xaxis, panel.x_ticks, panel.x_format),
        (axes.yaxis, panel.y_ticks, panel.y_format),
    ):
        if ticks:
            axis.set_major_locator(FixedLocator([place for place, _ in ticks]))
            axis.set_minor_locator(NullLocator())
            axis.set_ticklabels([name for _, name in ticks])
        if form is not None:
            axis.set_major_formatter(form)
    low, high = panel.y_range
    axes.set_ylim(bottom=low, top=high)
    if panel.mark is not None:
        axes.axvline(panel.mark, color=LIGHT["before"], linestyle="--", linewidth=1, zorder=0)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
