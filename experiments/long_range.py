"""The long-range sections of docs/results.md: effective context, and recall on generated tasks.

Effective contexts come from results of `experiments.quality` that have a key `context`:
`{"distances": [...], "loss": [...], "effective": tokens, "interval": [low, high]}`. `loss` is in nats per token of the
last 512 tokens of a window in which only `distances` true tokens came before them. Without such a result the section is
empty. Recall comes from `experiments.recall`.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import quality, recall
from experiments.best_recipe import Run, changes, corpora, label
from experiments.page_plots import STYLES, Picture, finished, subplots
from experiments.tables import markdown
from gss.report.theme import logarithmic, require_matplotlib, run_colour, style
from gss.reproduce.tables import NONE, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXT = "context"  # the name of the figure
_SHORT = {
    "state_space.frequency_range=[1e-6,1.0]": "low frequencies",
    "state_space.modes=64": "64 modes",
    "feedforward_width=1232": "",  # so that the parameters stay as many
    "length=16384": "rows and window 16,384",
    "late_length=16384": "16,384 at the end",
    "attention.sliding=16384": "",  # said with the rows
}
"""Settings as the figure has them."""
_CAPTION = "Loss by the number of true tokens before the last 512"
_TEXT = """## How far back does it look?

The figure has the loss of the last 512 tokens of a window by the number of true tokens before them; the tokens before
those come from another document. The effective context is the number of true tokens beyond which at most 5% is left of
the gain from the fewest true tokens in the figure to the most, with the interval of 95% of resampled documents
([method](probe.md))."""


def context(folder: Path, images: str) -> str:
    """The section with its heading, one figure and one table; empty when no run has an effective context."""
    header = ["corpus", "model", "seed", "effective context", "95% interval", "gain, nats", "settings"]
    rows = []
    for corpus, run in with_context(folder):
        found = run["context"]
        low, high = found["interval"]
        gain = f"{max(found['loss']) - found['loss'][-1]:.3f}"
        seed = str(run["settings"].get("seed", 0))
        effective = NONE if found["effective"] is None else f"{found['effective']:,}"
        cells = [corpus, label(run), seed, effective, f"{low:,} to {high:,}", gain]
        rows.append([*cells, ", ".join(f"`{change}`" for change in changes(run)) or NONE])
    if not rows:
        return ""
    shown = f"![{_CAPTION}]({images})"
    return "\n\n".join([_TEXT, shown, markdown(header, rows)])


def context_picture(folder: Path = quality.RESULTS) -> Picture | None:
    """Loss of the last 512 tokens by the number of true tokens before them; None where no run has it."""
    entries = list(with_context(folder))
    if not entries:
        return None
    require_matplotlib()
    with style():
        panels = subplots(1, 7.0)
        draw_context(panels[0], entries)
        return finished(panels, _CAPTION)


def draw_context(axes: "Axes", entries: Sequence[tuple[str, Run]]) -> None:
    """A line per run; runs that differ in their seed alone share a name."""
    names: list[str] = []
    for corpus, run in entries:
        name = _short_name(corpus, run, entries)
        first = name not in names
        names += [name] if first else []
        index = names.index(name)
        look: dict[str, Any] = {"color": run_colour(index), "linestyle": STYLES[index // 8 % len(STYLES)]}
        found, shown = run["context"], name if first else "_"
        axes.plot(found["distances"], found["loss"], marker="o", markersize=3, label=shown, **look)
    distances = sorted({at for _, run in entries for at in run["context"]["distances"]})
    axes.set(xlabel="true tokens before", ylabel="loss of the last 512 tokens (nats per token)")
    logarithmic(axes.xaxis)
    axes.set_xticks(distances, [f"{at // 1024}k" if at % 1024 == 0 else f"{at:,}" for at in distances])
    axes.set_xticks([], minor=True)


def _short_name(corpus: str, run: Run, entries: Sequence[tuple[str, Run]]) -> str:
    """What tells a run from the others of the figure: its model, and the corpus and settings where these differ."""
    own = [
        _SHORT.get(change, change.partition("=")[0].rpartition(".")[2] + change[change.index("=") :])
        for change in changes(run)
    ]
    own = [name for name in own if name]
    alike = [changes(other) for where, other in entries if (where, label(other)) == (corpus, label(run))]
    name = label(run).replace("GSS2 (gss2 layers only)", "pure GSS2")
    parts = [name, *([corpus] if len({where for where, _ in entries}) > 1 else [])]
    return ", ".join([*parts, *(own if any(other != changes(run) for other in alike) else [])])


def recalled(folder: Path = recall.RESULTS) -> str:
    """Accuracy on generated tasks, a row per study and length, ± over seeds."""
    header = ["study", "layers", "params", "trained at", "tested at", "seeds", "accuracy, %", "all answers right, %"]
    studies: dict[str, list[Run]] = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        studies.setdefault(run["study"], []).append(run)
    rows = []
    for study, runs in studies.items():
        model = runs[0]["model"]
        layers = f"{model['depth']} × {', '.join(model['pattern'])}"
        for index, tested in enumerate(runs[0]["accuracy"]):
            found = [run["accuracy"][index] for run in runs]
            shares = [mean([100 * each[key] for each in found]) for key in ("accuracy", "solved")]
            cells = [f"`{study}`", layers, f"{runs[0]['parameters']:,}", f"{runs[0]['length']:,}"]
            rows.append([*cells, f"{tested['length']:,}", str(len(runs)), *shares])
    return markdown(header, rows) if rows else "Not run yet."


def with_context(folder: Path) -> Iterator[tuple[str, Run]]:
    """The kept runs that were probed, with their corpora."""
    for corpus, runs in corpora(folder).items():
        yield from ((corpus, run) for run in runs if "context" in run)
