"""Train the same model on the same batches in two ways and compare the losses: with and without the GPU kernels, or in
fp8 and in bf16.

    python -m experiments.same_loss DATA --out results.json [--fp8] [--preset gss-small] [--steps 2000] [--rows 4]

DATA is a corpus that `gss prepare` made, with the splits train and valid. Three runs side by side: the new way, the
old one, and the old one from other initial weights, which shows how far apart two good runs are. The two ways round
differently, and training amplifies such differences, so the losses of single steps cannot be equal. But their averages
over windows of steps must not differ more than those of the two old runs.
"""

import argparse
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from experiments.measurements import Measurement, document, table
from gss.bench.machine import release
from gss.data import Prefetch, Segments, open_dataset
from gss.evaluation import evaluate
from gss.io.devices import pick_device
from gss.model import build_model
from gss.ops import fast
from gss.training.config import TrainConfig, resolve
from gss.training.distributed import World
from gss.training.step import Stepper


class Way(NamedTuple):
    """How a run trains, and the seed of its first weights."""

    kernels: bool = True
    precision: Literal["auto", "fp8", "bf16"] = "auto"
    seed: int = 0


PLAIN, FP8, BF16 = Way(kernels=False), Way(precision="fp8"), Way(precision="bf16")
PLANS = {
    "kernels": {"kernels": Way(), "plain": PLAIN, "plain, other first weights": PLAIN._replace(seed=1)},
    "fp8": {"fp8": FP8, "bf16": BF16, "bf16, other first weights": BF16._replace(seed=1)},
}


@dataclass(frozen=True)
class Curve:
    """A run's loss after every step, and held out after the last, in nats a token."""

    losses: list[float]
    held_out: float

    def windows(self, size: int) -> list[float]:
        """Means over consecutive windows."""
        return [sum(self.losses[i : i + size]) / size for i in range(0, len(self.losses) - size + 1, size)]

    @property
    def final(self) -> float:
        """The mean of the last twentieth."""
        count = max(1, len(self.losses) // 20)
        return sum(self.losses[-count:]) / count


def train(config: TrainConfig, data: Path, device: torch.device, way: Way, most: int) -> Curve:
    """One run: batches in the order of the config's seed; held out are the first `most` tokens."""
    release(device)
    torch.manual_seed(way.seed)
    batches = Segments(open_dataset(data, verify=False), config.length, config.rows, config.seed)
    losses: list[torch.Tensor] = []
    with nullcontext() if way.kernels else fast.disabled():
        stepper = Stepper(build_model(config.model), replace(config, precision=way.precision), World(device))
        with Prefetch(batches, 0, config.steps, device=device) as stream:
            for step, batch in enumerate(stream):
                losses.append(stepper.step(batch, step).loss)
        held_out = open_dataset(data, "valid", verify=False)
        row = evaluate(
            stepper.model, held_out, [config.length], max_tokens=most, batch_tokens=config.batch_tokens
        ).rows[0]
        return Curve(torch.stack(losses).tolist(), math.log(row.perplexity))


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
    parser.add_argument("--fp8", action="store_true", help="fp8 and bf16, instead of kernels and plain operations")
    parser.add_argument("--held-out", type=int, default=1 << 20, help="tokens that are scored after training")
    parser.add_argument("--commit", default="")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    device = pick_device("auto")
    if not fast.usable(device) and not arguments.fp8:
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
    plan = PLANS["fp8" if arguments.fp8 else "kernels"]
    with ProcessPoolExecutor(len(plan), multiprocessing.get_context("spawn")) as pool:
        given = (config, arguments.data, device)
        runs = {name: pool.submit(train, *given, way, arguments.held_out) for name, way in plan.items()}
        curves = {name: run.result() for name, run in runs.items()}
    rows = [Measurement(f"final loss, {name}", curve.final, "nats") for name, curve in curves.items()]
    rows += [Measurement(f"held-out loss, {name}", curve.held_out, "nats") for name, curve in curves.items()]
    new, old, other = curves
    noise = distance(curves[old], curves[other], window)
    apart = distance(curves[new], curves[old], window)
    note = f"RMS over means of {window} steps; the goal is how far the two runs of {old} are apart"
    rows.append(Measurement(f"{new} and {old} are apart by", apart, "nats", noise, old, note=note))
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
