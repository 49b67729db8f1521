"""Measurements: rows of one form under a header with their origin, as JSON or as a table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gss.bench.check import Figure
from gss.bench.machine import provenance
from gss.io.files import finite

LESS_IS_BETTER = frozenset({"s", "ms", "GB", "MB", "MiB", "relative error", "× as long", "nats"})
"""Units in which less is better: goals are upper limits, and ratios are the peer's value over ours."""


@dataclass(frozen=True)
class Measurement:
    """A figure with its goal and its ratio to a peer's."""

    name: str
    value: float | None
    """None if there is no figure; `note` says why."""
    unit: str
    goal: float | None = None
    """A lower limit, or an upper limit for units in which less is better."""
    peer: str | None = None
    """The name of the peer that it is compared with, whose own row is in the list."""
    ratio: float | None = None
    """How many times as good as the peer: over 1 is better, whatever the unit."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.goal if self.unit in LESS_IS_BETTER else self.value >= self.goal

    def beside(self, peer: str, value: float | None) -> "Measurement":
        """The row compared with a peer's value in the same unit; unchanged if the peer has none."""
        if not value or not self.value:
            return self
        ratio = value / self.value if self.unit in LESS_IS_BETTER else self.value / value
        return replace(self, peer=peer, ratio=ratio)


@dataclass(frozen=True)
class TrainingSpeed:
    """The speed of training one model at one shape."""

    tokens_per_second: float
    parameters: int
    peak_bytes: int | None = None
    """Of GPU memory; None on a CPU."""

    def rows(self, name: str, where: str, matmul_rate: float | None) -> list[Measurement]:
        """The speed, MFU if the machine's matrix rate is known, and memory."""
        size = f"{self.parameters / 1e6:.1f}M parameters"
        rows = [Measurement(f"training {name}, {where}", self.tokens_per_second, "tokens/s", note=size)]
        if matmul_rate:
            mfu = 6 * self.parameters * self.tokens_per_second / matmul_rate
            rows.append(Measurement(f"MFU of {name}, {where}", mfu, "of matmul rate", note="6·parameters·tokens/s"))
        if self.peak_bytes is not None:
            rows.append(Measurement(f"peak memory of {name}, {where}", self.peak_bytes / 1e9, "GB"))
        return rows


def measurements(figures: Iterable[Figure]) -> list[Measurement]:
    """Figures of `gss.bench` as rows; limits become goals."""
    return [Measurement(each.name, each.value, each.unit, each.limit, note=each.note) for each in figures]


def reason(error: BaseException) -> str:
    """Why something has no figure, in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return "out of memory" if type(error).__name__ == "OutOfMemoryError" else f"{type(error).__name__}: {first}"[:160]


def attempted(name: str, measure: Callable[[], float]) -> Measurement:
    """A speed in tokens per second, or a row that says why there is none."""
    try:
        return Measurement(name, measure(), "tokens/s")
    except Exception as error:  # out of memory, a peer that is not installed
        return Measurement(name, None, "tokens/s", note=reason(error))


def header(commit: str = "") -> dict[str, Any]:
    """Command, commit (if given, instead of the source tree's), hardware, versions and date."""
    found = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return found | ({"commit": commit} if commit else {})


def document(
    rows: Iterable[Measurement], ceilings: Mapping[str, float] | None = None, commit: str = ""
) -> dict[str, Any]:
    """The rows under a header with their origin."""
    rows_given: list[dict[str, Any]] = finite([asdict(row) for row in rows])
    return {**header(commit), "ceilings": dict(ceilings or {}), "rows": rows_given}


def table(rows: Sequence[Measurement]) -> str:
    """The rows as text in columns, without columns that are empty."""
    head = ("what", "value", "unit", "goal", "", "peer", "ratio", "note")
    lines = [head]
    for row in rows:
        sign = "≤" if row.unit in LESS_IS_BETTER else "≥"
        goal = "" if row.goal is None else f"{sign} {number(row.goal)}"
        verdict = {None: "", True: "met", False: "missed"}[row.met]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}×"
        lines.append((row.name, number(row.value), row.unit, goal, verdict, row.peer or "", ratio, row.note))
    columns = [column for column in zip(*lines, strict=True) if any(column[1:]) or column[0] == "what"]
    padded = []
    for column in columns:
        width, right = max(map(len, column)), column[0] in ("value", "goal", "ratio")
        padded.append([cell.rjust(width) if right else cell.ljust(width) for cell in column])
    text = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def number(value: float | None) -> str:
    """A figure in its significant digits: 431,204 · 12.3 · 0.652 · 3.1e-04; a dash for None."""
    if value is None:
        return "–"
    for least, form in ((1000, ",.0f"), (10, ".1f"), (0.01, ".3f")):
        if abs(value) >= least:
            return f"{value:{form}}"
    return f"{value:.1e}" if value else "0.000"
