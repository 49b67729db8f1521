"""Figures over the steps of training and over lengths: a line per run."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gss.evaluation import Evaluation, PositionLoss
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
_COLUMNS = {
    "loss": ("Loss", "loss (nats per token)", "Every step faint, their running mean strong; "),
    "learning_rate": (
        "Learning rate", "learning rate", "Base rate; state-space parameters have their own, constant."
    ),
    "gradient_norm": ("Gradient norm", "norm of the gradient", "Of all gradients together, before clipping."),
    "tokens_per_second": (
        "Speed", "tokens per second", "Training tokens per second, evaluations and checkpoints left out."
    ),
}  # fmt: skip
"""Of a run's metrics: title, label of the axis, caption."""
_NOISY = ("loss", "gradient_norm")


def training_pictures(runs: Sequence[RunRecord], scored: Sequence[Scores]) -> list[Picture]:
    """Loss, learning rate, gradient norm and speed by step, where any run has them."""
    if not any(run.training for run in runs):
        return []
    return [_by_step(runs, scored, column) for column in _COLUMNS]


def _by_step(runs: Sequence[RunRecord], scored: Sequence[Scores], column: str) -> Picture:
    title, label, caption = _COLUMNS[column]
    lines: list[Line] = []
    settled: list[float] = []  # what the first steps of a loss, far above the rest, are not to flatten
    held_out = False
    for index, (run, score) in enumerate(zip(runs, scored, strict=True)):
        rows = [row for row in run.training if row.get(column) is not None]
        if not rows:
            continue
        at, values = (np.array([row[name] for row in rows], float) for name in ("step", column))
        if column in _NOISY:
            lines.append(Line(*_thinned(at, values), run_colour(index), look=_FAINT))
            settled.append(values[len(values) // 20 :].min())
            values = _smoothed(values)
            settled.append(values[len(values) // 20 :].max())
        lines.append(Line(*_thinned(at, values), run_colour(index), run.name))
        points = _held_out_points(run, score) if column == "loss" else {}
        if points:
            held_out = True
            settled += points.values()
            lines.append(Line([*points], [*points.values()], run_colour(index), look=_HELD_OUT))
    low, high = (min(settled), max(settled)) if settled else (0.0, 0.0)
    span: tuple[float | None, float | None] = (0.0 if column == "tokens_per_second" else None, None)
    if column == "loss":
        caption += (
            "circles are held-out data at the training length." if held_out else "nothing was evaluated on the way."
        )
        span = (low - 0.04 * (high - low), high + 0.12 * (high - low)) if high > low else span
    log = "y" if column == "gradient_norm" and high > 20 * low else ""
    form = tokens if column == "tokens_per_second" else None
    panel = Panel("step", label, lines, log=log, x_format=tokens, y_format=form, y_range=span)
    return Picture(column.replace("_", "-"), title, caption, [panel])


def _held_out_points(run: RunRecord, score: Scores) -> dict[int, float]:
    """Step → loss at the training length: those of the run, and the report's own at its end."""
    lengths = {row["length"] for row in run.held_out}
    wanted = min(lengths, key=lambda length: abs(length - (run.length or 0)), default=None)
    points = {row["step"]: row["loss"] for row in run.held_out if row["length"] == wanted}
    own = [row.loss for row in score.result.rows if row.length == run.length] if score.result else []
    if own and run.loaded:
        points.setdefault(run.loaded.step, own[0])
    return dict(sorted(points.items()))


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


def context_picture(runs: Sequence[RunRecord]) -> Picture | None:
    """The loss of the same targets by the true tokens before them, for runs that `gss probe` has measured."""
    lines, effective = [], []
    for index, run in enumerate(runs):
        for way, look in (("replaced", _DOTS), ("fresh", {"linestyle": ":", "linewidth": 1.2})):
            rows = run.probe.get(way) or []
            x, y = [row["context"] for row in rows], [row["loss"] for row in rows]
            lines.append(Line(x, y, run_colour(index), run.name if way == "replaced" else "", look))
        if run.probe:
            found = run.probe.get("effective_context")
            effective.append(f"{run.name}: " + (f"{found:,} tokens" if found else "none"))
    if not effective:
        return None
    caption = (
        "The same targets throughout. Strong: the window is as long for every point, filled up with another document's "
        f"tokens; dotted: read from a fresh start. Effective context, {'; '.join(effective)}."
    )
    panel = Panel("true tokens before the targets", "loss (nats per token)", lines, log="x", x_format=tokens)
    return Picture("context", "How far back it looks", caption, [panel])


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
