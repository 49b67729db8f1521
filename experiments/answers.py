"""Questions about the tables, each answered by a small table and a sentence, from whatever runs there are.

A figure without a run is a dash, and a sentence says no more than its figures.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.records import Collection, Record, minutes, perplexities, speed
from experiments.tables import markdown
from gss.reproduce.settings import SYSTEMS, TARGETS
from gss.reproduce.tables import NONE, WHOLE, mean, millions
from gss.reproduce.trials import Trial

Rows = Sequence[tuple[Trial, Record]]
BLOCK_RECURRENT = ("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip", "slide", "xl")
STATE_SPACE = ("gss", "gss-lanes", "gss-hybrid", "gss-l", "gss-hybrid-l")
AT = ("512", "4096", "16384", "65536")
_LENGTHS = {"512": "512", "4096": "4k", "16384": "16k", "65536": "65k", WHOLE: "whole"}
_FAST = 2.5  # times DSS, our goal


def dss(results: Collection) -> str:
    """Is GSS at or below DSS in perplexity, and how much faster?"""
    header = ["corpus", "GSS 4k", "DSS 4k", "GSS ÷ DSS", "GSS tokens/s", "DSS tokens/s", "times as fast"]
    rows, said = [], []
    for corpus in results.corpora():
        ours, theirs = results.of(corpus, "gss"), results.of(corpus, "dss")
        ratio = ratios(ours, theirs, "4096")
        faster = _over(speed(ours), speed(theirs))
        if not ours and not theirs:
            continue
        row = [corpus, *(mean([*perplexities(part, "4096").values()]) for part in (ours, theirs)), mean(ratio, 4)]
        rows.append([*row, _number(speed(ours), 0), _number(speed(theirs), 0), _number(faster, 2)])
        if ratio and faster is not None:
            below = "at or below" if statistics.fmean(ratio) <= 1 else "above"
            met = "meets" if faster >= _FAST else "misses"
            said.append(
                f"On {corpus} GSS is {below} DSS ({_percent(statistics.fmean(ratio) - 1)}) and trains {faster:.2f}× "
                f"as fast, which {met} our goal of {_FAST}×."
            )
    return _answer(header, rows, said)


def lengths(results: Collection) -> str:
    """Does perplexity keep falling from 4k to 65k, beyond the training length?"""
    steps = (("512", "4096"), ("4096", "16384"), ("4096", "65536"), ("4096", WHOLE))
    header = ["corpus", "model", *(f"{_LENGTHS[before]} to {_LENGTHS[after]}" for before, after in steps)]
    rows: list[list[str]] = []
    compared = False
    worse: list[str] = []
    for corpus in results.corpora():
        for name in _table_systems():
            ours = results.of(corpus, name)
            if not ours:
                continue
            changes = {after: ratios(ours, ours, after, before) for before, after in steps}
            rows.append([corpus, SYSTEMS[name].label, *map(_change, changes.values())])
            if change := changes["65536"]:
                compared = True
                worse += [f"{SYSTEMS[name].label} on {corpus}"] if statistics.fmean(change) > 1 else []
    said = [f"Worse at 65k than at 4k: {', '.join(worse)}."] if worse else []
    said += ["No model is worse at 65k than at 4k."] if compared and not worse else []
    return _answer(header, rows, said)


def hybrid(results: Collection) -> str:
    """What does attention in some layers gain, and does it hold at 65k?"""
    return _pairs(results, (("gss", "gss-hybrid"), ("gss-l", "gss-hybrid-l")), ("512", "4096", "16384", "65536", WHOLE))


def lanes(results: Collection) -> str:
    """What does GSS gain when training carries the state from segment to segment?"""
    return _pairs(results, (("gss", "gss-lanes"),), ("512", "4096", "16384", "65536", WHOLE))


def _pairs(results: Collection, pairs: Sequence[tuple[str, str]], at: Sequence[str]) -> str:
    """The change in perplexity from one system to another, by length, and in speed."""
    header = ["corpus", "model", "instead of", *(_LENGTHS[length] for length in at), "times as fast"]
    rows = []
    for corpus in results.corpora():
        for before, after in pairs:
            base, ours = results.of(corpus, before), results.of(corpus, after)
            if not base or not ours:
                continue
            changes = [ratios(ours, base, length) for length in at]
            label, other = SYSTEMS[after].label, SYSTEMS[before].label
            faster = _number(_over(speed(ours), speed(base)), 2)
            rows.append([corpus, label, other, *map(_change, changes), faster])
    return _answer(header, rows, [])


def block_recurrent(results: Collection) -> str:
    """How does GSS compare with the block-recurrent models at equal parameters? Both families, and the best of each."""
    header = ["corpus", "model", "params", "tokens/s", "minutes", "4k", "whole"]
    rows, said = [], []
    for corpus in results.corpora():
        for name in (*BLOCK_RECURRENT, *STATE_SPACE):
            part = results.of(corpus, name)
            if part:
                scores = [mean([*perplexities(part, at).values()]) for at in ("4096", WHOLE)]
                size, rate = millions(part[0][1]["parameters"]), _number(speed(part), 0)
                rows.append([corpus, SYSTEMS[name].label, size, rate, _number(minutes(part), 1), *scores])
        said += _equal_parameters(results, corpus)
    return _answer(header, rows, said)


def equal_time(results: Collection) -> str:
    """At equal time: beside each block-recurrent model, the best of ours that took no longer to train."""
    header = ["corpus", "model", "minutes", "whole", "ours", "its minutes", "its whole", "change"]
    rows = []
    for corpus in results.corpora():
        for name in BLOCK_RECURRENT:
            part = results.of(corpus, name)
            took, scores = minutes(part), perplexities(part, WHOLE)
            if took is None or not scores:
                continue
            score = statistics.fmean(scores.values())
            best = _best_in(results, corpus, took)
            ours = (
                [NONE] * 4
                if best is None
                else [best[1], f"{best[2]:.1f}", f"{best[0]:.2f}", _percent(best[0] / score - 1)]
            )
            rows.append([corpus, SYSTEMS[name].label, f"{took:.1f}", f"{score:.2f}", *ours])
    return _answer(header, rows, [])


def _equal_parameters(results: Collection, corpus: str) -> list[str]:
    """The best of each family at one size; GSS-L and GSS-Hybrid-L are larger and left out."""
    best = []
    for family in (BLOCK_RECURRENT, STATE_SPACE[:3]):
        scores = {name: perplexities(results.of(corpus, name), WHOLE) for name in family}
        known = {name: statistics.fmean(by_seed.values()) for name, by_seed in scores.items() if by_seed}
        if not known:
            return []
        name = min(known, key=lambda name: known[name])
        best.append((SYSTEMS[name].label, known[name]))
    (theirs, score), (ours, our_score) = best
    return [
        f"On whole documents of {corpus}, at equal parameters and tokens, our best is {ours} ({our_score:.2f}) and the "
        f"best block-recurrent model is {theirs} ({score:.2f}): {_percent(our_score / score - 1)}."
    ]


def _best_in(results: Collection, corpus: str, limit: float) -> tuple[float, str, float] | None:
    """The best of our systems on whole documents that took no longer, of any size and number of tokens: its
    perplexity, name and minutes."""
    found = []
    for tokens in sorted({run.tokens for run, _ in results.found}):
        for name in STATE_SPACE:
            part = results.of(corpus, name, tokens)
            took, scores = minutes(part), perplexities(part, WHOLE)
            if took is not None and took <= limit and scores:
                more = "" if tokens == results.tokens else f", {tokens / 1e6:,.0f}M tokens"
                found.append((statistics.fmean(scores.values()), SYSTEMS[name].label + more, took))
    return min(found, default=None)


def ratios(ours: Rows, theirs: Rows, length: str, their_length: str | None = None) -> list[float]:
    """Perplexity over perplexity: seed by seed where both have the same seeds, else of the means in the tables; empty
    without figures."""
    above, below = perplexities(ours, length), perplexities(theirs, their_length or length)
    if not above or not below:
        return []
    if above.keys() == below.keys():
        return [above[seed] / below[seed] for seed in sorted(above)]
    return [statistics.fmean(above.values()) / statistics.fmean(below.values())]


def _table_systems() -> list[str]:
    return list(dict.fromkeys(s.name for name in ("table1", "table2") for s in TARGETS[name].systems))


def _answer(header: list[str], rows: list[list[str]], said: Sequence[str]) -> str:
    if not rows:
        return "Not run yet."
    return "\n\n".join([markdown(header, rows), "\n".join(f"- {sentence}" for sentence in said)])


def _change(values: Sequence[float]) -> str:
    """A mean ratio as a change in percent, with the standard deviation over seeds."""
    if not values:
        return NONE
    text = _percent(statistics.fmean(values) - 1)
    return text if len(values) == 1 else f"{text} ± {100 * statistics.stdev(values):.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:+.2f}%".replace("-", "−")


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _number(value: Any, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"
