"""Tables of runs of `gss reproduce`: the paper's models, and what was varied about them.

A run is its result file, NAME.json or NAME/result.json, whose name has the corpus, the system, the scale, the steps and
the seed. Tables compare runs of the same number of training tokens.
"""

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gss.paper import PERPLEXITY
from gss.reproduce.settings import SYSTEMS, paper_corpus
from gss.reproduce.tables import LENGTH_NAMES, NONE, WHOLE, markdown, mean, millions

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "reproduce"
Run = dict[str, Any]
TOKENS = 104_857_600
AT = {**{str(length): shown for length, shown in LENGTH_NAMES.items()}, WHOLE: WHOLE}
MODELS = (
    "transformer", "dss", "gss", "gss-hybrid", "gss-lanes", "rec-fixed-skip", "feedback-lstm-single",
    "feedback-fixed-skip", "slide", "xl", "gss-l", "gss-hybrid-l",
)  # fmt: skip
_IN_LANES = ("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip")
PAIRS = (
    ("gss", "dss"), ("gss", "transformer"), ("gss-hybrid", "gss"), ("gss-hybrid", "transformer"),
    ("gss-hybrid-l", "gss-l"), ("gss-hybrid", "rec-fixed-skip"), ("gss-lanes", "gss"),
)  # fmt: skip
"""A model, and the one that it is set beside."""
SAME = {"gss-0.0016": "init-half-low-frequencies", "gss-hybrid-0.0016": "init-hybrid-half-low-frequencies"}
"""Two names of one thing: the default start at the rate that starts are compared at."""
RATES = {"6.4e-3": "-0.0064", "3.2e-3": "", "1.6e-3": "-0.0016", "0.8e-3": "-0.0008"}
STARTS = {
    "half-low-frequencies": "one half exp(N(0,1)), the other log-uniform from 0.01 to 0.3; the default",
    "low-frequencies": "log-uniform from 0.001 to π",
    "low-and-slow": "log-uniform from 0.001 to π, time constants up to 4,000 tokens",
    "lower-frequencies": "log-uniform from 0.0001 to π",
    "1-1000": "exp(N(0,1)); the first start",
    "1-4000": "exp(N(0,1)), time constants up to 4,000 tokens, the training length",
    "1-100": "exp(N(0,1)), time constants up to 100 tokens",
    "loud": "exp(N(0,1)), C ÷ N for all modes: the slow ones have most of the energy",
    "quiet": "half exp(N(0,1)) with C ÷ √N, half of 10 to 1,000 tokens at 0.3 of equal energy",
}
"""Frequencies of the modes, and what differs from time constants of 1 to 1,000 tokens and equal energies."""
_NAME = re.compile(r"([^.]+)\.(.+)\.(\w+)\.\d+steps\.seed(\d+)(.*)")
_TEXT = frozenset({"instead of", "start", "frequencies", "run", "vocabulary"})


def read(folder: Path = RESULTS) -> list[Run]:
    """Every result at the scale `small`; `speed` is that of runs of the same shape that had their device alone."""
    runs = []
    for path in [*sorted(folder.glob("*.json")), *sorted(folder.glob("*/result.json"))]:
        name = path.stem if path.parent == folder else path.parent.name
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"{path} is not named as a run of gss reproduce: CORPUS.SYSTEM.SCALE.Nsteps.seedN")
        corpus, system, scale, seed, changed = found.groups()
        if scale == "small":
            kept = json.loads(path.read_text(encoding="utf-8"))
            runs.append({**kept, "name": name, "corpus": corpus, "system": system + changed, "seed": int(seed)})
    alone: dict[str, list[float]] = {}
    for run in runs:
        if run["tokens_per_second"]:
            alone.setdefault(_shape(run), []).append(run["tokens_per_second"])
    medians = {shape: statistics.median(speeds) for shape, speeds in alone.items()}
    return [{**run, "speed": run["tokens_per_second"] or medians.get(_shape(run))} for run in runs]


def _shape(run: Run) -> str:
    """What speed depends on: everything but how parameters start and how they learn."""
    config = run["config"]
    model = {name: value for name, value in config["model"].items() if name != "state_space"}
    model["modes"] = config["model"]["state_space"]["modes"]
    wanted = {name: config[name] for name in ("preset", "length", "batch_tokens", "batching")}
    return json.dumps([run["hardware"], wanted, model, config["optimizer"]["name"]], sort_keys=True)


def of(runs: Sequence[Run], corpus: str, system: str) -> list[Run]:
    """A system's runs on a corpus, by seed."""
    names = {system, SAME.get(system)} | {name for name, other in SAME.items() if other == system}
    found = [run for run in runs if run["corpus"] == corpus and run["system"] in names and run["tokens"] == TOKENS]
    return sorted(found, key=lambda run: run["seed"])


