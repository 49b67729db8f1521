"""One exact optimizer step on a sequence of millions of tokens, on one GPU: tokens per second and peak memory.

    python -m experiments.millions OUT.json [--cases gss:1048576,gss:4194304,gss-hybrid:1048576] [--piece 65536]

Each case is a step of `gss train` (bf16, compiled layers, AdamW) on one row of random tokens in pieces. Before that,
the loss and the gradient norm of a short sequence in pieces are compared with those of the whole sequence; if they
differ, nothing is reported. The first step compiles and is not counted.
"""

import argparse
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiments.measurements import header
from gss.data.batches import Batch
from gss.io.files import write_json
from gss.model import build_model
from gss.training import resolve
from gss.training.distributed import World
from gss.training.step import Stepper

CASES = "gss:1048576,gss:4194304,gss-hybrid:1048576,gss2:1048576"
TOLERANCE = 2e-2  # of a gradient's norm in bf16; the loss agrees far better


def stepper(name: str, length: int, piece: int | None, changes: tuple[str, ...]) -> Stepper:
    """A freshly drawn model, the same for every length, and its training step."""
    torch.manual_seed(0)
    settings = [f"length={length}", f"batch_tokens={length}", "steps=10", *changes]
    settings += [] if piece is None else [f"piece_tokens={piece}"]
    config = resolve(name, None, settings, None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Stepper(build_model(config.model), config, World(device))


def batch(step: Stepper) -> Batch[torch.Tensor]:
    """One row of random tokens."""
    torch.manual_seed(1)
    length, vocabulary = step.config.length, step.model.config.vocab_size
    tokens = torch.randint(vocabulary, (1, length + 1)).to(step.world.device)
    starts = torch.zeros(1, length, dtype=torch.bool, device=step.world.device)
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones_like(starts), starts, 0, 0)


@cache
def check(name: str, piece: int, changes: tuple[str, ...]) -> dict[str, float]:
    """Two pieces against the whole: the relative differences of the loss and of the gradient's norm."""
    found = []
    for pieces in (None, piece):
        step = stepper(name, 2 * piece, pieces, changes)
        result = step.step(batch(step), 0)
        found.append((float(result.loss), float(result.gradient_norm)))
    whole, cut = found
    return {what: abs(a - b) / abs(a) for what, a, b in zip(("loss", "gradient"), whole, cut, strict=True)}


def measure(name: str, length: int, piece: int, changes: tuple[str, ...], repeats: int = 1) -> dict[str, Any]:
    """Seconds of the quickest step, and the most memory that one took."""
    step = stepper(name, length, min(piece, length), changes)
    rows = batch(step)
    seconds = []
    for number in range(1 + repeats):
        if step.world.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = float(step.step(rows, number).loss)
        seconds.append(time.perf_counter() - started)
    state = step.model.initial_state(1).nbytes
    peak = torch.cuda.max_memory_allocated() if step.world.device.type == "cuda" else 0
    return {
        "model": name,
        "length": length,
        "piece": piece,
        "loss": loss,
        "seconds": min(seconds[1:]),
        "tokens_per_second": length / min(seconds[1:]),
        "peak_bytes": peak,
        "states_bytes": (length // piece - 1) * state,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--piece", type=int, default=65_536)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    changes = ("compile=true", *given.changes)
    rows: list[dict[str, Any]] = []
    for case in given.cases.split(","):
        name, _, length = case.partition(":")
        differences = check(name, min(given.piece, int(length) // 2), changes)
        assert max(differences.values()) < TOLERANCE, f"{name} in pieces is not {name} whole: {differences}"
        rows.append({**measure(name, int(length), given.piece, changes), "pieces_against_whole": differences})
        row = rows[-1]
        print(
            f"{case}: {row['tokens_per_second']:,.0f} tokens per second, peak {row['peak_bytes'] / 1e9:.1f} GB, "
            f"of which {row['states_bytes'] / 1e9:.2f} GB are states; pieces against whole {differences}",
            flush=True,
        )
        write_json(given.out, {**header(given.commit), "rows": rows})


if __name__ == "__main__":
    main()
