"""Train a preset on a prepared corpus on one GPU, kill it on the way, resume it, and keep the figures.

    python benchmarks/train_on_gpu.py DATA --minutes 5 --out results.json [--set key=value …]

Two short runs first, with and without torch.compile; the faster setting does the long one. At 40% of its time that is
killed with SIGKILL; the same command then goes on from its newest checkpoint, and the rows it repeats are compared.
"""

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gss.bench.results import command_line
from gss.train.folder import read_metrics


def command(arguments: argparse.Namespace, run: Path, settings: list[str]) -> list[str]:
    sets = [item for setting in [*settings, *arguments.set] for item in ("--set", setting)]
    base = [sys.executable, "-m", "gss", "train", "--preset", arguments.preset]
    return [*base, "--data", str(arguments.data), "--out", str(run), *sets]


def train_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]


def probe(arguments: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    run = arguments.work / f"probe-compile-{compiled}"
    shutil.rmtree(run, ignore_errors=True)
    quick = ["steps=40", "report.log_every=10", "report.evaluate_every=0", "report.sample_every=0"]
    done = subprocess.run(
        command(arguments, run, [*quick, f"compile={str(compiled).lower()}"]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"compile": compiled, "error": done.stderr[-1500:]}
    last = train_rows(run)[-1]
    return {"compile": compiled, "tokens_per_second": last["tokens_per_second"], "mfu": last["mfu"]}


def long_run(arguments: argparse.Namespace, compiled: bool, speed: float) -> dict[str, Any]:
    run = arguments.work / "long"
    shutil.rmtree(run, ignore_errors=True)
    steps = max(100, int(arguments.minutes * 60 * speed / arguments.batch_tokens))
    settings = [
        f"steps={steps}",
        f"compile={str(compiled).lower()}",
        "report.log_every=10",
        f"report.evaluate_every={steps // 4}",
        f"report.sample_every={steps // 2}",
        f"checkpoint.every={steps // 8}",
    ]
    first = subprocess.Popen(command(arguments, run, settings))
    time.sleep(arguments.minutes * 60 * 0.4)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = {row["step"]: row["loss"] for row in train_rows(run)}
    subprocess.run(command(arguments, run, settings), check=True)
    rows = train_rows(run)
    after = {row["step"]: row["loss"] for row in rows}
    assert sorted(after) == list(range(1, steps + 1)), "steps are missing or repeated"
    # Rows from before the newest checkpoint were kept; those after it were made again by the second process.
    resumed = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    starts = json.loads((run / "environment.json").read_text())
    again = {step: (before[step], after[step]) for step in before if before[step] != after[step]}
    speeds = sorted(row["tokens_per_second"] for row in rows)
    evaluations = [
        row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] != "train"
    ]
    every = max(1, steps // 40)
    return {
        "steps": steps,
        "starts": len(starts),
        "killed_after_step": max(before),
        "last_checkpoint": resumed,
        "repeated_steps_that_differ": len(again),
        "largest_difference_in_loss": max((abs(a - b) for a, b in again.values()), default=0.0),
        "tokens_per_second_median": speeds[len(speeds) // 2],
        "mfu_median": sorted(row["mfu"] for row in rows)[len(rows) // 2],
        "loss_curve": [
            [row["step"], round(row["loss"], 4)] for row in rows if row["step"] % every == 0 or row["step"] < 4
        ],
        "evaluations": evaluations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--preset", default="gss")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--batch-tokens", type=int, default=1 << 17)
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--probe-only", action="store_true")
    arguments = parser.parse_args()
    arguments.set = [
        f"batch_tokens={arguments.batch_tokens}",
        "optimizer.warmup_steps=100",
        *arguments.set,
    ]
    results: dict[str, Any] = {
        "command": command_line(),
        "commit": arguments.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "preset": arguments.preset,
        "settings": arguments.set,
        "probes": [probe(arguments, compiled) for compiled in (False, True)],
    }
    print(json.dumps(results["probes"], indent=1), flush=True)
    if not arguments.probe_only:
        best = max(results["probes"], key=lambda row: row.get("tokens_per_second", 0.0))
        results["run"] = long_run(arguments, best["compile"], best["tokens_per_second"])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
