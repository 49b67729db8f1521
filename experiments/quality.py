"""Models of one size on the same tokens: trained with `gss.train`, scored document by document, compared in pairs.

    python -m experiments.quality CORPUS --systems llama-small,gss2-small+optimizer.learning_rate=1.28e-2 \\
        --out quality.json [--work runs/quality] [--workers 3] [--seconds 560] [--set steps=800]

CORPUS is a folder of `gss prepare` with the splits train and valid. A system is a preset or a peer of
`fla_layers.PEERS`, and `+key=value` for what it has otherwise. Settings are chosen on every other held-out document
(`choose`) and reported on the rest (`report`); the table pairs every system with the first. What is in --out is not run
again, and what the time did not suffice for goes on from its last checkpoint with the same --work. A model that attends
to everything is scored beyond its training length with a sliding window of that length: it knows no farther positions.
"""

import argparse
import datetime
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import fla_layers
from experiments.compare import paired_ratio
from gss.io.files import write_json

if TYPE_CHECKING:
    from gss.data import Dataset
    from gss.model import LanguageModel

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

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "quality"
LENGTHS = (512, 4096, 16_384, 65_536)
Documents = list[tuple[float, int]]


def measure(system: str, corpus: str, work: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Train a system, or go on training it, and score it."""
    import gss
    from gss.data import open_dataset
    from gss.io.runs import read_metrics
    from gss.lm import load
    from gss.training import resolve

    name, *own = system.split("+")
    if name in fla_layers.PEERS:
        fla_layers.register()
        name, *peer = fla_layers.PEERS[name].split("+")
        own = peer + own
    recipe = dict(setting.split("=", 1) for setting in (*(f"{k}={v}" for k, v in RECIPE.items()), *changes, *own))
    held_out = open_dataset(corpus, "valid")
    folder = work / system.replace("/", "-")
    config = resolve(name, None, [f"{key}={value}" for key, value in recipe.items()], held_out.vocab_size)
    gss.train(config, corpus, folder, quiet=True)
    lm = load(folder, device="cuda" if _on_gpu() else "cpu")
    training = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    losses, speeds = [row["loss"] for row in training], sorted(row["tokens_per_second"] for row in training)
    return {
        "system": system,
        "settings": recipe,
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "tokens": config.steps * config.batch_tokens,
        "tokens_per_second": round(speeds[len(speeds) // 2]),
        "train": [round(sum(part) / len(part), 4) for part in (losses[i : i + 50] for i in range(0, len(losses), 50))],
        "documents": scores(lm.model, held_out, config.length),
    }


def scores(model: "LanguageModel", held_out: "Dataset", trained: int) -> dict[str, Documents]:
    """Nats and targets of each document, by length."""
    from gss.config import override
    from gss.evaluation import evaluate
    from gss.model import build_model

    longest = int(held_out.lengths.max())
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    whole = any(kind in model.config.layers for kind in fla_layers.PEERS)
    found: dict[str, Documents] = {}
    for length in lengths:
        if length > trained and not model.bounded_state:
            window = build_model(override(model.config, {"attention.sliding": trained})).to(
                model.embedding.weight.device
            )
            window.load_state_dict(model.state_dict())
            model = window
        row = evaluate(model, held_out, [length], piece=length if whole else min(length, 4096)).rows[0]
        found[str(length)] = [(round(nats, 2), count) for nats, count in row.by_document]
    return found


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


def page(folder: Path = RESULTS) -> str:
    """Markdown: a table for each corpus of kept results, beside the Llama that is best on the documents to choose."""
    tables = []
    for path in sorted(folder.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        results = sorted(kept["results"], key=lambda result: _perplexity(result, "choose"))
        llama = next((result for result in results if result["system"].startswith("llama")), results[0])
        lines = [
            f"| {path.stem} | parameters | {' | '.join(f'{n:,}' for n in LENGTHS)} | at 4,096, times Llama's |",
            "|---|---:|" + "---:|" * (len(LENGTHS) + 1),
        ]
        for result in results:
            cells = [_perplexity(result, "report", str(n)) for n in LENGTHS]
            ratio = paired_ratio(*(half(r["documents"]["4096"], "report") for r in (result, llama)))
            beside = "1" if result is llama else f"{ratio.ratio:.3f} ± {ratio.standard_error:.3f}"
            shown = " | ".join("–" if cell is None else f"{cell:.2f}" for cell in cells)
            lines.append(f"| {_label(result)} | {result['parameters'] / 1e6:.1f}M | {shown} | {beside} |")
        count = sum(count for _, count in half(llama["documents"]["4096"], "report"))
        documents = len(half(llama["documents"]["4096"], "report"))
        where = f"{kept['hardware']}, {kept['date']}, commit {kept['commit']}: `{kept['command']}`."
        tables.append("\n".join([*lines, "", f"Scored on {count:,} tokens of {documents} documents. {where}"]))
    return "\n\n".join(tables)


def _perplexity(result: dict[str, Any], which: str, length: str = "4096") -> Any:
    documents = half(result["documents"].get(length, []), which)
    return math.exp(sum(nats for nats, _ in documents) / sum(count for _, count in documents)) if documents else None


def _label(result: dict[str, Any]) -> str:
    """A system by its preset and what it has that is not the common recipe's."""
    name, *changes = result["system"].split("+")
    own = [change.removeprefix("model.") for change in changes if change.split("=")[0] not in RECIPE]
    rate = result["settings"]["optimizer.learning_rate"]
    return f"`{name}`, {', '.join([f'rate {rate}', *(f'`{change}`' for change in own)])}"


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
    parser.add_argument("--hardware", default="a CPU")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--one", action="store_true", help="be the process of one system")
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(measure(given.systems, given.corpus, given.work, given.changes)))
        return
    results = json.loads(given.out.read_text())["results"] if given.out.is_file() else []
    deadline = time.monotonic() + given.seconds
    done = {result["system"] for result in results}
    wanted = [system for system in given.systems.split(",") if system not in done]

    command = f"python -m experiments.quality CORPUS --systems {given.systems} --workers {given.workers}"
    command += "".join(f" --set {change}" for change in given.changes)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {"hardware": given.hardware, "date": today, "commit": given.commit, "command": command}

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
        write_json(given.out, about | {"results": results})

    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(work, wanted))
    order = {system: index for index, system in enumerate(given.systems.split(","))}
    shown = sorted((r for r in results if r["system"] in order), key=lambda r: order[r["system"]])
    for which in ("choose", "report"):
        print(table(shown, which))


if __name__ == "__main__":
    main()