def corpora(runs: Sequence[Run]) -> list[str]:
    """Those of the paper's models, books first."""
    there = {run["corpus"] for run in runs if run["system"] in MODELS}
    return sorted(there, key=lambda name: (not name.startswith("books"), name))


def scores(part: Sequence[Run], length: str, key: str = "perplexity") -> list[float]:
    """One per seed, where there is one."""
    found = [run["lengths"].get(length, {}).get(key) for run in part]
    return [score for score in found if score is not None]


def speed(part: Sequence[Run]) -> float | None:
    """Training tokens per second: the median over seeds."""
    known = [run["speed"] for run in part if run["speed"]]
    return statistics.median(known) if known else None


def there(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[Run]]]:
    """Corpus, system and runs of all of the paper's models that were run."""
    for corpus in corpora(runs):
        for system in MODELS:
            if part := of(runs, corpus, system):
                yield corpus, system, part


def models(runs: Sequence[Run]) -> str:
    """The paper's models on every corpus, with the paper's own perplexity."""
    header = ["corpus", "model", "params", "seeds", "tokens/s", *AT.values(), "paper's 4k"]
    rows = []
    for corpus, system, part in there(runs):
        paper = PERPLEXITY.get(system, {}).get(paper_corpus(corpus) or "", {}).get(4096)
        cells = [corpus, SYSTEMS[system].label, millions(part[0]["parameters"]), str(len(part)), mean([speed(part)], 0)]
        rows.append([*cells, *(mean(scores(part, at)) for at in AT), mean([paper])])
    return _table(header, rows)


def pairs(runs: Sequence[Run]) -> str:
    """The change in perplexity from one model to another, by length, and in speed."""
    at = ("512", "4096", "65536")
    rows = []
    for ours, other in PAIRS:
        for corpus in corpora(runs):
            part, base = of(runs, corpus, ours), of(runs, corpus, other)
            if part and base:
                fast, slow = speed(part), speed(base)
                cells = [change(ratios(scores(part, length), scores(base, length))) for length in at]
                cells.append(f"{fast / slow:.2f}" if fast and slow else NONE)
                rows.append([corpus, SYSTEMS[ours].label, SYSTEMS[other].label, *cells])
    return _table(["corpus", "model", "instead of", *(AT[length] for length in at), "times as fast"], rows)


def summary(runs: Sequence[Run]) -> str:
    """Perplexity at 4k over that of another model, ± over seeds."""
    names = corpora(runs)
    rows = []
    for ours, other in PAIRS:
        parts = [(scores(of(runs, name, ours), "4096"), scores(of(runs, name, other), "4096")) for name in names]
        cells = [mean(ratios(*part), 3) for part in parts]
        if cells.count(NONE) < len(cells):
            rows.append([f"{SYSTEMS[ours].label} ÷ {SYSTEMS[other].label}", *cells])
    return _table(["paper's recipe", *names], rows)


def lengths(runs: Sequence[Run]) -> str:
    """The change in perplexity from a shorter evaluation length to a longer one, where the paper has it too."""
    steps = ((512, 4096), (4096, 16_384), (4096, 65_536))
    rows = []
    for corpus, system, part in there(runs):
        paper = PERPLEXITY.get(system, {}).get(paper_corpus(corpus) or "", {})
        known = [{n: scores(part, str(n)) for n in LENGTH_NAMES}, {n: [score] for n, score in paper.items()}]
        ours, theirs = ([change(ratios(at.get(b, []), at.get(a, []))) for a, b in steps] for at in known)
        if theirs.count(NONE) < len(theirs):
            rows.append([corpus, SYSTEMS[system].label, *ours, *theirs])
    names = [f"{LENGTH_NAMES[a]} to {LENGTH_NAMES[b]}" for a, b in steps]
    return _table(["corpus", "model", *names, *(f"paper: {name}" for name in names)], rows)


def rates(runs: Sequence[Run]) -> str:
    """Perplexity at 4k by learning rate and optimizer; in lanes, Adafactor has the rate that was released, and ten
    times that."""
    ends = [*RATES.values(), "-embedding-1"]
    plain = [system for system in MODELS if system not in _IN_LANES]
    first = _by_ending(runs, plain, ends, ["corpus", "AdamW", *RATES, "1.6e-3, embedding × 1"])
    ends = ["", "-adafactor-0.01", "-adamw-0.0016"]
    header = ["corpus", "in lanes", "Adafactor, 0.1", "Adafactor, 0.01", "AdamW, 1.6e-3"]
    return f"{first}\n\n{_by_ending(runs, _IN_LANES, ends, header)}"


