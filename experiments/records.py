"""Kept results without their corpora: each with the run that it is of, found by corpus, system and training tokens.

A page of results is made from these files alone, wherever the runs were.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.results import read_result
from experiments.studies import EVERY
from gss.config import from_mapping, to_mapping
from gss.reproduce.settings import SCALES, System
from gss.reproduce.tables import Found
from gss.reproduce.tables import Result as Record
from gss.reproduce.trials import Corpus, Trial, trial_of
from gss.training.config import TrainConfig, differences


def read_results(folder: Path) -> list[tuple[Trial, Record]]:
    """Every result in a folder with its run, by file name."""
    return with_speeds([(recalled(kept), kept) for kept in map(read_result, sorted(folder.glob("*.json")))])


def recalled(kept: Record) -> Trial:
    """The run that a result is of; its corpus has no folder any more."""
    for what, known in (("system", EVERY), ("scale", SCALES)):
        if kept[what] not in known:
            raise ValueError(f"the result {kept['name']} is of a {what} that is not known any more: {kept[what]!r}")
    evaluation, data = kept["evaluation"], kept["data"]
    identity = dict(kept["identity"])
    scored = identity.pop("evaluate_tokens")
    corpus = Corpus(
        name=kept["corpus"],
        folder=Path(),
        vocab_size=data["vocab_size"],
        lossless=evaluation["lossless"],
        identity=identity,
        held_out_tokens=data["held_out_tokens"],
        train_tokens=data["train_tokens"],
        train_bytes=data["train_bytes"],
    )
    config = from_mapping(TrainConfig, kept["config"])
    return Trial(EVERY[kept["system"]], SCALES[kept["scale"]], corpus, config, scored, tuple(kept["changed"]))


class Collection:
    """Results of one scale at its fixed settings."""

    def __init__(self, found: Found, scale: str) -> None:
        self.found = [(run, kept) for run, kept in found if run.scale.name == scale and not run.changed]
        self.scale = SCALES[scale]
        counts = Counter(run.tokens for run, _ in self.found)
        self.tokens = max(counts, key=lambda tokens: (counts[tokens], tokens), default=self.scale.tokens)
        """That most runs saw: what tables compare at."""
        self._same: dict[tuple[str, str], bool] = {}

    def of(self, corpus: str, system: str, tokens: int | None = None) -> list[tuple[Trial, Record]]:
        """A system's results on a corpus, by seed. As when runs are skipped, the settings decide and not the name: a
        run of another table with all the same settings counts, one with settings that have moved since does not."""
        wanted = EVERY[system]
        there: dict[int, tuple[Trial, Record]] = {}
        for run, kept in self.found:
            if run.corpus.name == corpus and run.tokens == (tokens or self.tokens) and self._is(run, wanted):
                there.setdefault(run.config.seed, (replace(run, system=wanted), kept))
        return [there[seed] for seed in sorted(there)]

    def stale(self) -> list[str]:
        """Names of results whose system has other settings by now."""
        return [run.name for run, _ in self.found if not self._is(run, run.system)]

    def _is(self, run: Trial, system: System) -> bool:
        key = run.name, system.name
        if run.system.model != system.model:
            return False
        if key not in self._same:
            wanted = trial_of(system, run.scale, run.corpus, run.config.seed, run.tokens)
            self._same[key] = not differences(to_mapping(run.config), wanted.config)
        return self._same[key]

    def corpora(self) -> list[str]:
        """For each of the paper's corpora the one of ours that has most runs, then any others: a row group each."""
        counts = Counter(run.corpus.name for run, _ in self.found)
        papers = {run.corpus.name: run.corpus.paper or run.corpus.name for run, _ in self.found}
        best: dict[str, str] = {}
        for name in sorted(counts, key=lambda name: (-counts[name], len(name), name)):
            best.setdefault(papers[name], name)
        return [best[paper] for paper in sorted(best, key=_paper_order)]


def _paper_order(paper: str) -> tuple[int, str]:
    known = ("LM1B", "PG-19", "ArXiv", "Github")
    return (known.index(paper) if paper in known else len(known), paper)


def perplexities(rows: Sequence[tuple[Trial, Record]], length: str) -> dict[int, float]:
    """Perplexity at a length by seed, where there is one."""
    scores = {run.config.seed: kept["lengths"].get(length, {}).get("perplexity") for run, kept in rows}
    return {seed: score for seed, score in scores.items() if score is not None}


def with_speeds(found: Found) -> list[tuple[Trial, Record]]:
    """The results, those that shared their device with the speed of runs of the same shape that had it alone."""
    alone: dict[tuple[str, str], list[float]] = {}
    for _, kept in found:
        if kept["tokens_per_second"] is not None:
            alone.setdefault(_kind(kept), []).append(kept["tokens_per_second"])
    medians = {kind: statistics.median(speeds) for kind, speeds in alone.items()}
    return [
        (run, kept if kept["tokens_per_second"] else {**kept, "tokens_per_second": medians.get(_kind(kept))})
        for run, kept in found
    ]


def shape(config: Mapping[str, Any]) -> str:
    """What of a config its speed depends on, as a key: everything but how parameters start and how they learn."""
    model = {name: value for name, value in config["model"].items() if name != "state_space"}
    model["modes"] = config["model"]["state_space"]["modes"]
    wanted = {name: config[name] for name in ("preset", "length", "batch_tokens", "batching")}
    return json.dumps([wanted, model, config["optimizer"]["name"]], sort_keys=True)


def _kind(kept: Record) -> tuple[str, str]:
    return kept["hardware"], shape(kept["config"])


def speed(rows: Sequence[tuple[Trial, Record]]) -> float | None:
    """Training tokens a second: the median over seeds; None where none was measured."""
    known = [kept["tokens_per_second"] for _, kept in rows if kept["tokens_per_second"] is not None]
    return statistics.median(known) if known else None


def minutes(rows: Sequence[tuple[Trial, Record]]) -> float | None:
    """That the steps take at that speed, without compiling, scoring and checkpoints."""
    rate = speed(rows)
    return None if rate is None else rows[0][0].tokens / rate / 60
