"""Our models compared with those of other libraries, or with each other, in one run on this machine.

    python -m experiments.beside layer  [--model gss-small] [--shape 2x4096 --shape 1x65536]
    python -m experiments.beside decode [--model gss-small] [--context 4096] [--peer pypi-gss --peer hf-llama]
    python -m experiments.beside train|prefill [--shape 1x1024] [--peer fla-mamba2 --peer transformer-small]

Our models are checked and measured by the functions of `gss bench`. A peer that is not installed or fails gets a row
that says why. `--json` prints the format of benchmarks/results.
"""

import argparse
import json
from collections.abc import Callable

import torch

from experiments.ceilings import measure_ceilings
from experiments.foreign import FOREIGN, decode_foreign, prefill_foreign, train_foreign
from experiments.layer import bench_layer
from experiments.measurements import Measurement, attempted, document, measurements, table
from experiments.pypi_gss import pypi_part
from gss.bench.check import Figure
from gss.bench.models import bench_decode, bench_prefill, bench_train
from gss.io.devices import pick_device
from gss.presets import PRESETS, preset


def beside(
    ours: list[Measurement], name: str, what: str, where: str, measure: Callable[[], float]
) -> list[Measurement]:
    """A peer's speed as a row, compared with ours at the same shape."""
    theirs = attempted(f"{what} {name}, {where}", measure)
    same = next(row for row in ours if row.name.startswith(f"{what} ") and row.name.endswith(f", {where}"))
    return [theirs.beside(same.name.removeprefix(f"{what} ").partition(",")[0], same.value)]


def measured(arguments: argparse.Namespace, device: torch.device) -> list[Measurement]:
    """The requested rows."""
    model, repeats, what = arguments.model, arguments.repeats, arguments.what
    like = preset(model)
    shapes = [(int(batch), int(length)) for batch, length in (shape.split("x") for shape in arguments.shape)]
    if what == "layer":
        config = preset(model, norm_epsilon=1e-5)  # the peer's epsilon
        return bench_layer(config, shapes, device, rivals={"pypi-gss": pypi_part}, repeats=repeats)
    shapes = [(1, arguments.context)] if what == "decode" else shapes
    benches: dict[str, Callable[..., list[Figure]]] = {"train": bench_train, "prefill": bench_prefill}
    bench = benches.get(what, bench_decode)
    rows = measurements(bench(model, shapes, device, repeats=repeats))
    title = "training" if what == "train" else what
    for batch, length in shapes:
        where = f"batch 1, context {length:,}" if what == "decode" else f"{batch}×{length}"
        for name in arguments.peer:

            def speed(name: str = name, batch: int = batch, length: int = length) -> float:
                if name in PRESETS:
                    found = bench(name, [(batch, length)], device, repeats=repeats)
                    return next(row.value for row in found if row.name.startswith(f"{title} {name}, "))
                if what == "decode":
                    return decode_foreign(name, like, length, device, repeats)
                if what == "prefill":
                    return prefill_foreign(name, like, batch, length, device, repeats)
                return train_foreign(name, like, batch, length, device, False, repeats).tokens_per_second

            rows += beside(rows, name, title, where, speed)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "prefill", "decode", "layer"))
    parser.add_argument("--model", default="gss-small")
    parser.add_argument("--peer", action="append", choices=[*FOREIGN, *PRESETS])
    parser.add_argument("--shape", action="append", help="BATCHxLENGTH")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.peer = arguments.peer or ["pypi-gss"]
    arguments.shape = arguments.shape or (["2x4096", "1x65536"] if arguments.what == "layer" else ["1x1024"])
    device = pick_device("auto")
    ceilings = measure_ceilings(device).as_dict()
    rows = measured(arguments, device)
    found = document(rows, ceilings)
    print(json.dumps(found, indent=1, ensure_ascii=False) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
