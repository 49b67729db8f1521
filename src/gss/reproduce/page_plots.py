"""The figures of a page of results: by length and position, speed against perplexity, how state spaces start."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gss.report.theme import LIGHT, log_axis, png, require_matplotlib, run_colour, style, tokens
from gss.reproduce.plots import draw
from gss.reproduce.records import Collection, Record, perplexities, speed
from gss.reproduce.settings import SYSTEMS, TARGETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREFIX = "results-"
_CAPTIONS = {
    "speed": "Training speed against perplexity at 4k",
    "init": "Perplexity of every start, and time constants by layer before and after training",
}
_MARKERS = ("o", "^")  # after eight colours
_QUANTILES = {"0.95": "5%", "0.75": "25%", "0.5": "half"}  # of a layer's time constants; how many modes exceed them


def draw_page(results: Collection) -> dict[str, bytes]:
    """File name → PNG, as many as there are results for."""
    require_matplotlib()
    names = list(dict.fromkeys(system.name for table in ("table1", "table2") for system in TARGETS[table].systems))
    found = [entry for corpus in results.corpora() for name in names for entry in results.of(corpus, name)]
    images = {f"{PREFIX}{name}": content for name, content in draw(found).items()}
    with style():
        for name, figure in (("speed", _speed(results, names)), ("init", _init(results))):
            if figure is not None:
                images[f"{PREFIX}{name}.png"] = png(figure)
    return images


def caption(file_name: str) -> str:
    """What a figure shows."""
    name = file_name.removeprefix(PREFIX).removesuffix(".png")
    return _CAPTIONS.get(name, f"Perplexity by evaluation length and loss by position, {name}")


def _speed(results: Collection, names: Sequence[str]) -> "Figure | None":
    """A point a system: tokens a second and perplexity at 4k; a panel a corpus."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    points = {
        corpus: {
            name: (rate, statistics.fmean(scores.values()))
            for name in names
            if (rate := speed(results.of(corpus, name))) and (scores := perplexities(results.of(corpus, name), "4096"))
        }
        for corpus in results.corpora()
    }
    points = {corpus: systems for corpus, systems in points.items() if systems}
    if not points:
        return None
    figure = Figure(figsize=(max(6.0, 3.6 * len(points)), 3.9))
    for axes, (corpus, systems) in zip(figure.subplots(1, len(points), squeeze=False)[0], points.items(), strict=True):
        for index, name in enumerate(names):
            if name in systems:
                look = {"color": run_colour(index), "marker": _MARKERS[index // 8 % len(_MARKERS)], "linestyle": ""}
                axes.plot(*systems[name], label=SYSTEMS[name].label, **look)
        axes.set_xlim(0, 1.1 * max(rate for rate, _ in systems.values()))
        axes.xaxis.set_major_formatter(FuncFormatter(tokens))
        axes.set_xlabel("training tokens a second")
        axes.set_ylabel(f"perplexity on {corpus}, 4k")
    handles = {label: handle for axes in figure.axes for handle, label in zip(*_legend(axes), strict=True)}
    shown = [SYSTEMS[name].label for name in names if SYSTEMS[name].label in handles]
    figure.legend([handles[label] for label in shown], shown, loc="outside upper left", ncols=min(6, len(shown)))
    return figure


def _legend(axes: "Axes") -> tuple[list[Any], list[str]]:
    return axes.get_legend_handles_labels()


def _init(results: Collection) -> "Figure | None":
    """Every start's perplexity, a dot a seed, best first; and the time constants of the best by layer."""
    from matplotlib.figure import Figure

    corpus = next(iter(results.corpora()), "")
    rows = {system.name: results.of(corpus, system.name) for system in TARGETS["init"].systems}
    scores = {name: perplexities(part, "4096") for name, part in rows.items()}
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in scores.items() if by_seed}
    if len(means) < 2:
        return None
    order = sorted(means, key=lambda name: means[name])
    figure = Figure(figsize=(9.4, 3.9))
    left, right = figure.subplots(1, 2)
    for length, colour in (("4096", LIGHT["run1"]), ("65536", LIGHT["run2"])):
        points = [
            (score, place) for place, name in enumerate(order) for score in perplexities(rows[name], length).values()
        ]
        if points:
            shown = {"4096": "4k", "65536": "65k"}[length]
            left.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, alpha=0.8, label=shown)
    left.set_yticks(range(len(order)), [name.removeprefix("init-") for name in order])
    left.invert_yaxis()
    left.set_xlabel(f"perplexity on {corpus}")
    if max(means.values()) > 2 * min(means.values()):
        log_axis(left, "x")
    left.legend()
    _layers(right, rows[order[0]][0][1])
    right.set_title(f"{order[0].removeprefix('init-')}, before (dashed) and after", fontsize="medium", loc="left")
    return figure


def _layers(axes: "Axes", kept: Record) -> None:
    """The time constants that so many of each layer's modes exceed, before training and after."""
    for index, (quantile, share) in enumerate(_QUANTILES.items()):
        for when, line in (("start", "--"), ("end", "-")):
            values = [part["quantiles"][quantile] for part in kept["time_constants"][when]]
            label = f"{share} slower" if when == "end" else "_"  # matplotlib leaves such a label out
            axes.plot(range(1, len(values) + 1), values, line, color=run_colour(index), label=label)
    axes.set_ylim(bottom=1)  # room for the legend below the lines
    log_axis(axes, "y")
    axes.set_xlabel("layer")
    axes.set_ylabel("time constant (tokens)")
    axes.legend(loc="lower center", ncols=len(_QUANTILES))
