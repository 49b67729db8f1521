"""The tiny training step on a CPU, at this commit and at an earlier one, and the floor under both.

    git worktree add /tmp/before COMMIT
    python -m experiments.cpu_training --before /tmp/before/src --out benchmarks/results/cpu-training.json

The step of the recipe `tiny` (8 rows of 512 bytes, AdamW) of gss-tiny and gss-hybrid-tiny, in float32 and in bf16
autocast. Each measurement is a process of its own, and the two commits take turns. A step's time is processor time of
one thread, the least over all steps, so that other work on the machine counts little. The floor is what the step's
dense products alone take at the rate of a large product, measured in the same run.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STEP = """
import json, sys, time, torch
from gss.data import Batch
from gss.model import build_model
from gss.training.config import resolve
from gss.training.distributed import World
from gss.training.step import Stepper
name, precision, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
settings = ["length=512", "batch_tokens=4096", "optimizer.learning_rate=8e-3", "optimizer.warmup_steps=40"]
config = resolve(name, None, [*settings, f"precision={precision}", "device=cpu"])
stepper = Stepper(build_model(config.model), config, World(torch.device("cpu")))
tokens = torch.randint(0, config.model.vocab_size, (8, 513))
mask = torch.ones(8, 512, dtype=torch.bool)
starts = torch.zeros_like(mask)
starts[:, 0] = True
batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, starts, 0, 0)
seconds = []
for step in range(steps + 3):
    started = time.process_time()
    loss = stepper.step(batch, step).loss.item()
    seconds.append(time.process_time() - started)
print(json.dumps({"seconds": seconds[3:], "loss": loss}))
"""

SHARES = """
import json, sys, torch
from torch.profiler import ProfilerActivity, profile
source = sys.stdin.read().split("seconds = []")[0]
exec(source)
for step in range(3):
    stepper.step(batch, step)
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    for step in range(5):
        stepper.step(batch, step)
events = profiled.key_averages()
total = sum(event.self_cpu_time_total for event in events)
print(json.dumps({event.key: event.self_cpu_time_total / total for event in events}))
"""


def run(source: Path, script: str, *arguments: str, stdin: str = "") -> Any:
    """What a script prints, with the package from one source folder, on one thread."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def product_rate(dtype: "torch.dtype") -> float:
    """FLOP a second of processor time of a large product, the best of many: timed as the steps are."""
    import torch

    left, right = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(60):
        started = time.process_time()
        left @ right
        best = min(best, time.process_time() - started)
    return 2 * 1024**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()

    import torch

    from experiments.measurements import Measurement, document, table
    from gss.accounting import account
    from gss.presets import preset

    torch.set_num_threads(1)
    device = torch.device("cpu")
    here = Path(__file__).parents[1] / "src"
    rates = {"fp32": product_rate(torch.float32), "bf16": product_rate(torch.bfloat16)}
    rows: list[Measurement] = []
    for name in ("gss-tiny", "gss-hybrid-tiny"):
        dense = 3 * account(preset(name), 512).flops["dense"] * 4096
        for precision in ("fp32", "bf16"):
            least: dict[str, list[float]] = {"before": [], "after": []}
            for _ in range(arguments.rounds):
                for when, source in (("before", arguments.before), ("after", here)):
                    found = run(source, STEP, name, precision, str(arguments.steps))
                    least[when].append(1e3 * min(found["seconds"]))
            before, after = (statistics.median(least[when]) for when in ("before", "after"))
            rows += [
                Measurement(f"step of {name}, {precision}, before", before, "ms"),
                Measurement(f"step of {name}, {precision}", after, "ms").beside("before", before),
                Measurement(f"dense products of {name}, {precision}, floor", 1e3 * dense / rates[precision], "ms"),
            ]
    values = {row.name: row.value or 0.0 for row in rows}
    for name in ("gss-tiny", "gss-hybrid-tiny"):
        before, floor = values[f"step of {name}, fp32, before"], values[f"dense products of {name}, fp32, floor"]
        same = before / values[f"step of {name}, fp32"]
        note = f"in the same precision; were everything but dense products free, {before / floor:.2f}"
        rows.append(Measurement(f"step of {name}, fp32, as fast as before", same, "×", 1.5, "before", same, note))
        ratio = before / values[f"step of {name}, bf16"]
        note = "another precision, not a gain of this code: precision=bf16 could be set before as well"
        rows.append(Measurement(f"step of {name}, bf16 beside fp32 before", ratio, "×", note=note))
        shares = run(here, SHARES, name, "fp32", "0", stdin=STEP)
        products = sum(shares.get(key, 0.0) for key in ("aten::mm", "aten::addmm", "aten::bmm"))
        largest = ", ".join(f"{k} {v:.0%}" for k, v in sorted(shares.items(), key=lambda item: -item[1])[:8])
        rows.append(Measurement(f"matrix products in a step of {name}, fp32", products, "of the time", note=largest))
    header = {f"{name} matmul 1024³, one thread, TFLOP/s": rate / 1e12 for name, rate in rates.items()}
    found = document(rows, device, header)
    arguments.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
