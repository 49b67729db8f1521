"""Every row of the speed table, measured in one run on one GPU together with the peers.

    python -m experiments.h200 --out benchmarks/results/h200.json [SECTION …] [--commit ID] [--repeats 10]

Sections: train long decode prefill hybrid dss errors families peers; by default all of them. They use the functions of
`gss bench`: correctness first, medians, fresh models, and the machine's peak rates in the same run. The file is written
after every section, so a run that is cut short keeps its results; a section that fails gets a row that says why.
`--trial` runs everything with tiny presets and short lengths on any machine.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from experiments.ceilings import Ceilings, measure_ceilings
from experiments.foreign import FOREIGN, decode_foreign, prefill_foreign, train_foreign
from experiments.layer import bench_layer
from experiments.measurements import (
    Measurement,
    TrainingSpeed,
    attempted,
    document,
    measurements,
    reason,
    table,
)
from experiments.parts import Parts
from experiments.pypi_gss import pypi_part
from gss.bench.check import check_training
from gss.bench.machine import release
from gss.bench.models import bench_decode, bench_prefill, measure_training
from gss.io.devices import pick_device
from gss.ops import fast
from gss.presets import preset


@dataclass
class SpeedTable:
    """The settings of a run and what it has found so far."""

    device: torch.device
    ceilings: Ceilings
    repeats: int
    trial: bool
    rows: list[Measurement] = field(default_factory=list)
    """Everything measured, in order."""
    goals: list[Measurement] = field(default_factory=list)
    """The table's rows."""
    best: dict[str, TrainingSpeed] = field(default_factory=dict)
    """The fastest shape of each model at the usual length, by the model's name."""
    compiled: bool = True
    """Whether our state-space models are faster compiled; found out by the train section."""

    @property
    def suffix(self) -> str:
        return "-tiny" if self.trial else ""

    @property
    def length(self) -> int:
        return 256 if self.trial else 4096

    @property
    def long(self) -> int:
        return 1024 if self.trial else 65_536

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 2, 3) if self.trial else (8, 16, 32)

    def train(self, name: str, batch: int, length: int, compiled: bool, use_fast: bool = True) -> TrainingSpeed | None:
        """Measure, keep the rows, remember the best; None where it failed."""
        where, like = f"{batch}×{length}", preset(f"gss{self.suffix}")
        common = (batch, length, self.device, compiled, self.repeats)
        how = f", {'compiled' if compiled else 'eager'}{'' if use_fast else ', plain paths'}"
        try:
            with nullcontext() if use_fast else fast.disabled():
                if name in FOREIGN:
                    found = train_foreign(name, like, *common)
                else:
                    found = TrainingSpeed(*measure_training(name, *common, like.vocab_size))
        except Exception as error:  # out of memory, a peer that is not installed: a row that says so
            self.keep([Measurement(f"training {name}, {where}{how}", None, "tokens/s", note=reason(error))])
            return None
        self.keep(found.rows(name, where + how, self.ceilings.square))
        if length == self.length and use_fast:
            before = self.best.get(name)
            if before is None or found.tokens_per_second > before.tokens_per_second:
                self.best[name] = found
        return found

    def keep(self, rows: Iterable[Measurement], goals: bool = False) -> None:
        """Keep rows and show them at once."""
        for row in rows:
            (self.goals if goals else self.rows).append(row)
            print(table([row]).splitlines()[-1], flush=True)

    def goal(
        self, name: str, value: float | None, unit: str, goal: float, note: str = "", like: Measurement | None = None
    ) -> None:
        """Keep a row of the table."""
        row = Measurement(name, value, unit, goal, note=note)
        self.keep([replace(row, peer=like.peer, ratio=like.ratio) if like else row], goals=True)


def errors(run: SpeedTable) -> None:
    """Each path's error against float64: the state space, the layer, loss and gradients of the whole model."""
    shapes = ((2, run.length), (1, run.long))
    config = preset(f"gss{run.suffix}", norm_epsilon=1e-5)
    found = bench_layer(config, shapes, run.device, rivals={"pypi-gss": pypi_part}, repeats=run.repeats)
    run.keep(row for row in found if row.unit != "relative error")
    run.keep((row for row in found if row.unit == "relative error"), goals=True)
    for name in ("gss", "gss-hybrid", "dss"):
        for row in measurements(check_training(preset(name + run.suffix), run.device, run.length)):
            what = row.name.replace("the", f"{name}'s")
            run.keep([replace(row, name=what, note=f"against float64; {row.note} in bf16")], goals=True)
        release(run.device)


