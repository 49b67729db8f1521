"""Figures over the steps of training and over lengths: a line per run."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gss.evaluate import Evaluation, PositionLoss
from gss.paper import PERPLEXITY
from gss.report.figures import Line, Panel, Picture
from gss.report.runs import RunRecord
from gss.report.scores import Scores
from gss.report.theme import LIGHT, run_colour, tokens

_POINTS = 400  # drawn of a line at most
_FAINT: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.3}
_HELD_OUT: dict[str, Any] = {
    "marker": "o", "markersize": 5, "linestyle": "--", "linewidth": 1.1, "markerfacecolor": LIGHT["card"],
    "markeredgewidth": 1.5,
}  # fmt: skip
_DOTS: dict[str, Any] = {"marker": "o", "markersize": 5}
_PAPER: dict[str, Any] = {"linestyle": ":", "marker": "s", "markersize": 3.5, "linewidth": 1.2}
# Column, title, caption, label of the axis, whether it is smoothed.
_COLUMNS = (
    ("learning_rate", "Learning rate", "Base rate; state-space parameters have their own, constant.", "learning rate"),
    ("gradient_norm", "Gradient norm", "Of all gradients together, before clipping.", "norm of the gradient"),
    (
        "tokens_per_second",
        "Speed",
        "Training tokens per second, evaluations and checkpoints left out.",
        "tokens per second",
    ),
)


def training_pictures(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> list[Picture]:
    """Loss, learning rate, gradient norm and speed by step; those that any run has."""
    if not any(run.training for run in runs):
        return []
    pictures = [_loss(runs, scored)]
    for column, title, caption, label in _COLUMNS:
        lines = []
        for index, run in enumerate(runs):
            at, values = _by_step(run.training, column)
            if column == "gradient_norm" and len(values):
                lines.append(Line(*_thinned(at, values), run_colour(index), look=_FAINT))
                values = _smoothed(values)
            if len(values):
                lines.append(Line(*_thinned(at, values), run_colour(index), run.name))
        speed = column == "tokens_per_second"
        norms = [value for line in lines for value in line.y]
        wide_spread = column == "gradient_norm" and max(norms) > 20 * min(norms)
        panel = Panel(
            "step",
            label,
            lines,
            log="y" if wide_spread else "",
            x_format=tokens,
            y_format=tokens if speed else None,
            y_range=(0.0 if speed else None, None),
        )
        pictures.append(Picture(column.replace("_", "-"), title, caption, [panel]))
    return pictures


def _loss(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> Picture:
    lines: list[Line] = []
    lows: list[float] = []
    highs: list[float] = []
    held_out = False
    for index, (run, score) in enumerate(zip(runs, scored, strict=True)):
        if not run.training:
            continue
        colour = run_colour(index)
        at, losses = _by_step(run.training, "loss")
        smooth, settled = _smoothed(losses), len(losses) // 20  # the first steps would flatten what matters
        lines.append(Line(*_thinned(at, losses), colour, look=_FAINT))
        lines.append(Line(*_thinned(at, smooth), colour, run.name))
        points = _held_out_points(run, score)
        if points:
            held_out = True
            at, values = zip(*points, strict=True)
            lines.append(Line(at, values, colour, look=_HELD_OUT))
        lows += [losses[settled:].min(), *(loss for _, loss in points)]
        highs.append(smooth[settled:].max())
    room = max(highs) - min(lows)
    span = (min(lows) - 0.04 * room, max(highs) + 0.12 * room) if room > 0 else (None, None)
    caption = "Every step faint, their running mean strong" + (
        "; circles are held-out data at the training length." if held_out else "; nothing was evaluated on the way."
    )
    panel = Panel("step", "loss (nats per token)", lines, x_format=tokens, y_range=span)
    return Picture("loss", "Loss", caption, [panel])


def _held_out_points(run: RunRecord, score: Scores) -> list[tuple[int, float]]:
    """(step, loss) at the training length: those of the run, and the report's own at its end."""
    lengths = {row["length"] for row in run.held_out}
    wanted = min(lengths, key=lambda length: abs(length - (run.length or 0)), default=None)
    points = [(row["step"], row["loss"]) for row in run.held_out if row["length"] == wanted]
    if score.result and run.loaded and run.loaded.step not in {step for step, _ in points}:
        points += [(run.loaded.step, row.loss) for row in score.result.rows if row.length == run.length]
    return sorted(points)