def _by_ending(runs: Sequence[Run], systems: Sequence[str], ends: Sequence[str], header: list[str]) -> str:
    """Perplexity at 4k of systems whose names end in these ways, where there are at least two; all with one start."""
    rows = []
    for corpus in corpora(runs):
        for system in systems:
            parts = [of(runs, corpus, system + end) for end in ends]
            start = next((_start(run) for part in parts for run in part), None)
            cells = [mean(scores([run for run in part if _start(run) == start], "4096")) for part in parts]
            if len(cells) - cells.count(NONE) > 1:
                rows.append([corpus, SYSTEMS[system].label, *cells])
    return _table(header, rows)


def _start(run: Run) -> Any:
    """How a GSS model's state spaces start: the default moved between runs, and a rate compares like with like."""
    return run["config"]["model"]["state_space"] if run["system"].startswith(("gss", "init")) else None


def starts(runs: Sequence[Run]) -> str:
    """How state spaces start: perplexity, and the time constant that 5% of the modes exceed, before and after."""
    header = ["model", "start", "seeds", *AT.values(), "slow before", "after", "frequencies"]
    rows = []
    for prefix, label in (("init", "GSS"), ("init-hybrid", "GSS-Hybrid")):
        for start, what in STARTS.items():
            if part := of(runs, "books", f"{prefix}-{start}"):
                slow = [_slow(part, when) for when in ("start", "end")]
                rows.append([label, start, str(len(part)), *(mean(scores(part, at)) for at in AT), *slow, what])
    return _table(header, rows)


def _slow(part: Sequence[Run], when: str) -> str:
    """The median over layers and seeds."""
    return (
        f"{statistics.median(layer['quantiles']['0.95'] for run in part for layer in run['time_constants'][when]):,.0f}"
    )


def vocabularies(runs: Sequence[Run]) -> str:
    """T5's vocabulary and a lossless one of our own, in bits per byte at 4k."""
    header = ["corpus", "vocabulary", "bytes/token", "dropped", "per byte of the text", "per byte of the tokens' text"]
    rows = []
    for corpus in corpora(runs):
        for label, part in (
            ("T5's", of(runs, corpus, "gss-0.0016")), ("our own", of(runs, f"{corpus}-own", "vocabulary"))
        ):  # fmt: skip
            if part:
                scored = part[0]["evaluation"]
                raw, back = scored["raw_bytes"], scored["given_back_bytes"]
                bits = [mean(scores(part, "4096", f"bits_per_{kind}_byte"), 4) for kind in ("raw", "given_back")]
                rows.append([corpus, label, f"{raw / scored['tokens']:.2f}", f"{1 - back / raw:.1%}", *bits])
    return _table(header, rows)


def every(runs: Sequence[Run]) -> str:
    """A row for every run."""
    header = ["run", "params", "tokens", "tokens/s", "GB", *AT.values(), "commit", "date"]
    rows = []
    for run in runs:
        memory = run["peak_memory_bytes"]
        cells = [f"`{run['name']}`", millions(run["parameters"]), f"{run['tokens'] / 1e6:,.0f}M"]
        cells += [mean([run["tokens_per_second"]], 0), mean([memory and memory / 1e9], 1)]
        cells += [mean(scores([run], at)) for at in AT]
        rows.append([*cells, run["commit"] or NONE, run["date"][:10]])
    return _table(header, rows)


def sources(runs: Sequence[Run]) -> str:
    """How much was scored, and where the runs were made."""
    lines = []
    for corpus in dict.fromkeys(run["corpus"] for run in runs):
        part = [run for run in runs if run["corpus"] == corpus and run["tokens"] == TOKENS]
        if part:
            scored = part[0]["evaluation"]
            facts = f"{scored['tokens']:,} tokens of {scored['documents']} documents ({scored['precision']})"
            lines.append(f"- {corpus}: read {part[0]['epochs']:.2f} times in training; scored on {facts}.")
    made = sorted({(run["hardware"], f"torch {run['versions']['torch']}") for run in runs})
    return "\n".join([*lines, *(f"- {', '.join(each)}." for each in made)])


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Seed by seed where both have as many seeds, else of the means; empty without figures."""
    if not above or not below:
        return []
    if len(above) == len(below):
        return [a / b for a, b in zip(above, below, strict=True)]
    return [statistics.fmean(above) / statistics.fmean(below)]


def change(values: Sequence[float]) -> str:
    """A mean ratio as a change in percent, with the standard deviation over seeds."""
    if not values:
        return NONE
    text = f"{100 * (statistics.fmean(values) - 1):+.2f}%".replace("-", "−")
    return text if len(values) == 1 else f"{text} ± {100 * statistics.stdev(values):.2f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    return markdown(header, rows, _TEXT | {"AdamW", "in lanes", "commit", "paper's recipe"}) if rows else "Not run yet."
