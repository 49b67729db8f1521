"""Train the same model on the same batches with the GPU kernels and without, and compare the losses.

    python -m experiments.same_loss DATA --out results.json [--preset gss-small] [--steps 2000] [--rows 4]

DATA is a corpus that `gss prepare` made. Three runs side by side: with the kernels; without; and without from other
first weights, so that there is a measure of how far two good runs are apart. Kernels and plain paths round differently,
and training lets such differences grow, so the losses of single steps cannot be equal: what must hold is that their
averages over windows of steps differ no more than those of the two plain runs do.
"""

import argparse
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.measurements import Measurement, document, table
from gss.bench.machine import release
from gss.data import Prefetch, Segments, open_dataset
from gss.io.devices import pick_device
from gss.model import build_model
from gss.ops import fast
from gss.training.config import TrainConfig, resolve
from gss.training.distributed import World
from gss.training.step import Stepper


@dataclass(frozen=True)
class Curve:
    """A run's loss after every step, in nats a token."""

    losses: list[float]

    def windows(self, size: int) -> list[float]:
        """Means over consecutive windows."""
        return [sum(self.losses[i : i + size]) / size for i in range(0, len(self.losses) - size + 1, size)]

    @property
    def final(self) -> float:
        """The mean of the last twentieth."""
        count = max(1, len(self.losses) // 20)
        return sum(self.losses[-count:]) / count


def train(config: TrainConfig, data: Path, device: torch.device, use_fast: bool, seed: int) -> Curve:
    """One run: batches in the order of the config's seed, first weights of `seed`."""
    release(device)
    torch.manual_seed(seed)
    batches = Segments(open_dataset(data, verify=False), config.length, config.rows, config.seed)
    losses: list[torch.Tensor] = []
    with nullcontext() if use_fast else fast.disabled():
        stepper = Stepper(build_model(config.model), config, World(device))
        with Prefetch(batches, 0, config.steps, device=device) as stream:
            for step, batch in enumerate(stream):
                losses.append(stepper.step(batch, step).loss)
        return Curve(torch.stack(losses).tolist())


def distance(one: Curve, other: Curve, window: int) -> float:
    """Root mean square difference of the windows of the later three quarters, where both are past the steep start."""
    pairs = list(zip(one.windows(window), other.windows(window), strict=True))
    later = pairs[len(pairs) // 4 :]
    return math.sqrt(sum((a - b) ** 2 for a, b in later) / len(later))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="gss-small")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    device = pick_device("auto")
    if not fast.usable(device):
        print("there are no GPU kernels here: both runs take the plain paths", flush=True)
    settings = [
        f"steps={arguments.steps}",
        f"length={arguments.length}",
        f"batch_tokens={arguments.rows * arguments.length}",
        f"compile={str(arguments.compile).lower()}",
        f"optimizer.warmup_steps={max(1, arguments.steps // 10)}",
        *arguments.set,
    ]
    vocabulary = open_dataset(arguments.data, verify=False).vocab_size
    config = resolve(arguments.preset, None, settings, vocabulary)
    window = max(1, arguments.steps // 20)
    plan = {"fast": (True, 0), "plain": (False, 0), "plain, other first weights": (False, 1)}
    with ProcessPoolExecutor(len(plan), multiprocessing.get_context("spawn")) as pool:
        runs = {name: pool.submit(train, config, arguments.data, device, *how) for name, how in plan.items()}
        curves = {name: run.result() for name, run in runs.items()}
    rows = [Measurement(f"final loss, {name}", curve.final, "nats") for name, curve in curves.items()]
    noise = distance(curves["plain"], curves["plain, other first weights"], window)
    apart = distance(curves["fast"], curves["plain"], window)
    note = f"RMS over means of {window} steps; the goal is how far two plain runs are apart"
    rows.append(Measurement("fast and plain are apart by", apart, "nats", noise, "plain", note=note))
    found = document(rows, commit=arguments.commit)
    found["settings"] = {"preset": arguments.preset, "set": settings}
    found[f"mean loss of every {window} steps"] = {
        name: [round(value, 5) for value in curve.windows(window)] for name, curve in curves.items()
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
