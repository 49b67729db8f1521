"""Check the decoding kernels against the plain decoder on a GPU, then time them: tiles against tiles, whole steps.

    python benchmarks/decode_kernels_on_gpu.py results.json [--seconds 85] [--skip-sweep]

Errors first, against the float64 model: with its own weights (what bfloat16 costs, beside the plain decoder under
autocast) and with weights rounded to bfloat16 (what is left is the kernels' own). If those fail, nothing is timed.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import gss
from gss.decode import Decoder
from gss.graph_decode import GraphDecoder, prepare
from gss.nn.state import ModelState
from gss.ops import fast
from gss.ops.gpu.decode_step import Buffers, Tile, Tiles, Weights, launch_fold, launch_step

STARTED = time.perf_counter()
VARIANTS_ONE: dict[str, list[Tile]] = {
    "gate_one": [Tile(rows=8), Tile(rows=32), Tile(rows=32, warps=8), Tile(rows=16, warps=8), Tile(rows=8, warps=2)],
    "output_one": [
        Tile(rows=2, depth=4096),
        Tile(rows=8, depth=4096, warps=8),
        Tile(rows=4, depth=4096, warps=8),
        Tile(rows=8, depth=2048),
    ],
    "context_one": [Tile(rows=32), Tile(rows=8), Tile(rows=32, warps=8)],
    "head_one": [Tile(rows=8), Tile(rows=32), Tile(rows=32, warps=8)],
}
VARIANTS_MANY: dict[str, list[Tile]] = {
    "gate_many": [
        Tile(rows=64, depth=128, stages=4),
        Tile(rows=64, depth=64, stages=6),
        Tile(rows=32, depth=256, stages=3),
        Tile(rows=32, depth=128, stages=5),
    ],
    "output_many": [
        Tile(rows=64, depth=128, stages=5),
        Tile(rows=64, depth=256, stages=3),
        Tile(rows=32, depth=128, stages=4),
    ],
    "context_many": [Tile(rows=32, warps=8), Tile(rows=64, warps=4), Tile(rows=128, warps=8), Tile(rows=32, warps=4)],
    "head_many": [
        Tile(rows=128, depth=64, stages=4),
        Tile(rows=128, depth=128, stages=3, warps=8),
        Tile(rows=64, depth=64, stages=5),
    ],
}
FOLDS = [
    ("tf32x3", Tile(rows=64, depth=16, stages=2)),
    ("tf32x3", Tile(rows=64, depth=32, stages=1)),
    ("tf32x3", Tile(rows=64, depth=32, warps=8, stages=2)),
    ("bf16x3", Tile(rows=64, depth=16, stages=2)),
    ("bf16x3", Tile(rows=64, depth=32, stages=1)),
    ("tf32", Tile(rows=64, depth=16, stages=2)),
    ("tf32", Tile(rows=64, depth=32, stages=1)),
]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def median_us(run: Callable[[], object], repeats: int = 15, inner: int = 1) -> float:
    """Median time of one of the `inner` pieces of work that a call does, in µs."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / inner)
    return statistics.median(times)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def step_us(weights: Weights, batch: int, tiles: Tiles, steps: int = 8) -> float:
    buffers = Buffers(weights, batch, tiles)
    buffers.tokens.random_(0, weights.sizes[1])

    def work() -> None:
        for _ in range(steps):
            launch_step(weights, buffers, tiles)

    return median_us(captured(work).replay, inner=steps)


def rounded(model: gss.LanguageModel) -> gss.LanguageModel:
    """The model in float64 with the weights that the kernels have in bfloat16 rounded to it."""
    model = copy.deepcopy(model).double()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.bfloat16().double()
    return model


@torch.no_grad()
def check(model: gss.LanguageModel, batch: int, steps: int) -> dict[str, Any]:
    """Errors of the logits of all steps, and of the state after them, against float64."""
    tokens = torch.randint(0, model.config.vocab_size, (batch, 100 + steps), device="cuda")
    exact, close = copy.deepcopy(model).double(), rounded(model)
    with fast.disabled():
        _, state = exact(tokens[:, :100])
    single = ModelState(
        state.position, tuple({k: v.float() for k, v in held.items()} for held in state.layers)
    )  # fmt: skip
    quick, again = GraphDecoder(model, single), GraphDecoder(model, single, tiles=Tiles(overlap=False))
    plain, doubles, rounds = Decoder(model, single), Decoder(exact, state), Decoder(close, state)
    own = GraphDecoder(copy.deepcopy(close).float(), single)
    sums = torch.zeros(4, dtype=torch.float64, device="cuda")
    agree = torch.zeros((), device="cuda")
    same = True
    for i in range(100, 100 + steps):
        logits, reference, mine, near = (d.step(tokens[:, i]) for d in (quick, doubles, own, rounds))
        with torch.autocast("cuda", torch.bfloat16):
            cast = plain.step(tokens[:, i]).double()
        same = same and torch.equal(again.step(tokens[:, i]), logits)
        pairs = ((logits, reference), (mine, near), (cast, reference))
        sums += torch.stack([reference.square().sum(), *((a - b).square().sum() for a, b in pairs)])
        agree += (logits.argmax(-1) == reference.argmax(-1)).float().mean()
    total, *errors = sums.sqrt().tolist()
    pairs_of_states = zip(own.state().layers, rounds.state().layers, strict=True)
    return {
        "batch": batch,
        "steps": steps,
        "error_against_float64": errors[0] / total,
        "error_with_the_same_rounded_weights": errors[1] / total,
        "plain_decoder_under_autocast": errors[2] / total,
        "greedy_agreement_with_float64": agree.item() / steps,
        "state_error": max(error(a["modes"], b["modes"]) for a, b in pairs_of_states),
        "overlap_changes_nothing": same,
    }