def length_pictures(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> list[Picture]:
    """Perplexity by length, the paper's for the same preset dotted; and loss by position in the window."""
    lengths, positions = [], []
    for index, (run, score) in enumerate(zip(runs, scored, strict=True)):
        rows = {row.length: row.perplexity for row in score.result.rows if row.length} if score.result else {}
        colour = run_colour(index)
        if rows:
            lengths.append(Line([*rows], [*rows.values()], colour, run.name, _DOTS))
            papers = PERPLEXITY.get(run.preset, {})
            lengths += [Line([*p], [*p.values()], colour, f"paper, {name}", _PAPER) for name, p in papers.items()]
        bins = _positions(score.result) if score.result else []
        if bins:
            middles = [math.sqrt((part.start + 1) * part.stop) for part in bins]
            positions.append(Line(middles, [part.loss for part in bins], colour, run.name, _DOTS))
    trained = {run.length for run in runs}
    mark = trained.pop() if len(trained) == 1 else None
    dashed = " Dashed: the training length." if mark else ""
    pictures = []
    if lengths:
        values = [value for line in lengths for value in line.y]
        low, high = min(values), max(values)
        room = max(0.12 * (high - low), (0.12 * low - (high - low)) / 2)  # hundredths are not to look like a trend
        panel = Panel(
            "evaluation length (tokens)",
            "perplexity per token",
            lengths,
            log="xy" if high > 5 * low else "x",
            x_ticks=[(at, binary(at)) for at in sorted({at for line in lengths for at in line.x})],
            y_range=(None, None) if high > 5 * low else (low - room, high + room),
            mark=mark,
        )
        caption = f"The same tokens count at every length.{dashed}"
        pictures.append(Picture("length", "Perplexity by length", caption, [panel]))
    if positions:
        axes = ("position in the window (tokens)", "loss (nats per token)")
        caption = f"What more context is worth, in bins that double.{dashed}"
        panel = Panel(*axes, positions, log="x", mark=mark)
        pictures.append(Picture("position", "Loss by position", caption, [panel]))
    return pictures


def _positions(result: Evaluation) -> list[PositionLoss]:
    """For each bin the length that has most tokens in it: short windows are many, long ones reach far."""
    best: dict[int, PositionLoss] = {}
    for row in result.rows:
        for found in row.by_position:
            if found.start not in best or found.tokens > best[found.start].tokens:
                best[found.start] = found
    return [best[start] for start in sorted(best)]


def binary(value: float) -> str:
    """A length as the paper writes it: 512, 4k, 65k."""
    return f"{int(value)}" if value < 1000 else f"{int(value) // 1000}k"


def _by_step(rows: Sequence[dict[str, Any]], name: str) -> tuple[Any, Any]:
    """(steps, values) of a column of a run's metrics, where it has values."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([step for step, _ in pairs], float), np.array([value for _, value in pairs], float)


def _smoothed(values: Any) -> Any:
    """A running mean over about a twentieth of the steps, its beginning unbiased."""
    keep = 1 - 1 / max(2.0, len(values) / 40)
    mean = weight = 0.0
    out = np.empty_like(values)
    for index, value in enumerate(values):
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        out[index] = mean / weight
    return out


def _thinned(x: Any, y: Any) -> tuple[Any, Any]:
    """Means of neighbours, so that no line has too many points; the last point is kept as it is."""
    group = -(-len(y) // _POINTS)
    if group < 2:
        return x, y
    edges = np.arange(0, len(y), group)
    counts = np.diff([*edges, len(y)])
    thin = [np.append(np.add.reduceat(part, edges) / counts, part[-1]) for part in (x, y)]
    return thin[0], thin[1]
