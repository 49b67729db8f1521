"""The figures of a page of results: by length and position, speed against perplexity, how state spaces start.

Long windows are few, so positions up to the training length are those of windows of that length, of which there are
many; later positions can only be those of the longest.
"""

import io
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.records import Collection, Record, perplexities, speed
from experiments.studies import STUDIES
from gss.paper import LENGTHS
from gss.report.theme import LIGHT, legend, logarithmic, require_matplotlib, run_colour, style, tokens
from gss.reproduce.settings import SYSTEMS
from gss.reproduce.tables import LENGTH_NAMES, Found, by_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "results-"
_FIRST_POSITION = 8  # before it everything is guesswork and would flatten the rest
_BROKEN = 1.25  # times the highest perplexity up to the training length
STYLES, _MARKERS = ("-", "--", ":"), ("o", "^")  # after eight colours
_QUANTILES = {"0.95": "5%", "0.75": "25%", "0.5": "half"}  # of a layer's time constants; how many modes exceed them


class Picture(NamedTuple):
    """A figure for the page."""

    png: bytes
    caption: str


def draw_page(results: Collection) -> dict[str, Picture]:
    """File name → picture, as many as there are results for."""
    require_matplotlib()
    names = list(dict.fromkeys(system.name for table in ("table1", "table2") for system in STUDIES[table].systems))
    with style():
        pictures: dict[str, Picture | None] = {
            corpus: by_corpus(corpus, found)
            for corpus in results.corpora()
            if (found := [entry for name in names for entry in results.of(corpus, name)])
        }
        pictures |= {"speed": _speed(results, names), "init": _init(results)}
    return {f"{PREFIX}{name}.png": picture for name, picture in pictures.items() if picture}


def subplots(count: int, width: float = 9.4) -> "Sequence[Axes]":
    """Panels of a new figure, side by side."""
    from matplotlib.figure import Figure

    row: Sequence[Axes] = Figure(figsize=(width, 3.9)).subplots(1, count, squeeze=False)[0]
    return row


