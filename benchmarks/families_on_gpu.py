"""Training speed and memory of every family at the paper's sizes, in one run on one GPU.

    python benchmarks/families_on_gpu.py --out results.json [--rows 8] [--length 4096] [--preset NAME …] [--no-compile]

Each preset takes full training steps (forward, loss, backward, clipping, AdamW; bf16 autocast) on random tokens: those
that carry their state by design (slide, xl, rec, feedback) in lanes, the others on independent segments. Eager first,
then compiled; a preset that fails is a row that says so.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gss.accounting import account
from gss.bench.results import command_line
from gss.data import Batches, Lanes, Segments, as_tensors, dataset_from_arrays
from gss.model import build_model
from gss.presets import preset
from gss.train.config import TrainConfig, resolve
from gss.train.distributed import joined
from gss.train.progress import matmul_rate
from gss.train.step import Stepper

PRESETS = (
    "transformer",
    "gss",
    "gss-hybrid",
    "dss",
    "slide",
    "xl",
    "rec-fixed-skip",
    "feedback-fixed-skip",
    "feedback-lstm-single",
)
CARRYING = ("slide", "xl", "rec", "feedback")


def measure(name: str, arguments: argparse.Namespace, compiled: bool, peak_rate: float) -> dict[str, Any]:
    lanes = name.startswith(CARRYING)
    settings = [
        f"length={arguments.length}",
        f"batch_tokens={arguments.rows * arguments.length}",
        f"batching={'lanes' if lanes else 'segments'}",
        f"compile={str(compiled).lower()}",
        "precision=bf16",
        "device=cuda",
    ]
    config: TrainConfig = resolve(name, None, settings)
    random = np.random.default_rng(0)
    pieces = arguments.steps + 4
    documents = [random.integers(0, 31_999, pieces * arguments.length).tolist() for _ in range(arguments.rows)]
    dataset = dataset_from_arrays(documents, vocab_size=32_000, eos_id=31_999)
    batches: Batches = (Lanes if lanes else Segments)(dataset, arguments.length, arguments.rows, 0)
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with joined("cuda") as world:
        stepper = Stepper(build_model(config.model), config, world)
        seconds = []
        for step in range(arguments.steps):
            host = as_tensors(batches.batch(step))
            batch = dataclasses.replace(
                host, **{field: getattr(host, field).cuda() for field in ("tokens", "targets", "mask", "starts")}
            )
            torch.cuda.synchronize()
            started = time.perf_counter()
            result = stepper.step(batch, step)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        loss = result.loss.item()
    assert np.isfinite(loss)
    accounts = account(config.model, arguments.length)
    speed = config.batch_tokens / statistics.median(seconds[3:])
    return {
        "preset": name,
        "parameters": accounts.parameters,
        "batching": config.batching,
        "compiled": compiled,
        "tokens_per_second": speed,
        "mfu": 3 * sum(accounts.flops.values()) * speed / peak_rate,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "first_step_seconds": seconds[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--preset", action="append", choices=PRESETS)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    peak_rate = matmul_rate(torch.device("cuda"), torch.bfloat16)
    results: dict[str, Any] = {
        "command": command_line(),
        "commit": arguments.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "matmul_tflops": (peak_rate or 0) / 1e12,
        "shape": [arguments.rows, arguments.length],
        "rows": [],
    }
    for compiled in (False,) if arguments.no_compile else (False, True):
        for name in arguments.preset or PRESETS:
            preset(name)
            try:
                row = measure(name, arguments, compiled, peak_rate or float("nan"))
            except Exception as error:  # a family that fails is a result too
                row = {"preset": name, "compiled": compiled, "error": f"{type(error).__name__}: {error}"[:500]}
            torch.compiler.reset()
            torch.cuda.empty_cache()
            results["rows"].append(row)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(row), flush=True)
    print(f"\n{'preset':22} {'compiled':8} {'tokens/s':>10} {'MFU':>6} {'peak GB':>8}")
    for row in results["rows"]:
        if "error" not in row:
            speeds = f"{row['tokens_per_second']:10,.0f} {row['mfu']:6.3f} {row['peak_gb']:8.1f}"
            print(f"{row['preset']:22} {row['compiled']!s:8} {speeds}")


if __name__ == "__main__":
    main()
