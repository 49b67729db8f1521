"""Models of one size on the same tokens: trained with `gss.train`, scored document by document, compared in pairs.

    python -m experiments.quality CORPUS --systems llama-small,gss2-small+optimizer.learning_rate=1.28e-2 \\
        --out quality.json [--work runs/quality] [--workers 3] [--seconds 560] [--set steps=800]

CORPUS is a folder of `gss prepare` with the splits train and valid. A system is a preset, and `+key=value` for what it
has otherwise. Settings are chosen on every other held-out document (`choose`) and reported on the rest (`report`); the
table pairs every system with the first. What is in --out is not run again, and what the time did not suffice for goes
on from its last checkpoint with the same --work.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.compare import paired_ratio
from gss.io.files import write_json

RECIPE = {
    "steps": "800",
    "length": "4096",
    "batch_tokens": "131072",
    "compile": "true",
    "optimizer.name": "muon",
    "optimizer.learning_rate": "6.4e-3",
    "optimizer.warmup_steps": "100",
    "report.evaluate_every": "0",
    "report.sample_every": "0",
    "checkpoint.every": "400",
    "checkpoint.keep_last": "2",
}
"""What every system has unless it says otherwise."""

LENGTHS = (512, 4096, 16_384, 65_536)
Documents = list[tuple[float, int]]


def measure(system: str, corpus: str, work: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Train a system, or go on training it, and score it."""
    import gss
    from gss.data import open_dataset
    from gss.evaluation import evaluate, reachable_lengths
    from gss.io.runs import read_metrics
    from gss.lm import load
    from gss.training import resolve

    preset, *own = system.split("+")
    recipe = dict(setting.split("=", 1) for setting in (*(f"{k}={v}" for k, v in RECIPE.items()), *changes, *own))
    held_out = open_dataset(corpus, "valid")
    folder = work / system.replace("/", "-")
    config = resolve(preset, None, [f"{key}={value}" for key, value in recipe.items()], held_out.vocab_size)
    gss.train(config, corpus, folder, quiet=True)
    lm = load(folder, device="cuda" if _on_gpu() else "cpu")
    limit = reachable_lengths(lm.model, held_out, None, config.length)
    rows = evaluate(lm.model, held_out, [n for n in LENGTHS if n in limit] or limit).rows
    speeds = [row["tokens_per_second"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    return {
        "system": system,
        "settings": recipe,
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "tokens": config.steps * config.batch_tokens,
        "tokens_per_second": round(sorted(speeds)[len(speeds) // 2]),
        "documents": {str(row.length): [(round(nats, 2), n) for nats, n in row.by_document] for row in rows},
    }


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def half(documents: Documents, which: str) -> Documents:
    """The documents that settings are chosen on, or those that are reported."""
    return documents[0::2] if which == "choose" else documents[1::2]


def table(results: Sequence[dict[str, Any]], which: str) -> str:
    """Perplexity by length, and each system's in terms of the first one's."""
    lines = [f"perplexity on the documents to {which}; in brackets, times the first system's"]
    for result in results:
        cells = []
        for length, documents in result["documents"].items():
            own = half(documents, which)
            perplexity = math.exp(sum(nats for nats, _ in own) / sum(count for _, count in own))
            first = results[0]["documents"].get(length)
            ratio = paired_ratio(own, half(first, which)) if first and result is not results[0] else None
            paired = f" ({ratio.ratio:.4f} ± {ratio.standard_error:.4f})" if ratio else ""
            cells.append(f"{length}: {perplexity:.3f}{paired}")
        size = f"{result['parameters'] / 1e6:.1f}M, {result['tokens_per_second']:,} tokens per second"
        lines.append(f"{result['system']}: {size}\n    " + "\n    ".join(cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--systems", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--one", action="store_true", help="be the process of one system")
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(measure(given.systems, given.corpus, given.work, given.changes)))
        return
    results = json.loads(given.out.read_text()) if given.out.is_file() else []
    deadline = time.monotonic() + given.seconds
    done = {result["system"] for result in results}
    wanted = [system for system in given.systems.split(",") if system not in done]

    def work(system: str) -> None:
        command = [sys.executable, "-m", "experiments.quality", given.corpus, "--systems", system, "--one"]
        command += ["--out", str(given.out), "--work", str(given.work), *(f"--set={each}" for each in given.changes)]
        try:
            left = max(1.0, deadline - time.monotonic())
            found = subprocess.run(command, stdout=subprocess.PIPE, timeout=left, check=True, text=True).stdout
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{system}: {type(error).__name__}", flush=True)
            return
        results.append(json.loads(found.splitlines()[-1]))
        write_json(given.out, results)

    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(work, wanted))
    order = {system: index for index, system in enumerate(given.systems.split(","))}
    shown = sorted((r for r in results if r["system"] in order), key=lambda r: order[r["system"]])
    for which in ("choose", "report"):
        print(table(shown, which))


if __name__ == "__main__":
    main()
