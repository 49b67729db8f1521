"""What tells runs apart, in words and tables: settings that differ, scores by length, the figures of a run."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from gss.accounting import account
from gss.paper import PERPLEXITY
from gss.report.curves import binary
from gss.report.document import Card, Table
from gss.report.run import Run
from gss.report.scores import Scores, same_tokens
from gss.report.theme import run_variable, tokens
from gss.train.config import flattened
from gss.train.progress import duration


def card(run: Run, score: Scores, index: int) -> Card:
    """A run's figures."""
    accounts = account(run.model_config, run.length or 4096)
    facts = [("parameters", tokens(accounts.parameters)), ("state", size(accounts.state_bytes))]
    if run.training:
        facts.append(("loss, last 5%", f"{statistics.fmean(_last(run)):.3f}"))
    if score.result:
        row = score.result.rows[-1]
        where = "whole" if row.length is None else binary(row.length)
        facts.append((f"perplexity, {where}", f"{row.perplexity:.2f}"))
        if not math.isnan(row.bits_per_byte):
            facts.append(("bits a byte", f"{row.bits_per_byte:.3f}"))
    if run.tokens_seen:
        facts.append(("tokens seen", tokens(run.tokens_seen)))
    if run.training:
        speeds = [row["tokens_per_second"] for row in run.training]
        facts.append(("tokens a second", tokens(statistics.median(speeds))))
        facts.append(("time training", duration(sum(run.config["batch_tokens"] / speed for speed in speeds))))
    return Card(run.name, run_variable(index), _about(run), facts)


def _about(run: Run) -> str:
    kinds = " + ".join(
        f"{run.model_config.layers.count(kind)} {kind}" for kind in dict.fromkeys(run.model_config.layers)
    )
    parts = [run.preset or "no preset", f"{kinds} layers"]
    if run.steps:
        parts.append(f"step {run.step:,} of {run.steps:,}")
    if run.environment:
        parts.append(f"{run.environment.get('processes', 1)} × {run.environment.get('device', '?')}")
        parts.append(f"started {str(run.environment.get('started', '?'))[:10]}")
    return " · ".join(parts)


def findings(runs: Sequence[Run], scored: Sequence[Scores]) -> list[str]:
    """What the figures say, in sentences that a person would write."""
    said = []
    for run, score in zip(runs, scored, strict=True):
        rows = [row for row in score.result.rows if row.length] if score.result else []
        if rows:
            first, last = rows[0], rows[-1]
            sentence = f"{run.name} has a perplexity of {last.perplexity:.2f} at {last.length:,} tokens"
            if len(rows) > 1:
                sentence += f", {first.perplexity:.2f} at {first.length:,}"
            if run.length and last.length and last.length > run.length:
                sentence += f"; it was trained at {run.length:,}"
            said.append(sentence + ".")
        elif run.training:
            last_mean = statistics.fmean(_last(run))
            said.append(f"{run.name} is at a loss of {last_mean:.3f} nats a token after {run.step:,} steps.")
    known = [
        (score.result.rows[-1].loss, run.name)
        for run, score in zip(runs, scored, strict=True)
        if score.result and score.result.rows[-1].length == _common(scored)
    ]
    if len(known) > 1 and len(known) == len(runs) and same_tokens(scored):
        (best, winner), (second, _) = sorted(known)[:2]
        where = f"at {_common(scored):,} tokens" if _common(scored) else "on whole documents"
        said.append(f"{winner} is best {where}, {second - best:.3f} nats a token under the next.")
    return said


def _common(scored: Sequence[Scores]) -> int | None:
    """The longest length of the first run with scores."""
    return next((score.result.rows[-1].length for score in scored if score.result), None)


def length_table(runs: Sequence[Run], scored: Sequence[Scores]) -> Table | None:
    """Perplexity by length as in the paper's tables: a row a model, a column a length; the paper's rows below."""
    results = [score.result for score in scored if score.result]
    if not results:
        return None
    papers = {run.preset: PERPLEXITY[run.preset] for run in runs if run.preset in PERPLEXITY}
    ours = {row.length for result in results for row in result.rows}
    theirs = {length for corpora in papers.values() for scores in corpora.values() for length in scores}
    lengths: list[int | None] = [*sorted({length for length in ours if length} | theirs)]
    if None in ours:
        lengths.append(None)
    names = ["whole" if length is None else binary(length) for length in lengths]
    table = Table(["perplexity at", "params", *names, "± loss", "a word", "bits/byte"], [], frozenset())
    quiet = set()
    entropies = {score.unigram_entropy for score in scored if score.result and score.unigram_entropy}
    if len(entropies) == 1 and same_tokens(scored):
        entropy = math.exp(min(entropies.pop() or 0.0, 700.0))
        cells = [f"{entropy:.2f}" if length in ours else "" for length in lengths]
        table.rows.append(["unigrams of the split", "", *cells, "", "", ""])
        quiet.add(0)
    for run, score in zip(runs, scored, strict=True):
        if score.result:
            by_length = {row.length: f"{row.perplexity:.2f}" for row in score.result.rows}
            last = score.result.rows[-1]
            tail = [
                "–" if math.isnan(last.standard_error) else f"{last.standard_error:.3f}",
                "–" if math.isnan(last.word_perplexity) else tokens(last.word_perplexity),
                "–" if math.isnan(last.bits_per_byte) else f"{last.bits_per_byte:.3f}",
            ]
            parameters = tokens(account(run.model_config).parameters)
            table.rows.append([run.name, parameters, *(by_length.get(length, "") for length in lengths), *tail])
    for preset, corpora in papers.items():
        for corpus, paper in corpora.items():
            quiet.add(len(table.rows))
            cells = [f"{paper[length]:g}" if length in paper else "" for length in lengths]
            table.rows.append([f"paper's {preset}, {corpus}", "", *cells, "", "", ""])
    return Table(table.header, table.rows, frozenset(quiet))


def difference_table(runs: Sequence[Run]) -> Table | None:
    """Settings that are not the same in all runs; None for one run, or where all are the same."""
    if len(runs) < 2:
        return None
    flats = [{**flattened(run.config), **flattened({"data": _data(run)})} for run in runs]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    rows: list[Sequence[str]] = [
        [name, *(_value(flat[name]) if name in flat else "–" for flat in flats)]
        for name in names
        if any(flat.get(name) != flats[0].get(name) or (name in flat) != (name in flats[0]) for flat in flats)
    ]
    return Table(["setting", *(run.name for run in runs)], rows, words=True) if rows else None


def settings_table(run: Run) -> Table:
    """What a run was, in the settings that people ask for first."""
    flat = flattened(run.config)
    wanted = ("preset", "seed", "steps", "length", "batch_tokens", "batching", "optimizer.name",
              "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.weight_decay",
              "model.width", "model.depth", "model.channels", "model.state_space.modes",
              "model.vocab_size")  # fmt: skip
    rows: list[Sequence[str]] = [[name, _value(flat[name])] for name in wanted if name in flat]
    if run.data.get("folder"):
        rows.append(["data", f"{run.data['folder']} ({run.data.get('tokens', 0):,} training tokens)"])
    for name in ("gss", "torch"):
        if name in run.environment:
            rows.append([name, str(run.environment[name])])
    return Table(["setting", run.name], rows, words=True)


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def _data(run: Run) -> dict[str, Any]:
    return {name: str(run.data[name])[:12] for name in ("hash", "tokenizer") if run.data.get(name)}


def _last(run: Run) -> list[float]:
    """The losses of the last twentieth of the steps."""
    losses = [row["loss"] for row in run.training]
    return losses[-max(1, len(losses) // 20) :]


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
