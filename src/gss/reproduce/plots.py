"""A figure a corpus: perplexity by evaluation length, and the loss by position in a window.

Long windows are few, so positions up to the training length are those of windows of that length, of which there are
many; later positions can only be those of the longest.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gss.evaluate import PAPER_LENGTHS
from gss.report.theme import log_axis, png, require_matplotlib, run_colour, style
from gss.reproduce.tables import Found, by_corpus, groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIRST_POSITION = 8  # before it everything is guesswork and would flatten the rest
_BROKEN = 1.25  # times the highest perplexity up to the training length
_STYLES = ("-", "--", ":")  # after eight colours


def draw(found: Found) -> dict[str, bytes]:
    """File name → PNG."""
    require_matplotlib()
    from matplotlib.figure import Figure

    images = {}
    with style():
        for corpus, runs in by_corpus(found).items():
            figure = Figure(figsize=(9.4, 3.9))
            left, right = figure.subplots(1, 2)
            for index, (run, kept) in enumerate(groups(runs)):
                look = {"color": run_colour(index), "linestyle": _STYLES[index // 8 % len(_STYLES)]}
                _by_length(left, run.system.label, kept, look)
                _by_position(right, kept, run.config.length, look)
            _finish(left, right, run.config.length, corpus)
            handles, labels = left.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper left", ncols=min(5, len(labels)), handlelength=3.5)
            images[f"{corpus}.png"] = png(figure)
    return images


def _by_length(axes: "Axes", label: str, kept: Sequence[Mapping[str, Any]], look: dict[str, Any]) -> None:
    lengths = [length for length in PAPER_LENGTHS if all(_known(result, str(length)) for result in kept)]
    means = [statistics.fmean(r["lengths"][str(length)]["perplexity"] for r in kept) for length in lengths]
    axes.plot(lengths, means, marker="o", markersize=4, label=label, **look)


def _by_position(axes: "Axes", kept: Sequence[Mapping[str, Any]], trained: int, look: dict[str, Any]) -> None:
    """Of the lengths that all seeds have."""
    lengths = sorted(
        int(name) for name in kept[0]["lengths"] if name.isdecimal() and all(_known(r, name) for r in kept)
    )
    if not lengths:
        return
    usual, longest = trained if trained in lengths else lengths[-1], lengths[-1]
    rows = [
        [part for part in result["lengths"][str(usual)]["by_position"] if part["start"] >= _FIRST_POSITION]
        + [part for part in result["lengths"][str(longest)]["by_position"] if part["start"] >= usual]
        for result in kept
    ]
    parts = list(zip(*rows, strict=False))
    middles = [(part[0]["start"] * part[0]["stop"]) ** 0.5 for part in parts]
    axes.plot(middles, [statistics.fmean(one["loss"] for one in part) for part in parts], **look)


def _known(result: Mapping[str, Any], length: str) -> bool:
    return result["lengths"].get(length, {}).get("perplexity") is not None


def _finish(left: "Axes", right: "Axes", trained: int, corpus: str) -> None:
    for axes, x, y in (
        (left, "evaluation length (tokens)", f"perplexity on {corpus}"),
        (right, "position in the window (tokens)", "loss (nats a token)"),
    ):
        log_axis(axes, "x")
        axes.axvline(trained, linewidth=0.8, linestyle=":", color="0.6")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    left.set_xticks(PAPER_LENGTHS, ["512", "4k", "16k", "65k"])
    broken = _cut_off_what_breaks(left, trained)
    left.set_title(f"{broken}dotted: the training length", fontsize=8.5, loc="right", color="0.4")


def _cut_off_what_breaks(axes: "Axes", trained: int) -> str:
    """A model that breaks on long inputs would flatten all others: its line leaves at the top, and is named."""
    drawn: list[Any] = [line for line in axes.lines if line.get_marker() == "o"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in drawn}
    usual = [y for points in lines.values() for x, y in points if x <= trained]
    above = [label for label, points in lines.items() if usual and max(y for _, y in points) > _BROKEN * max(usual)]
    if not above:
        return ""
    lowest = min(y for points in lines.values() for _, y in points)
    axes.set_ylim(0.97 * lowest, _BROKEN * max(usual))
    return f"off the top: {', '.join(above)}; "
