"""Tables of runs of `experiments.quality`: every model with its best settings, all settings, context.

A run is named by its model and by how it differs from that model's usual settings; `legend` explains the names of
settings. A setting without a name here appears in the tables as it is.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.compare import Run, grouped, paired, perplexity
from gss.reproduce.settings import SYSTEMS
from gss.reproduce.tables import LENGTH_NAMES, NONE, markdown, mean, millions

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "quality"
LABELS = {name: system.label for name, system in SYSTEMS.items()}
LABELS |= {"llama": "Llama", "gss2": "GSS2", "mamba2": "Mamba-2", "gated-deltanet": "Gated DeltaNet"}
_START = ("embedding_std=0.02", "head_scale=1.0", "zero_outputs=true")
USUAL = {"llama": _START[2:], "gss": _START, "gss-hybrid": _START, "dss": _START}
"""Settings of all runs of a model that are not in its preset."""
NAMES = {
    "no attention": ("pattern=gss2",),
    "low frequencies": ("state_space.frequency_range=[1e-6,1.0]",),
    "64 modes": ("state_space.modes=64", "feedforward_width=1232"),
    "64 modes, values of 256": (
        "state_space.modes=64",
        "matrix_state.value_width=256",
        "feedforward_width=704",
    ),
    "64 modes, values of 384": (
        "state_space.modes=64",
        "matrix_state.value_width=384",
        "feedforward_width=176",
    ),
    "values of 256": ("matrix_state.value_width=256", "feedforward_width=1056"),
    "multiscale, no skip, no fast modes": (
        "matrix_state.multiscale=true",
        "matrix_state.skip=0",
        "state_space.decay_range=[0.000125,0.05]",
    ),
    "multiscale, no skip": ("matrix_state.multiscale=true", "matrix_state.skip=0"),
    "no skip": ("matrix_state.skip=0",),
    "squared ReLU": ("matrix_state.feature_map=relu2",),
    "forget gates": ("matrix_state.forget_gate=true",),
    "slow decays": ("state_space.decay_range=[3e-5,0.1]",),
    "window 512": ("attention.sliding=512",),
    "16k rows and window": ("length=16384", "attention.sliding=16384"),
    "16k rows and window in the last tenth": ("late_length=16384", "attention.sliding=16384"),
    "16k rows in the last quarter": ("late_length=16384", "late_share=0.25"),
    "16k rows in the last tenth": ("late_length=16384",),
    "8k rows and window in the last quarter": ("late_length=8192", "late_share=0.25", "attention.sliding=8192"),
    "8k rows and window in the last tenth": ("late_length=8192", "attention.sliding=8192"),
    "decay 1.0": ("optimizer.weight_decay=1.0",),
    "dropout": ("dropout=0.15",),
    "Llama's time": ("steps=943",),
    "200 steps": ("steps=200", "optimizer.warmup_steps=25"),
}
"""Names of sets of settings; the first that matches is used first."""
MEANINGS = {
    "no attention": "state spaces in every layer",
    "low frequencies": "half of the modes hardly turn within their lifetime",
    "64 modes": "instead of 32 per head, at equal parameters",
    "64 modes, values of 256": "and 256 numbers per value instead of 128, twice the state, at equal parameters",
    "64 modes, values of 384": "the same with 384 numbers per value",
    "values of 256": "256 numbers per value instead of 128, twice the state, at equal parameters",
    "multiscale, no skip": "the first head has the fastest decays and the last the slowest, and no value goes into its "
    "own output at first",
    "multiscale, no skip, no fast modes": "the same with time constants of 20 to 8,000 tokens instead of 2 to 8,000",
    "no skip": "no value goes into its own output at first",
    "squared ReLU": "as the feature map of queries and keys, instead of swish",
    "forget gates": "a token also chooses how much of each head's state is kept (an option until commit 4f9b0dc)",
    "slow decays": "time constants of 10 to 33,000 tokens",
    "window 512": "instead of 4,096",
    "16k rows and window": "rows and window of 16,384 tokens from the start",
    "16k rows and window in the last tenth": "rows and window of 16,384 tokens in the last tenth of the steps",
    "16k rows in the last quarter": "rows of 16,384 tokens in the last quarter of the steps",
    "16k rows in the last tenth": "rows of 16,384 tokens in the last tenth of the steps",
    "8k rows and window in the last tenth": "rows and window of 8,192 tokens in the last tenth of the steps",
    "8k rows and window in the last quarter": "rows and window of 8,192 tokens in the last quarter of the steps",
    "decay 1.0": "instead of 0.1",
    "dropout": "of what layers add",
    "Llama's time": "so many steps take as long as Llama's 800",
    "200 steps": "a quarter of the usual steps, to compare rates",
}
_OWN_ROW = ("no attention", "Llama's time")
"""Settings that count as a separate model in the table of the best."""
_RATE, _AT, _SAME_SIZE = "6.4e-3", 4096, 0.1
_TEXT = frozenset({"settings", "what it is", "name"})


def corpora(folder: Path) -> dict[str, list[Run]]:
    """Every kept run by corpus, books first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != "books", path.stem))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def model(run: Run) -> str:
    """The model by its name in tables."""
    name = run["system"].partition("+")[0].removesuffix("-small")
    return LABELS.get(name, name)


