"""The figures of docs/results.md, as PNG by name."""

import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import best_recipe, paper_recipe
from experiments.compare import Run
from gss.report.theme import LIGHT, legend, logarithmic, run_colour, style
from gss.report.theme import tokens as rounded
from gss.reproduce.settings import SYSTEMS
from gss.reproduce.tables import LENGTH_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES, _MARKERS = ("-", "--"), ("o", "^")  # after eight colours


def draw(runs: Sequence[Run], best: Path) -> dict[str, bytes]:
    """All figures for which there are results: of runs of `gss reproduce`, and of those of `quality` in a folder."""
    found = {}
    with style():
        if entries := best_recipe.shown(best):
            found["context"] = _saved(context(entries))
        if runs:
            corpora = paper_recipe.corpora(runs)
            found |= {"length": _saved(lengths(runs, corpora)), "speed": _saved(speeds(runs, corpora))}
        if starts := {
            name: part for name in paper_recipe.STARTS if (part := paper_recipe.of(runs, "books", f"init-{name}"))
        }:
            found["starts"] = _saved(dots(starts))
    return found


def _panels(count: int, width: float, height: float = 3.6, sharey: bool = False) -> "Sequence[Axes]":
    from matplotlib.figure import Figure

    row: Sequence[Axes] = Figure(figsize=(width, height)).subplots(1, count, squeeze=False, sharey=sharey)[0]
    return row


def _saved(panels: "Sequence[Axes]") -> bytes:
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    if panels[0].get_legend() is None:
        legend(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _look(index: int) -> dict[str, Any]:
    return {"color": run_colour(index), "linestyle": _STYLES[index // 8]}


def context(entries: Sequence[tuple[str, Run]]) -> "Sequence[Axes]":
    """How much worse the last 512 tokens of a window are read with fewer true tokens before them than with the most."""
    (axes,) = panels = _panels(1, 8.6, 4.8)
    worst_first = sorted(entries, key=lambda entry: -entry[1]["context"]["excess"][0])
    for index, (_, run) in enumerate(worst_first):
        found = run["context"]
        worse = [100 * math.expm1(excess) for excess in found["excess"]]
        axes.plot(found["distances"], worse, marker="o", markersize=3.5, label=best_recipe.name(run), **_look(index))
    distances = entries[0][1]["context"]["distances"]
    most = best_recipe.tokens(distances[-1])
    axes.set(xlabel="true tokens before", ylabel=f"perplexity above that with {most}, %")
    logarithmic(axes.xaxis)
    axes.set_xticks(distances, [best_recipe.tokens(at) for at in distances])
    axes.set_xticks([], minor=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize="small")
    return panels


def lengths(runs: Sequence[Run], corpora: Sequence[str]) -> "Sequence[Axes]":
    """Perplexity by evaluation length, beside that at the shortest."""
    panels = _panels(len(corpora), 3.4 * len(corpora), sharey=True)
    for axes, corpus in zip(panels, corpora, strict=True):
        for index, system in enumerate(paper_recipe.MODELS):
            part = paper_recipe.of(runs, corpus, system)
            means = {n: statistics.fmean(found) for n in LENGTH_NAMES if (found := paper_recipe.scores(part, str(n)))}
            if means:
                least = means[min(means)]
                change = [100 * (score / least - 1) for score in means.values()]
                axes.plot([*means], change, marker="o", markersize=3.5, label=SYSTEMS[system].label, **_look(index))
        logarithmic(axes.xaxis)
        axes.set(xlabel=f"evaluation length, {corpus}")
        axes.axvline(4096, color=LIGHT["before"], linestyle="--", linewidth=1, zorder=0)
        axes.set_xticks([*LENGTH_NAMES], [*LENGTH_NAMES.values()])
        axes.set_xticks([], minor=True)
    panels[0].set_ylabel("change in perplexity from 512 tokens, %")
    return panels


def speeds(runs: Sequence[Run], corpora: Sequence[str]) -> "Sequence[Axes]":
    """A point per system: tokens per second and perplexity at 4k."""
    panels = _panels(len(corpora), 3.4 * len(corpora))
    for axes, corpus in zip(panels, corpora, strict=True):
        for index, system in enumerate(paper_recipe.MODELS):
            part = paper_recipe.of(runs, corpus, system)
            rate, found = paper_recipe.speed(part), paper_recipe.scores(part, "4096")
            if rate and found:
                look = _look(index) | {"marker": _MARKERS[index // 8], "linestyle": "none"}
                axes.plot([rate], [statistics.fmean(found)], label=SYSTEMS[system].label, **look)
        axes.set(xlabel="training tokens per second", ylabel=f"perplexity at 4k, {corpus}")
        axes.set_xlim(0, 1.35e6)
        axes.xaxis.set_major_formatter(rounded)
    return panels


def dots(starts: dict[str, list[Run]]) -> "Sequence[Axes]":
    """Every start's perplexity, a dot per seed, the best at the top."""
    (axes,) = panels = _panels(1, 7.0)
    order = sorted(starts, key=lambda name: -statistics.fmean(paper_recipe.scores(starts[name], "4096")))
    for length, name, colour in (("4096", "4k", LIGHT["run1"]), ("65536", "65k", LIGHT["run2"])):
        points = [(x, y) for y, start in enumerate(order) for x in paper_recipe.scores(starts[start], length)]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=name, markersize=4.5, alpha=0.8)
    axes.set(xlabel="perplexity on books")
    axes.set_yticks(range(len(order)), order)
    return panels
