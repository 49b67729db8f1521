"""What a measurement gives: rows of one shape under a header that says where they come from, as JSON or a table."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gss.io.files import finite

LESS_IS_BETTER = frozenset({"s", "ms", "GB", "MB", "MiB", "relative error", "× as long", "nats"})
"""Units of which less is better: goals in them are limits from above, and ratios are the peer's over ours."""

Report = Callable[[str], None]
"""Told what is being measured."""
_PACKAGES = ("gss-lm", "torch", "triton", "transformers", "gated-state-spaces-pytorch", "flash-linear-attention")


@dataclass(frozen=True)
class Measurement:
    """One figure: what it is, what it should be, and how it compares."""

    name: str
    value: float | None
    """None where there is no figure; `note` says why."""
    unit: str
    goal: float | None = None
    """At least this, or at most for units of which less is better."""
    peer: str | None = None
    """What it is compared with: the name of a peer whose own row is in the list."""
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
        """The row compared with a peer's value in the same unit; unchanged where the peer has none."""
        if not value or not self.value:
            return self
        ratio = value / self.value if self.unit in LESS_IS_BETTER else self.value / value
        return replace(self, peer=peer, ratio=ratio)


def compared(
    names: Sequence[str], what: str, where: str, measure: Callable[[str], list[Measurement]], report: Report
) -> list[Measurement]:
    """The rows that each of these models has; the first row of each is its speed, set beside the first model's.

    One after the first that fails has no figure, and its row says why.
    """
    rows: list[Measurement] = []
    for name in names:
        title = f"{what} {name}, {where}"
        report(title)
        try:
            speed, *others = measure(name)
        except Exception as error:
            if not rows:
                raise
            rows.append(Measurement(title, None, "tokens/s", note=reason(error)))
            continue
        rows += [speed.beside(names[0], rows[0].value) if rows else speed, *others]
    return rows


def reason(error: BaseException) -> str:
    """Why something has no figure, in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return "out of memory" if type(error).__name__ == "OutOfMemoryError" else f"{type(error).__name__}: {first}"[:160]


def document(
    rows: Iterable[Measurement], device: torch.device, ceilings: Mapping[str, float] | None = None, commit: str = ""
) -> dict[str, Any]:
    """The rows under a header that says where they come from; `commit` in place of that of the source tree."""
    header = provenance(device) | ({"commit": commit} if commit else {})
    rows_given: list[dict[str, Any]] = finite([asdict(row) for row in rows])
    return {**header, "ceilings": dict(ceilings or {}), "rows": rows_given}


def provenance(device: torch.device) -> dict[str, Any]:
    """Where figures come from: command, commit, hardware, versions and date."""
    there = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {
        "command": command_line(),
        "commit": source_commit(),
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **{name: there[name] for name in _PACKAGES if name in there}},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """How this program was started; absolute paths are cut to the name, since folders differ between machines."""
    program = Path(sys.argv[0])
    script = program.suffix == ".py" and program.name != "__main__.py"
    start = ["python", "-m", f"experiments.{program.stem}"] if script else ["gss"]
    return shlex.join([*start, *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


def hardware(device: torch.device) -> str:
    """The GPU's name, or the processor's and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def source_commit() -> str:
    """The commit of the source tree this runs from, "-dirty" with changes in it; empty where there is none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def table(rows: Sequence[Measurement]) -> str:
    """The rows as text in columns; columns that no row fills are left out."""
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
    """A figure in the digits that matter: 431,204 · 12.3 · 0.652 · 3.1e-04; a dash for None."""
    if value is None:
        return "–"
    for least, form in ((1000, ",.0f"), (10, ".1f"), (0.01, ".3f")):
        if abs(value) >= least:
            return f"{value:{form}}"
    return f"{value:.1e}" if value else "0.000"