def train(run: SpeedTable) -> None:
    """GSS at the usual length, its best batch and whether compiling helps; PyPI's GSS and a compiled Transformer."""
    name, middle = f"gss{run.suffix}", run.batches[1]
    eager = run.train(name, middle, run.length, compiled=False)
    compiled = run.train(name, middle, run.length, compiled=True)
    run.compiled = eager is None or (compiled is not None and compiled.tokens_per_second > eager.tokens_per_second)
    at_middle = compiled if run.compiled else eager
    for batch in run.batches:
        if batch != middle:
            run.train(name, batch, run.length, run.compiled)
    run.train(name, middle, run.length, run.compiled, use_fast=False)
    for batch in run.batches[:2]:
        run.train("pypi-gss", batch, run.length, compiled=False)
    for batch in run.batches[1:]:
        run.train(f"transformer{run.suffix}", batch, run.length, compiled=True)
    ours = run.best[name]
    where = f"L={run.length}, best batch"
    run.goal(f"training gss, {where}", ours.tokens_per_second, "tokens/s", 430_000)
    mfu = _mfu(run, ours)
    run.goal(f"MFU of gss, {where}", mfu, "of matmul rate", 0.65, "6·parameters·tokens/s ÷ bf16 matmul 8192³")
    for peer, goal in (("pypi-gss", 2.6), (f"transformer{run.suffix}", 1.3)):
        if peer in run.best:
            run.keep([ratio_row(f"training gss over {peer}, {where}", peer, ours, run.best[peer], goal)], goals=True)
        else:
            run.goal(f"training gss over {peer}, {where}", None, "×", goal, "the peer gave no figure")
    peak = at_middle.peak_bytes if at_middle else None
    run.goal(f"peak memory of gss, {middle}×{run.length}", peak and peak / 1e9, "GB", 30.0)


def long(run: SpeedTable) -> None:
    """Sequences of 65,536 tokens: one a step, where the host is the slower one, and four."""
    found = [run.train(f"gss{run.suffix}", batch, run.long, run.compiled) for batch in (1, 4)]
    ours = max(filter(None, found), key=lambda training: training.tokens_per_second, default=None)
    other = run.train(f"transformer{run.suffix}", 1, run.long, compiled=True)
    name = f"training gss, L={run.long}, best batch"
    row = ratio_row(name, "transformer", ours, other) if ours and other else None
    run.goal(name, ours.tokens_per_second if ours else None, "tokens/s", 400_000, like=row)


def dss(run: SpeedTable) -> None:
    """GSS over DSS at the paper's sizes, each at its best batch: DSS compiled and not, and at the largest batch."""
    eager = run.train(f"dss{run.suffix}", run.batches[1], run.length, compiled=False)
    compiled = run.train(f"dss{run.suffix}", run.batches[1], run.length, compiled=True)
    better = eager is None or (compiled is not None and compiled.tokens_per_second > eager.tokens_per_second)
    run.train(f"dss{run.suffix}", run.batches[2], run.length, better)
    theirs = run.best.get(f"dss{run.suffix}")
    ours = run.best.get(f"gss{run.suffix}") or run.train(f"gss{run.suffix}", run.batches[1], run.length, run.compiled)
    if ours is None or theirs is None:
        raise ValueError("GSS or DSS gave no figure")
    run.keep([ratio_row(f"training gss over dss, L={run.length}", "dss", ours, theirs, 3.0)], goals=True)


def hybrid(run: SpeedTable) -> None:
    """GSS-Hybrid-L's share of the matrix rate."""
    name = "gss-hybrid-tiny" if run.trial else "gss-hybrid-l"
    found = run.train(name, run.batches[1], run.length, run.compiled)
    mfu = _mfu(run, found) if found else None
    run.goal(f"MFU of gss-hybrid-l, L={run.length}", mfu, "of matmul rate", 0.6, "6·parameters·tokens/s")


