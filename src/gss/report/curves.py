"""Figures over the steps of training and over lengths: a line a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gss.evaluate import Evaluation, PositionLoss
from gss.paper import PERPLEXITY
from gss.report.run import Run
from gss.report.scores import Scores
from gss.report.theme import LIGHT, log_axis, run_colour, tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 400  # drawn of a line at most
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Picture:
    """A figure and what is said around it."""

    name: str
    """For file names and ids."""
    title: str
    caption: str
    figure: "Figure"


def training_pictures(runs: Sequence[Run], scored: Sequence[Scores]) -> list[Picture]:
    """Loss, learning rate, gradient norm and speed by step; those that any run has."""
    if not any(run.training for run in runs):
        return []
    return [
        _loss(runs, scored),
        _by_step(
            runs,
            "learning_rate",
            Picture("rate", "Learning rate", "Base rate; state-space parameters have their own, constant.", _figure()),
            "learning rate",
        ),
        _by_step(
            runs,
            "gradient_norm",
            Picture("gradient", "Gradient norm", "Of all gradients together, before clipping.", _figure()),
            "norm of the gradient",
            log=True,
            smooth=True,
        ),
        _by_step(
            runs,
            "tokens_per_second",
            Picture("speed", "Speed", "Training tokens a second, evaluations and checkpoints left out.", _figure()),
            "tokens a second",
            zero=True,
        ),
    ]


def _loss(runs: Sequence[Run], scored: Sequence[Scores]) -> Picture:
    figure = _figure()
    axes = figure.subplots()
    held_out = False
    low, high = math.inf, -math.inf
    for index, (run, score) in enumerate(zip(runs, scored, strict=True)):
        if not run.training:
            continue
        colour = run_colour(index)
        steps, losses = _column(run.training, "loss")
        smooth = _smoothed(losses)
        axes.plot(*_thinned(steps, losses), color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(*_thinned(steps, smooth), color=colour, label=run.name)
        points = _held_out_points(run, score)
        if points:
            held_out = True
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=5, linestyle="--", linewidth=1.1,
                      markerfacecolor=LIGHT["card"], markeredgewidth=1.5)  # fmt: skip
        # The first steps, far above the rest, would flatten what matters.
        settled = smooth[min(len(smooth) - 1, len(smooth) // 20) :]
        low, high = (
            min([low, losses[len(losses) // 20 :].min(), *(loss for _, loss in points)]),
            max(high, settled.max()),
        )
    if math.isfinite(low) and high > low:
        axes.set_ylim(low - 0.04 * (high - low), high + 0.12 * (high - low))
    _steps_axis(axes)
    axes.set_ylabel("loss (nats a token)")
    legend_above(figure, axes)
    caption = "Every step faint, their running mean strong" + (
        "; circles are held-out data at the training length." if held_out else "; nothing was evaluated on the way."
    )
    return Picture("loss", "Loss", caption, figure)


def _held_out_points(run: Run, score: Scores) -> list[tuple[int, float]]:
    """(step, loss) at the training length: those of the run, and the report's own at its end."""
    lengths = sorted({row["length"] for row in run.held_out})
    wanted = min(lengths, key=lambda length: abs(length - (run.length or 0)), default=None)
    points = [(row["step"], row["loss"]) for row in run.held_out if row["length"] == wanted]
    if score.result and run.loaded and run.loaded.step not in {step for step, _ in points}:
        points += [(run.loaded.step, row.loss) for row in score.result.rows if row.length == run.length]
    return sorted(points)


def _by_step(
    runs: Sequence[Run],
    column: str,
    picture: Picture,
    label: str,
    *,
    log: bool = False,
    smooth: bool = False,
    zero: bool = False,
) -> Picture:
    from matplotlib.ticker import FuncFormatter

    axes = picture.figure.subplots()
    lines = {tuple(_column(run.training, column)[1]) for run in runs}
    same = len(lines) == 1  # as rates often are: those below are drawn wider, to be seen
    for index, run in enumerate(runs):
        steps, values = _column(run.training, column)
        if not len(values):
            continue
        if smooth:
            axes.plot(*_thinned(steps, values), color=run_colour(index), linewidth=0.7, alpha=0.3)
            values = _smoothed(values)
        wider = 1.3 * (len(runs) - 1 - index) if same else 0.0
        axes.plot(*_thinned(steps, values), color=run_colour(index), label=run.name, linewidth=1.8 + wider)
    if log:
        log_axis(axes, "y")
        low, high = axes.get_ylim()
        if high / low < 20:  # too few powers of ten to have ticks
            axes.set_yscale("linear")
    if zero:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(tokens))
    _steps_axis(axes)
    axes.set_ylabel(label)
    legend_above(picture.figure, axes)
    return picture


