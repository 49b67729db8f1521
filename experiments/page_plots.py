"""The figures of a page of results: by length and position, speed against perplexity, how state spaces start.

Long windows are few, so positions up to the training length are those of windows of that length, of which there are
many; later positions can only be those of the longest.
"""

import io
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.figures import Line, Panel, Picture, draw
from experiments.records import Collection, Record, perplexities, speed
from experiments.studies import STUDIES
from gss.evaluation import PAPER_LENGTHS
from gss.report.theme import LIGHT, require_matplotlib, run_colour, style, tokens
from gss.reproduce.settings import SYSTEMS
from gss.reproduce.tables import LENGTH_NAMES, Found, by_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = "results-"
_FIRST_POSITION = 8  # before it everything is guesswork and would flatten the rest
_BROKEN = 1.25  # times the highest perplexity up to the training length
_STYLES, _MARKERS = ("-", "--", ":"), ("o", "^")  # after eight colours
_QUANTILES = {"0.95": "5%", "0.75": "25%", "0.5": "half"}  # of a layer's time constants; how many modes exceed them
_LENGTH_TICKS = [(float(length), name) for length, name in LENGTH_NAMES.items()]


def draw_page(results: Collection) -> dict[str, bytes]:
    """File name → PNG, as many as there are results for."""
    require_matplotlib()
    with style():
        return {f"{PREFIX}{picture.name}.png": _png(draw(picture)) for picture in page_pictures(results)}


def _png(figure: "Figure") -> bytes:
    """A figure as a PNG in the light colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def page_pictures(results: Collection) -> list[Picture]:
    """What is drawn."""
    names = list(dict.fromkeys(system.name for table in ("table1", "table2") for system in STUDIES[table].systems))
    pictures = [
        by_corpus(corpus, found)
        for corpus in results.corpora()
        if (found := [entry for name in names for entry in results.of(corpus, name)])
    ]
    return pictures + [picture for picture in (_speed(results, names), _init(results)) if picture]


def by_corpus(corpus: str, found: Found) -> Picture:
    """Perplexity by evaluation length, and the loss by position in a window."""
    lengths, positions = [], []
    trained = found[0][0].config.length
    for index, (trial, kept) in enumerate(by_seed(found)):
        look = {"linestyle": _STYLES[index // 8 % len(_STYLES)]}
        known = [length for length in PAPER_LENGTHS if all(_known(result, str(length)) for result in kept)]
        means = [statistics.fmean(r["lengths"][str(length)]["perplexity"] for r in kept) for length in known]
        dots = {**look, "marker": "o", "markersize": 4}
        lengths.append(Line(known, means, run_colour(index), trial.system.label, dots))
        if known:
            positions.append(Line(*_by_position(kept, known, trained), run_colour(index), look=look))
    usual = [y for line in lengths for x, y in zip(line.x, line.y, strict=True) if x <= trained]
    above = [line.label for line in lengths if usual and max(line.y, default=0) > _BROKEN * max(usual)]
    # A model that breaks on long inputs would flatten all others: its line leaves at the top, and is named.
    low = min((y for line in lengths for y in line.y), default=0)
    span = (0.97 * low, _BROKEN * max(usual)) if above else (None, None)
    x_label = "evaluation length (tokens)" + (f"; off the top: {', '.join(above)}" if above else "")
    common: dict[str, Any] = {"log": "x", "mark": trained}
    panels = [
        Panel(x_label, f"perplexity on {corpus}", lengths, x_ticks=_LENGTH_TICKS, y_range=span, **common),
        Panel("position in the window (tokens)", "loss (nats per token)", positions, **common),
    ]
    caption = f"Perplexity by evaluation length and loss by position, {corpus}"
    return Picture(corpus, corpus, caption, panels, (9.4, 3.9))


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
    panels = []
    for corpus in results.corpora():
        lines = []
        for index, name in enumerate(names):
            part = results.of(corpus, name)
            rate, scores = speed(part), perplexities(part, "4096")
            if rate and scores:
                look = {"marker": _MARKERS[index // 8 % len(_MARKERS)], "linestyle": "none"}
                score = statistics.fmean(scores.values())
                lines.append(Line([rate], [score], run_colour(index), SYSTEMS[name].label, look))
        if lines:
            axes = ("training tokens per second", f"perplexity on {corpus}, 4k")
            panels.append(Panel(*axes, lines, x_format=tokens))
    size = (max(6.0, 3.6 * len(panels)), 3.9)
    caption = "Training speed against perplexity at 4k"
    return Picture("speed", "speed", caption, panels, size) if panels else None


def _init(results: Collection) -> Picture | None:
    """Every start's perplexity, a dot per seed, best first; and the time constants of the best by layer."""
    corpus = next(iter(results.corpora()), "")
    rows = {system.name: results.of(corpus, system.name) for system in STUDIES["init"].systems}
    scores = {name: perplexities(part, "4096") for name, part in rows.items()}
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in scores.items() if by_seed}
    if len(means) < 2:
        return None
    order = sorted(means, key=lambda name: -means[name])
    dots = []
    for length, name, colour in (("4096", "4k", LIGHT["run1"]), ("65536", "65k", LIGHT["run2"])):
        points = [(x, y) for y, start in enumerate(order) for x in perplexities(rows[start], length).values()]
        if points:
            look = {"linestyle": "none", "marker": "o", "markersize": 4, "alpha": 0.8}
            dots.append(Line([x for x, _ in points], [y for _, y in points], colour, name, look))
    wide_spread = max(means.values()) > 2 * min(means.values())
    ticks = [(float(place), name.removeprefix("init-")) for place, name in enumerate(order)]
    best = order[-1]
    kept = rows[best][0][1]
    layers = []
    for index, (quantile, share) in enumerate(_QUANTILES.items()):
        for when, line in (("start", "--"), ("end", "-")):
            values = [part["quantiles"][quantile] for part in kept["time_constants"][when]]
            label = f"{share} slower" if when == "end" else ""
            layers.append(Line(range(1, len(values) + 1), values, run_colour(index + 2), label, {"linestyle": line}))
    panels = [
        Panel(f"perplexity on {corpus}", "start", dots, log="x" if wide_spread else "", y_ticks=ticks),
        Panel(
            f"layer ({best.removeprefix('init-')}, dashed: before training)", "time constant (tokens)", layers, log="y"
        ),
    ]
    caption = "Perplexity of every start, and time constants by layer before and after training"
    return Picture("init", "init", caption, panels, (9.4, 3.9))