def sweep(weights: Weights, batch: int, tiles: Tiles, variants: dict[str, list[Tile]], until: float) -> tuple:
    """Try other tiles for one kernel after another, each on the whole step; keep what is faster."""
    best = step_us(weights, batch, tiles)
    rows = [{"batch": batch, "kernel": "defaults", "us": best}]
    for name, options in variants.items():
        for tile in options:
            if time.perf_counter() - STARTED > until:
                return tiles, rows
            candidate = tiles.with_(**{name: tile})
            try:
                taken = step_us(weights, batch, candidate)
            except Exception as problem:  # a tile that does not fit is an answer too
                rows.append({"batch": batch, "kernel": name, "tile": asdict(tile), "error": str(problem)[:200]})
                continue
            rows.append({"batch": batch, "kernel": name, "tile": asdict(tile), "us": taken})
            if taken < best:
                best, tiles = taken, candidate
    return tiles, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--skip-sweep", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = gss.build_model(gss.preset("gss")).cuda().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms as training leaves them, not zeros and ones
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "checks": [check(model, batch, steps) for batch, steps in ((1, 140), (3, 70), (64, 66))],
    }
    for row in results["checks"]:
        print(json.dumps(row), flush=True)
        limit = 2e-5 if row["batch"] == 1 else 2e-2
        assert row["error_with_the_same_rounded_weights"] < limit, "the kernels are wrong: nothing is timed"
    print(f"checked after {time.perf_counter() - STARTED:.0f} s", flush=True)

    weights, tiles = prepare(model, 64), Tiles()
    rows = []
    for batch in (1, 8, 64):
        for overlap in (True, False):
            taken = step_us(weights, batch, tiles.with_(overlap=overlap))
            rows.append({"batch": batch, "kernel": f"step, overlap {overlap}", "us": taken})
            print(rows[-1], flush=True)
    folds = []
    for precision, tile in FOLDS:
        for batch in (64, 1):
            if time.perf_counter() - STARTED > arguments.seconds - 45:
                break
            candidate = replace(tiles, fold=tile, fold_precision=precision)
            buffers = Buffers(weights, batch, candidate)
            taken = median_us(lambda b=buffers, t=candidate: launch_fold(weights, b, t), repeats=5)
            folds.append({"batch": batch, "precision": precision, "tile": asdict(tile), "us": taken})
            print(f"fold, batch {batch}, {precision} {tile}: {taken:.0f} µs, {taken / 64:.1f} a token", flush=True)
            del buffers
    results["folds"] = folds
    if not arguments.skip_sweep:
        for batch, variants, until in ((1, VARIANTS_ONE, 25), (64, VARIANTS_MANY, 8)):
            tiles, tried = sweep(weights, batch, tiles, variants, arguments.seconds - until)
            rows += tried
            for row in tried:
                print(row, flush=True)
    results["steps"], results["tiles"] = rows, asdict(tiles)
    print("fastest tiles:", tiles)

    results["decoding"] = []
    for batch in (1, 8, 64):
        decoder = GraphDecoder(model, model.initial_state(batch), tiles=tiles, weights=weights)
        tokens = torch.randint(0, model.config.vocab_size, (batch,), device="cuda")
        greedy = median_us(lambda d=decoder, t=tokens: d.greedy(t, 512), repeats=3, inner=512)
        single = median_us(lambda d=decoder, t=tokens: d.step(t), repeats=128)
        row = {"batch": batch, "greedy_us": greedy, "greedy_tokens_s": 1e6 * batch / greedy, "step_us": single}
        results["decoding"].append(row)
        del decoder
    print(f"{'batch':>6}{'µs a token, greedy':>20}{'tokens/s':>12}{'µs a step()':>14}")
    for row in results["decoding"]:
        print(f"{row['batch']:6d}{row['greedy_us']:20.1f}{row['greedy_tokens_s']:12.0f}{row['step_us']:14.1f}")
    results["seconds"] = time.perf_counter() - STARTED
    print(f"{results['seconds']:.0f} s")
    arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