def length_picture(runs: Sequence[Run], scored: Sequence[Scores]) -> Picture | None:
    """Perplexity by length, the paper's for the same preset dotted."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = _figure()
    axes = figure.subplots()
    lengths: set[int] = set()
    for index, (run, score) in enumerate(zip(runs, scored, strict=True)):
        rows = [row for row in score.result.rows if row.length] if score.result else []
        if not rows:
            continue
        at = [row.length or 0 for row in rows]
        axes.plot(
            at, [row.perplexity for row in rows], color=run_colour(index), marker="o", markersize=5, label=run.name
        )
        lengths |= set(at)
        for corpus, paper in PERPLEXITY.get(run.preset or "", {}).items():
            axes.plot(
                list(paper), list(paper.values()), color=run_colour(index), linestyle=":", marker="s", markersize=3.5,
                linewidth=1.2, label=f"paper, {corpus}",
            )  # fmt: skip
            lengths |= set(paper)
    if not lengths:
        return None
    log_axis(axes, "x")
    axes.xaxis.set_major_locator(FixedLocator(sorted(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(binary))
    axes.margins(x=0.08, y=0.12)
    low, high = axes.dataLim.intervaly
    if high > 5 * low:
        log_axis(axes, "y")
        axes.yaxis.set_minor_formatter(FuncFormatter(_first_digits))
    else:
        low, high = axes.get_ylim()
        room = max(0.0, 0.12 * low - (high - low)) / 2  # so that hundredths do not look like a trend
        axes.set_ylim(low - room, high + room)
    caption = "The same tokens count at every length." + _mark_trained(axes, runs)
    axes.set_xlabel("evaluation length (tokens)")
    axes.set_ylabel("perplexity (a token)")
    legend_above(figure, axes)
    return Picture("length", "Perplexity by length", caption, figure)


def position_picture(runs: Sequence[Run], scored: Sequence[Scores]) -> Picture | None:
    """Loss by how much of the window a token follows."""
    figure = _figure()
    axes = figure.subplots()
    drawn = False
    for index, (run, score) in enumerate(zip(runs, scored, strict=True)):
        positions = _positions(score.result) if score.result else []
        if positions:
            drawn = True
            middles = [math.sqrt((bin_.start + 1) * bin_.stop) for bin_ in positions]
            axes.plot(middles, [bin_.loss for bin_ in positions], color=run_colour(index), marker="o", markersize=4,
                      label=run.name)  # fmt: skip
    if not drawn:
        return None
    log_axis(axes, "x")
    caption = "What more context is worth, in bins that double." + _mark_trained(axes, runs)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("loss (nats a token)")
    legend_above(figure, axes)
    return Picture("position", "Loss by position", caption, figure)


def _mark_trained(axes: "Axes", runs: Sequence[Run]) -> str:
    """A line at the training length, where all runs have the same; gives what a caption says of it."""
    lengths = {run.length for run in runs}
    trained = lengths.pop() if len(lengths) == 1 else None
    if trained is None:
        return ""
    axes.axvline(trained, color=LIGHT["before"], linestyle="--", linewidth=1, zorder=0)
    return " Dashed: the training length."


def _first_digits(value: float, _position: Any = None) -> str:
    """Ticks between powers of ten: 2 and 5 of each."""
    return tokens(value) if f"{value:e}"[0] in "25" else ""


def _positions(result: Evaluation) -> list[PositionLoss]:
    """For each bin the length that has most tokens in it: short windows are many, long ones reach far."""
    best: dict[int, PositionLoss] = {}
    for row in result.rows:
        for found in row.by_position:
            if found.start not in best or found.tokens > best[found.start].tokens:
                best[found.start] = found
    return [best[start] for start in sorted(best)]


def binary(value: float, _position: Any = None) -> str:
    """A length as the paper writes it: 512, 4k, 65k."""
    return f"{int(value)}" if value < 1000 else f"{int(value) // 1000}k"


def _figure() -> "Figure":
    from matplotlib.figure import Figure

    return Figure()


def _steps_axis(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(FuncFormatter(tokens))


def legend_above(figure: "Figure", axes: "Axes") -> None:
    """Names of the lines, where there are several, over the figure: there they cover nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        names = [short(label) for label in labels]
        columns = max(1, min(len(names), 56 // (4 + max(map(len, names)))))
        figure.legend(
            handles, names, loc="outside upper left", ncols=columns, handletextpad=0.4, columnspacing=1.2,
            handlelength=1.2, borderaxespad=0.1,
        )  # fmt: skip


def short(name: str, size: int = 30) -> str:
    """A name that fits a legend: its end, which tells folders apart."""
    name = "".join(character if character.isprintable() else "\ufffd" for character in name)
    return name if len(name) <= size else "…" + name[-size + 1 :]


def _column(rows: Sequence[dict[str, Any]], name: str) -> tuple[Array, Array]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([step for step, _ in pairs], float), np.array([value for _, value in pairs], float)


def _smoothed(values: Array) -> Array:
    """A running mean over about a twentieth of the steps, its beginning unbiased."""
    keep = 1 - 1 / max(2.0, len(values) / 40)
    mean = weight = 0.0
    out = np.empty_like(values)
    for index, value in enumerate(values):
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        out[index] = mean / weight
    return out


def _thinned(steps: Array, values: Array) -> tuple[Array, Array]:
    """Means of neighbours, so that no line has more than `_POINTS` points; the last point is kept as it is."""
    group = -(-len(values) // _POINTS)
    if group < 2:
        return steps, values
    edges = np.arange(0, len(values), group)
    counts = np.diff([*edges, len(values)])
    thin = np.add.reduceat(steps, edges) / counts, np.add.reduceat(values, edges) / counts
    return np.append(thin[0], steps[-1]), np.append(thin[1], values[-1])