def finished(panels: "Sequence[Axes]", caption: str) -> Picture:
    """The finished figure, in the light colours."""
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    legend(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return Picture(buffer.getvalue(), caption)


def by_corpus(corpus: str, found: Found) -> Picture:
    """Perplexity by evaluation length, and the loss by position in a window."""
    by_length, by_position = panels = subplots(2)
    trained = found[0][0].config.length
    lines: dict[str, dict[int, float]] = {}
    for index, (trial, kept) in enumerate(by_seed(found)):
        look: dict[str, Any] = {"color": run_colour(index), "linestyle": STYLES[index // 8 % len(STYLES)]}
        known = [length for length in LENGTHS if all(_known(result, str(length)) for result in kept)]
        means = {n: statistics.fmean(result["lengths"][str(n)]["perplexity"] for result in kept) for n in known}
        lines[trial.system.label] = means
        by_length.plot([*means], [*means.values()], label=trial.system.label, marker="o", markersize=4, **look)
        if known:
            by_position.plot(*_by_position(kept, known, trained), **look)
    usual = [score for means in lines.values() for length, score in means.items() if length <= trained]
    above = [label for label, means in lines.items() if usual and max(means.values(), default=0) > _BROKEN * max(usual)]
    if above:  # a model that breaks on long inputs would flatten all others: its line leaves at the top, and is named
        by_length.set_ylim(
            0.97 * min(score for means in lines.values() for score in means.values()), _BROKEN * max(usual)
        )
    ending = f"; off the top: {', '.join(above)}" if above else ""
    by_length.set(xlabel=f"evaluation length (tokens){ending}", ylabel=f"perplexity on {corpus}")
    by_position.set(xlabel="position in the window (tokens)", ylabel="loss (nats per token)")
    for axes in panels:
        logarithmic(axes.xaxis)
        axes.axvline(trained, color=LIGHT["before"], linestyle="--", linewidth=1, zorder=0)
    by_length.set_xticks([*LENGTH_NAMES], [*LENGTH_NAMES.values()])
    by_length.set_xticks([], minor=True)
    return finished(panels, f"Perplexity by evaluation length and loss by position, {corpus}")


def _by_position(kept: Sequence[Record], lengths: Sequence[int], trained: int) -> tuple[list[float], list[float]]:
    usual, longest = trained if trained in lengths else lengths[-1], lengths[-1]
    rows = [
        [part for part in result["lengths"][str(usual)]["by_position"] if part["start"] >= _FIRST_POSITION]
        + [part for part in result["lengths"][str(longest)]["by_position"] if part["start"] >= usual]
        for result in kept
    ]
    parts = list(zip(*rows, strict=False))
    middles = [(part[0]["start"] * part[0]["stop"]) ** 0.5 for part in parts]
    return middles, [statistics.fmean(one["loss"] for one in part) for part in parts]


def _known(result: Record, length: str) -> bool:
    return result["lengths"].get(length, {}).get("perplexity") is not None


def _speed(results: Collection, names: Sequence[str]) -> Picture | None:
    """A point per system: tokens per second and perplexity at 4k; a panel per corpus."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    for corpus in results.corpora():
        for index, name in enumerate(names):
            part = results.of(corpus, name)
            rate, scores = speed(part), perplexities(part, "4096")
            if rate and scores:
                points.setdefault(corpus, []).append((index, rate, statistics.fmean(scores.values())))
    if not points:
        return None
    panels = subplots(len(points), max(6.0, 3.6 * len(points)))
    for axes, (corpus, there) in zip(panels, points.items(), strict=True):
        for index, rate, score in there:
            look: dict[str, Any] = {"marker": _MARKERS[index // 8 % len(_MARKERS)], "linestyle": "none"}
            axes.plot([rate], [score], color=run_colour(index), label=SYSTEMS[names[index]].label, **look)
        axes.set(xlabel="training tokens per second", ylabel=f"perplexity on {corpus}, 4k")
        axes.xaxis.set_major_formatter(tokens)
    return finished(panels, "Training speed against perplexity at 4k")


def _init(results: Collection) -> Picture | None:
    """Every start's perplexity, a dot per seed, best first; and the time constants of the best by layer."""
    corpus = next(iter(results.corpora()), "")
    rows = {system.name: results.of(corpus, system.name) for system in STUDIES["init"].systems}
    scores = {name: perplexities(part, "4096") for name, part in rows.items()}
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in scores.items() if by_seed}
    if len(means) < 2:
        return None
    order = sorted(means, key=lambda name: -means[name])
    dots, layers = panels = subplots(2)
    for length, name, colour in (("4096", "4k", LIGHT["run1"]), ("65536", "65k", LIGHT["run2"])):
        points = [(x, y) for y, start in enumerate(order) for x in perplexities(rows[start], length).values()]
        if points:
            dots.plot(*zip(*points, strict=True), "o", color=colour, label=name, markersize=4, alpha=0.8)
    if max(means.values()) > 2 * min(means.values()):
        logarithmic(dots.xaxis)
    dots.set(xlabel=f"perplexity on {corpus}", ylabel="start")
    dots.set_yticks(range(len(order)), [name.removeprefix("init-") for name in order])
    best = order[-1]
    kept = rows[best][0][1]
    for index, (quantile, share) in enumerate(_QUANTILES.items()):
        for when, line in (("start", "--"), ("end", "-")):
            values = [part["quantiles"][quantile] for part in kept["time_constants"][when]]
            label = f"{share} slower" if when == "end" else None
            layers.plot(range(1, len(values) + 1), values, line, color=run_colour(index + 2), label=label)
    logarithmic(layers.yaxis)
    what = f"layer ({best.removeprefix('init-')}, dashed: before training)"
    layers.set(xlabel=what, ylabel="time constant (tokens)")
    return finished(panels, "Perplexity of every start, and time constants by layer before and after training")