def settings(run: Run) -> list[str]:
    """How a run differs from others of its model, apart from the seed; by name if there is one."""
    name, *parts = run["system"].split("+")
    left = [part.removeprefix("model.") for part in parts if not part.startswith("seed=")]
    usual = USUAL.get(name.removesuffix("-small"), ())
    found = [f"without `{part}`" for part in usual if part not in left]
    left = [part for part in left if part not in (*usual, f"optimizer.learning_rate={_RATE}")]
    for given, parts in NAMES.items():
        if set(parts) <= set(left):
            found.append(given)
            left = [part for part in left if part not in parts]
    rates = [part.replace("optimizer.learning_rate=", "rate ") for part in left]
    return [*found, *(part if part.startswith("rate ") else f"`{part}`" for part in rates)]


def table(results: Mapping[str, Sequence[Run]], which: str = "report", best: bool = False) -> str:
    """A row for the seeds of every group of settings, or of each model's best alone; scores of one half."""
    header = ["corpus", "model", "settings", "params", "seeds", *LENGTH_NAMES.values(), "÷ Llama at 4k"]
    rows = []
    for corpus, runs in results.items():
        groups = grouped(runs)
        for group in bests(groups) if best else groups:
            own, size = ", ".join(settings(group[0])) or NONE, millions(group[0]["parameters"])
            cells = [mean([perplexity(run, which, length) for run in group]) for length in LENGTH_NAMES]
            rows.append([corpus, model(group[0]), own, size, str(len(group)), *cells, ratio(group, groups, which)])
    return markdown(header, rows, _TEXT) if rows else "Not run yet."