def prefill(run: SpeedTable) -> None:
    """One prompt of 65,536 tokens to the state and the last logits, whole and in pieces, beside PyPI's."""
    name, found = f"gss{run.suffix}", list[Measurement]()
    for compiled in (False, True):
        for each in [name] if compiled else [name, f"transformer{run.suffix}"]:
            for piece in (run.long,) if compiled else (run.long, run.long // 4):
                shapes = [(1, run.long)]
                found += measurements(bench_prefill(each, shapes, run.device, compiled, piece, run.repeats))
    theirs = partial(prefill_foreign, "pypi-gss", preset(name), 1, run.long, run.device, run.repeats)
    run.keep([*found, attempted(f"prefill pypi-gss, 1×{run.long}", theirs)])
    speeds = [row.value for row in found if row.name.startswith("prefill gss") and row.unit == "tokens/s"]
    run.goal(f"prefill gss, 1×{run.long}", max(filter(None, speeds)), "tokens/s", 1_200_000)
    run.keep((row for row in found if row.unit == "relative error"), goals=True)


def decode(run: SpeedTable) -> None:
    """Greedy decoding at batch 1 and 64, after contexts up to a million tokens, beside PyPI's, which recomputes."""
    contexts = (64, 128, 256) if run.trial else (1024, 4096, 65_536, 1_048_576)
    name = f"gss{run.suffix}"
    shapes = [*((1, context) for context in contexts), (64, contexts[0])]
    found = measurements(bench_decode(name, shapes, run.device, run.repeats))
    run.keep(measurements(bench_decode(f"transformer{run.suffix}", shapes[1:2], run.device, run.repeats)))
    where = f"batch 1, context {contexts[1]:,}"
    speed = partial(decode_foreign, "pypi-gss", preset(name), contexts[1], run.device, run.repeats)
    run.keep([theirs := attempted(f"decode pypi-gss, {where}", speed)])
    ours = next(row for row in found if row.name == f"decode {name}, {where}").beside("pypi-gss", theirs.value)
    run.keep(
        [Measurement(f"decode {name} over pypi-gss, {where}", ours.ratio, "×", 100.0, "pypi-gss", ours.ratio)], True
    )
    goals = {"batch 1,": 5000.0, "batch 64,": 150_000.0}
    for row in found:
        goal = next((goal for part, goal in goals.items() if part in row.name), None)
        first = row.name.endswith(f"context {contexts[0]:,}") or row.unit in ("relative error", "× as long")
        run.keep([replace(row, goal=row.goal or goal) if first else row], goals=first)


def _mfu(run: SpeedTable, found: TrainingSpeed) -> float:
    """The share of the machine's matrix rate that 6 · parameters · tokens/s make."""
    return 6 * found.parameters * found.tokens_per_second / run.ceilings.square


def ratio_row(
    name: str, peer: str, ours: TrainingSpeed, theirs: TrainingSpeed, goal: float | None = None
) -> Measurement:
    """Our speed over a peer's."""
    ratio = ours.tokens_per_second / theirs.tokens_per_second
    return Measurement(name, ratio, "×", goal, peer, ratio)


def families(run: SpeedTable) -> None:
    """Every family at the smallest batch."""
    for name in ("gss-hybrid", "slide", "xl", "rec-fixed-skip", "feedback-fixed-skip", "feedback-lstm-single"):
        run.train(name + run.suffix, run.batches[0], run.length, compiled=True)


def peers(run: SpeedTable) -> None:
    """Models of other libraries of about the same size, at the smallest batch; those with kernels are not compiled."""
    for name in ("hf-llama", "fla-gla", "fla-mamba2"):
        run.train(name, run.batches[0], run.length, compiled=name == "hf-llama")


SECTIONS: dict[str, Callable[[SpeedTable], None]] = {
    section.__name__: section for section in (train, long, decode, prefill, hybrid, dss, errors, families, peers)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"from: {' '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trial", action="store_true")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; choose from: {', '.join(SECTIONS)}")
    device = pick_device("auto")
    run = SpeedTable(device, measure_ceilings(device), arguments.repeats, arguments.trial)
    release(device)
    print(json.dumps(run.ceilings.as_dict(), ensure_ascii=False), flush=True)
    parts = Parts(
        arguments.out,
        lambda: document([*run.goals, *run.rows], run.ceilings.as_dict(), arguments.commit),
        lambda name, why: run.keep([Measurement(f"section {name}", None, "", note=why.split("\n")[-1])], goals=True),
        clean=partial(release, device),
    )
    for name in arguments.sections or SECTIONS:
        parts.run(name, partial(SECTIONS[name], run))
    print(f"\n{table(run.goals)}")


if __name__ == "__main__":
    main()
