"""The best-recipe tables of docs/results.md and README.md, from results of `experiments.quality`.

Settings are chosen on one half of the held-out documents and reported on the other, as in `quality`.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import quality
from experiments.tables import markdown
from gss.reproduce.settings import SYSTEMS
from gss.reproduce.tables import LENGTH_NAMES, NONE, mean, millions

Run = dict[str, Any]
_LABELS = {"llama": "Llama", "gss2": "GSS2", "mamba2": "Mamba-2", "gated-deltanet": "Gated DeltaNet"}
_PAIRED_AT = 4096
_EQUAL_TIME = "steps=943"  # of GSS2 take as long as Llama's 800: 116.0 and 136.8 ms (gss2-h200.json)
_SAME_SIZE = 0.1  # models are compared when their numbers of parameters differ by no more than this share


def corpora(folder: Path) -> dict[str, list[Run]]:
    """Every kept run by corpus, books first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != "books", path.stem))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def best(folder: Path = quality.RESULTS) -> str:
    """A row per corpus and model, with the settings that were best on the documents to choose by."""
    header = ["corpus", "model", "params", "tokens", "seeds", *LENGTH_NAMES.values(), "÷ Llama at 4k", "settings"]
    rows = []
    for corpus, runs in corpora(folder).items():
        models = list(_models(runs))
        for group in models:
            settings = group[0]["settings"]
            own = [f"rate {settings['optimizer.learning_rate']}", *(f"`{change}`" for change in changes(group[0]))]
            size, seen = millions(group[0]["parameters"]), f"{group[0]['tokens'] / 1e6:,.0f}M"
            cells = [corpus, label(group[0]), size, seen, str(len(group)), *_perplexities(group)]
            rows.append([*cells, _ratio(group, models), ", ".join(own)])
    return markdown(header, rows) if rows else "Not run yet."


def headline(folder: Path = quality.RESULTS) -> str:
    """The shortest table: the first corpus alone, without settings."""
    header = ["model", "params", "seeds", *LENGTH_NAMES.values(), "÷ Llama at 4k"]
    models = list(_models(next(iter(corpora(folder).values()), [])))
    most = max((group[0]["tokens"] for group in models), default=0)
    models = [group for group in models if 2 * group[0]["tokens"] > most]  # no short trials of rates
    rows = [
        [
            label(run := group[0]),
            millions(run["parameters"]),
            str(len(group)),
            *_perplexities(group),
            _ratio(group, models),
        ]
        for group in models
    ]
    return markdown(header, rows) if rows else "Not run yet."


def label(run: Run) -> str:
    """A model by the name that tables have for it."""
    name, *parts = run["system"].split("+")
    name = name.removesuffix("-small")
    shown = SYSTEMS[name].label if name in SYSTEMS else _LABELS.get(name, name)
    patterns = [part.split("=")[1] for part in parts if part.startswith("model.pattern=")]
    notes = [f"{patterns[0]} layers only"] if patterns else []
    notes += ["Llama's training time"] if _EQUAL_TIME in parts else []
    return f"{shown} ({', '.join(notes)})" if notes else shown


def _models(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """The seeds of each model's best settings; a model of another pattern or number of tokens is one of its own."""
    seen = set()
    for group in quality.grouped(runs):  # best first
        key = (label(group[0]), group[0]["parameters"] // 10_000_000, group[0]["tokens"])
        if key not in seen:
            seen.add(key)
            yield group


def changes(run: Run) -> list[str]:
    """A system's settings besides its rate, its seed and what its label says."""
    other = ("optimizer.learning_rate=", "seed=", "model.pattern=", _EQUAL_TIME)
    parts = run["system"].split("+")[1:]
    return [part.removeprefix("model.") for part in parts if not part.startswith(other)]


def _perplexities(group: Sequence[Run]) -> list[str]:
    return [mean([quality.perplexity(run, "report", length) for run in group]) for length in LENGTH_NAMES]


def _ratio(group: Sequence[Run], models: Sequence[Sequence[Run]]) -> str:
    """Perplexity over that of the Llama of the same size and tokens, or time, paired by document; NONE without one."""
    size, seen, timed = group[0]["parameters"], group[0]["tokens"], _EQUAL_TIME in group[0]["system"]
    for other in models:
        near = abs(other[0]["parameters"] / size - 1) <= _SAME_SIZE and (timed or other[0]["tokens"] == seen)
        scored = all(str(_PAIRED_AT) in run["documents"] for run in (*group, *other))
        if other[0]["system"].startswith("llama") and near and scored:
            if other is group:
                return "1"
            found = quality.paired(group, other, "report", _PAIRED_AT)
            return f"{found.ratio:.3f} ± {found.standard_error:.3f}"
    return NONE