def bests(groups: Sequence[list[Run]]) -> list[list[Run]]:
    """Of groups from best to worst, the best of each model, and the best of those with several seeds; a model with
    some settings counts as a model of its own.
    """
    found: dict[tuple[object, ...], list[Run]] = {}
    for group in groups:
        own = settings(group[0])
        kind = (model(group[0]), group[0]["parameters"] // 10_000_000, *(name for name in _OWN_ROW if name in own))
        if "200 steps" not in own:
            found.setdefault(kind, group)
            if len(group) > 1:
                found.setdefault((*kind, "several seeds"), group)
    return [group for group in groups if any(group is best for best in found.values())]


def summary(folder: Path = RESULTS) -> str:
    """Perplexity over Llama's at 4k by corpus: where both have the same settings, then every model's best otherwise."""
    found = corpora(folder)
    alike: dict[str, dict[str, str]] = {}
    best: dict[str, dict[str, str]] = {}
    for corpus, runs in found.items():
        groups = grouped(runs)
        llamas = {tuple(settings(group[0])): group for group in groups if model(group[0]) == "Llama"}
        for group in groups:
            own = settings(group[0])
            same = llamas.get(tuple(own)) if model(group[0]) == "GSS2" else None
            other = same or (beside(group, groups) if group in bests(groups) else None)
            if other and other is not group:
                row = name(group[0]) + (" in both" if same and own else "")
                seeds = f" ({len(group)} seeds)" if len(group) > 1 else ""
                (alike if same else best).setdefault(row, {})[corpus] = f"{paired(group, other, 'report', _AT)}{seeds}"
    rows = [[row, *(by.get(corpus, NONE) for corpus in found)] for row, by in (alike | best).items()]
    title = "best recipe, ÷ Llama"
    return markdown([title, *found], rows, frozenset({title})) if rows else "Not run yet."


def ratio(group: Sequence[Run], groups: Sequence[Sequence[Run]], which: str = "report") -> str:
    """Perplexity over that of the best Llama of the same size and tokens, or time; NONE without one."""
    llama = beside(group, groups)
    if llama is None:
        return NONE
    return "1" if llama is group else str(paired(group, llama, which, _AT))


def beside(group: Sequence[Run], groups: Sequence[Sequence[Run]]) -> Sequence[Run] | None:
    """The best Llama that a group of runs may be compared with."""
    size, seen, timed = group[0]["parameters"], group[0]["tokens"], "Llama's time" in settings(group[0])
    for other in groups:
        near = abs(other[0]["parameters"] / size - 1) <= _SAME_SIZE and (timed or other[0]["tokens"] == seen)
        scored = all(str(_AT) in run["documents"] for run in (*group, *other))
        if model(other[0]) == "Llama" and near and scored:
            return other
    return None


def legend(folder: Path = RESULTS) -> str:
    """What the names of models and of settings mean."""
    runs = [run for each in corpora(folder).values() for run in each]
    used = dict.fromkeys(name for run in runs for name in settings(run) if name in NAMES)
    rows = [
        [f"every {LABELS[name]}", _code(parts), NONE]
        for name, parts in USUAL.items()
        if LABELS[name] in map(model, runs)
    ]
    rows += [[name, _code(NAMES[name]), MEANINGS[name]] for name in NAMES if name in used]
    return markdown(["name", "settings", "what it is"], rows, _TEXT)


def _code(parts: Sequence[str]) -> str:
    return ", ".join(f"`{part}`" for part in parts)


def sources(folder: Path = RESULTS) -> str:
    """How much was scored, and on what runs were made."""
    lines = []
    for corpus, runs in corpora(folder).items():
        counts = [count for _, count in next(iter(runs[0]["documents"].values()))[1::2]]
        hardware = ", ".join(sorted({run["hardware"].partition(",")[0] for run in runs}))
        lines.append(f"- {corpus}: {sum(counts):,} tokens of {len(counts)} documents; {hardware}.")
    return "\n".join(lines)


def every(folder: Path = RESULTS) -> str:
    """A row for each run; `stream` is the loss of documents one after another, in windows of so many tokens."""
    windows = ("65536", "1048576")
    header = ["corpus", "model", "settings", "seed", *LENGTH_NAMES.values(), "training loss"]
    header += [*(f"stream, {int(window):,}" for window in windows), "commit", "date"]
    rows = []
    for corpus, runs in corpora(folder).items():
        for run in (run for group in grouped(runs) for run in group):
            cells = [corpus, model(run), ", ".join(settings(run)) or NONE, str(run["settings"].get("seed", 0))]
            cells += [mean([perplexity(run, "report", length)]) for length in LENGTH_NAMES]
            losses = (run["train"][-1], *(run.get("stream", {}).get(window) for window in windows))
            rows.append([*cells, *(mean([loss], 3) for loss in losses), run["commit"], run["date"]])
    return markdown(header, rows, _TEXT | {"commit"}) if rows else "Not run yet."


def to_come(lines: Sequence[tuple[str, str]], folder: Path = RESULTS) -> str:
    """Runs (corpus, system) that are planned and have no result."""
    kept = {(corpus, run["system"]) for corpus, runs in corpora(folder).items() for run in runs}
    rows: dict[tuple[str, ...], list[str]] = {}
    for corpus, system in lines:
        if (corpus, system) not in kept:
            run, seed = {"system": system}, [part[5:] for part in system.split("+") if part.startswith("seed=")]
            rows.setdefault((corpus, model(run), ", ".join(settings(run)) or NONE), []).extend(seed or ["0"])
    cells = [[*row, ", ".join(seeds)] for row, seeds in rows.items()]
    return markdown(["corpus", "model", "settings", "seed"], cells, _TEXT) if cells else "None."


# How far back: `context` of a probed run has the loss of 512 tokens of each document by how many true tokens came
# before them, `distances`; those before come from another document. `excess` is how much more it is than with the most.


def probed(folder: Path = RESULTS) -> Iterator[tuple[str, Run]]:
    """The runs that were probed, with their corpora; those of the best settings first."""
    for corpus, runs in corpora(folder).items():
        yield from ((corpus, run) for group in grouped(runs) for run in group if "context" in run)


def shown(folder: Path = RESULTS) -> list[tuple[str, Run]]:
    """Of each model, its best run probed on books and the one that looks farthest back; other corpora have too few
    documents for it.
    """
    kinds: dict[tuple[str, ...], list[tuple[str, Run]]] = {}
    for corpus, run in probed(folder):
        if corpus == "books":
            kind = [name for name in settings(run) if name == "no attention"]
            kinds.setdefault((model(run), *kind), []).append((corpus, run))
    pairs = [(runs[0], max(runs, key=lambda entry: reach(entry[1]) or 0)) for runs in kinds.values()]
    return [entry for first, farthest in pairs for entry in ([first] if first is farthest else [first, farthest])]


def reach(run: Run) -> int | None:
    """The effective context; None where the most context is no better than the least, within three standard errors."""
    found = run["context"]
    return found["effective"] if found["excess"][0] > 3 * found["excess_error"][0] else None


def name(run: Run) -> str:
    """Model and settings."""
    return ", ".join([model(run), *settings(run)])


def tokens(count: int) -> str:
    """A number of tokens in short: 512, 4k, 64k."""
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def context(entries: Sequence[tuple[str, Run]], full: bool = False) -> str:
    """How far back each run looks, and how much worse it is with 512 tokens; `full`: with every number of tokens."""
    header = ["corpus", "model", "settings", "looks back", "worse with 512 tokens"]
    header = [*header[:3], "seed", "effective", "95% interval", *map(tokens, _distances(entries))] if full else header
    rows = []
    for corpus, run in entries:
        found, far = run["context"], reach(run)
        cells = [corpus, model(run), ", ".join(settings(run)) or NONE]
        worse = [f"{math.expm1(excess):.1%}".replace("-0.0%", "0.0%").replace("-", "−") for excess in found["excess"]]
        if full:
            low, high = found["interval"]
            effective = NONE if found["effective"] is None else f"{found['effective']:,}"
            cells += [str(run["settings"].get("seed", 0)), effective, f"{low:,} to {high:,}"]
        else:
            cells.append("nothing measurable" if far is None else f"{far:,} tokens")
        rows.append([*cells, *(worse[:-1] if full else worse[:1])])
    return markdown(header, rows, _TEXT) if rows else "Not run yet."


def _distances(entries: Sequence[tuple[str, Run]]) -> list[int]:
    return entries[0][1]["context"]["distances"][:-1] if entries else []
