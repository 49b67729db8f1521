"""The look of figures: light and dark colors, matplotlib's settings, and SVG output.

Figures are drawn in the light colors. In the SVG these become CSS variables, which the page defines for light and dark
mode; text stays text, in the page's font.
"""

import io
import re
from contextlib import AbstractContextManager
from html import escape
from math import isclose, log10
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

# Name → (light, dark). Light colours must be distinct, since they are replaced by their names in an SVG.
COLOURS = {
    "card": ("#ffffff", "#171b22"),
    "ink": ("#1d2330", "#e6e9ef"),
    "muted": ("#5b6474", "#9aa4b5"),
    "grid": ("#e4e7ec", "#2a303b"),
    "before": ("#9ba3b0", "#6f7a8c"),
    "run1": ("#2166c4", "#6aa5f5"),
    "run2": ("#d2571b", "#f0935c"),
    "run3": ("#1a8f6f", "#4fc9a4"),
    "run4": ("#9a3fb5", "#cf8ae4"),
    "run5": ("#b8860b", "#e3b84a"),
    "run6": ("#c22f56", "#f07d9c"),
    "run7": ("#4a7a1e", "#98c76a"),
    "run8": ("#5a5fc7", "#9da2f5"),
}
LIGHT = {name: pair[0] for name, pair in COLOURS.items()}
_RAMP = ("#2f80c9", "#7d6bd0", "#c75f9e", "#dd7f45")  # first layer to last, readable on both
_INK, _MUTED, _CARD = LIGHT["ink"], LIGHT["muted"], LIGHT["card"]
_SETTINGS: Any = {  # typed by matplotlib as a mapping from every name that it knows
    "figure.constrained_layout.use": True, "figure.facecolor": _CARD, "savefig.facecolor": _CARD,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9.5, "text.color": _INK,
    "text.parse_math": False, "axes.facecolor": _CARD, "axes.edgecolor": _MUTED, "axes.labelcolor": _INK,
    "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "axes.formatter.use_mathtext": False, "grid.color": LIGHT["grid"], "grid.linewidth": 0.8,
    "xtick.color": _MUTED, "ytick.color": _MUTED, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
    "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.8, "svg.fonttype": "none",
    "svg.hashsalt": "gss",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


class MissingMatplotlibError(ValueError):
    """The extra `report` is not installed."""


def style() -> AbstractContextManager[None]:
    """A context with matplotlib's settings, in which figures are drawn and saved; an error that names the extra where
    matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise MissingMatplotlibError("a report's figures need matplotlib: pip install 'gss-lm[report]'") from None
    return matplotlib.rc_context(_SETTINGS)


def run_variable(index: int) -> str:
    """The name of a run's colour, by its position in the report; colours repeat after eight."""
    return f"run{index % 8 + 1}"


def run_colour(index: int) -> str:
    """The colour of a run in the light theme."""
    return LIGHT[run_variable(index)]


def logarithmic(axis: "XAxis | YAxis") -> None:
    """Make an axis logarithmic, with few and short tick labels."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(numticks=8))
    axis.set_major_formatter(power_of_ten)
    axis.set_minor_formatter(NullFormatter())


def legend(figure: "Figure") -> None:
    """Add a legend above the figure if there is more than one label."""
    pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
    named = {label: handle for pair in pairs for handle, label in pair}
    if len(named) > 1:
        names = [short(label) for label in named]
        columns = int(12 * figure.get_figwidth()) // (4 + max(map(len, names)))
        figure.legend(
            list(named.values()), names, loc="outside upper left", ncols=max(1, min(len(names), columns)),
            handletextpad=0.4, columnspacing=1.2, handlelength=1.2, borderaxespad=0.1,
        )  # fmt: skip


def short(name: str, size: int = 30) -> str:
    """A name shortened for a legend to its end, which distinguishes folders."""
    name = "".join(character if character.isprintable() else "\ufffd" for character in name)
    return name if len(name) <= size else "…" + name[-size + 1 :]


def layer_colours(count: int) -> list[str]:
    """One colour per layer, from cool to warm."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ramp = LinearSegmentedColormap.from_list("layers", _RAMP)
    return [to_hex(ramp(index / max(count - 1, 1))) for index in range(count)]


def css_variables() -> str:
    """The colours as CSS variables, for light mode and for dark mode."""
    light, dark = ("".join(f"--{name}:{pair[side]};" for name, pair in COLOURS.items()) for side in (0, 1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def power_of_ten(value: float, _position: Any = None) -> str:
    """A tick label of a logarithmic axis: plain if short (1, 100, 10k), otherwise 10⁻³."""
    if value <= 0:
        return "0" if value == 0 else "−" + power_of_ten(-value)
    exponent = round(log10(value))
    if not isclose(value, 10.0**exponent, rel_tol=1e-6):
        return tokens(value) if value >= 1 else f"{value:g}"
    if 0 <= exponent <= 5:
        return tokens(10.0**exponent)
    return {-1: "0.1", -2: "0.01"}.get(exponent, "10" + str(exponent).translate(_SUPERSCRIPTS))


def tokens(value: float, _position: Any = None) -> str:
    """A number of tokens or steps in short form: 512, 4k, 1.5k, 2M."""
    rounded = float(f"{value:.3g}")  # 999.7 is 1k
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(rounded) < 1e12:
            return f"{rounded / size:.3g}{letter}"
    return f"{value:.3g}"


def svg(figure: "Figure", name: str, label: str) -> str:
    """A figure as an SVG element for an HTML page; `name` makes its ids unique."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    # Two decimals are enough.
    text = re.sub(r'\b[dxy]="[^"]+"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    for colour, value in LIGHT.items():
        text = text.replace(value, f"var(--{colour})")
    opening, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', opening)
    assert box is not None
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {namespaces} {box[0]} role="img" aria-label="{escape(label, quote=True)}">{rest.strip()}'
