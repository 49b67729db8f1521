"""Check the decoding kernels against the plain decoder on a GPU, then time them: tiles against tiles, whole steps.

    python benchmarks/decode_kernels_on_gpu.py results.json [--model gss-hybrid] [--seconds 85] [--skip-sweep]

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
from gss.ops import fast
from gss.ops.gpu.decode_step import (
    head_many,
    head_one,
    launch_fold,
    launch_step,
    many_attention,
    many_layer,
    one_attention,
    one_layer,
)
from gss.ops.gpu.decode_tensors import Buffers, Tile, Tiles, Weights

STARTED = time.perf_counter()
# What to try instead of the defaults, the most promising first: (batch, changes of `Tiles`).
VARIANTS: dict[str, list[tuple[int, list[dict[str, Any]]]]] = {
    "gss": [
        (
            64,
            [
                {"norm_early": False},
                {"channels": 128},
                {"splits": 4},
                {"context_many": Tile(rows=64, columns=16, warps=8)},
                {"gate_many": Tile(rows=64, depth=128, stages=3)},
                {"gate_many": Tile(rows=64, depth=256, stages=3)},
                {"head_many": Tile(rows=128, depth=128, stages=3)},
            ],
        ),
        (1, [{"context_one": Tile(rows=32)}, {"head_one": Tile(rows=16, warps=8)}, {"overlap": False}]),
        (8, [{"norm_early": False}, {"channels": 128}, {"splits": 16}, {"context_many": Tile(rows=128, columns=16)}]),
    ],
    "gss-hybrid": [
        (
            1,
            [
                {"attended_one": Tile(rows=4)},
                {"attended_one": Tile(rows=16, warps=8)},
                {"attend": Tile(rows=32)},
                {"attend": Tile(rows=64, warps=8)},
                {"splits": 4},
                {"splits": 16, "attend": Tile(rows=32)},
            ],
        ),
        (64, [{"attend": Tile(rows=32)}, {"attend": Tile(rows=128)}, {"attend": Tile(rows=64, warps=2)}]),
        (8, [{"attend": Tile(rows=32)}, {"attend": Tile(rows=128, warps=8)}]),
    ],
}
FOLDS = [
    (64, "bf16x3", Tile(rows=64, depth=16, stages=3)),
    (64, "tf32x3", Tile(rows=64, depth=16, stages=3)),
    (8, "bf16x3", Tile(rows=64, depth=16, stages=3)),
    (1, "tf32x3", Tile(rows=16, depth=32, stages=2)),
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
    buffers.lengths.fill_(weights.attention[0].chunk // 2 if weights.attention else 0)

    def work() -> None:
        for _ in range(steps):
            launch_step(weights, buffers, tiles)

    return median_us(captured(work).replay, inner=steps)


def parts_us(weights: Weights, batch: int, tiles: Tiles) -> dict[str, float]:
    """Each kernel of a layer alone, launched for all layers in turn: µs a launch, with no other kernel between; a
    Transformer block as a whole."""
    buffers = Buffers(weights, batch, tiles)
    layer_kernels, head = (one_layer, head_one) if batch == 1 else (many_layer, head_many)
    block = one_attention if batch == 1 else many_attention
    depth, blocks = weights.sizes[0], len(weights.attention)
    pending = () if batch == 1 else (many_layer(weights, buffers, tiles, 0),)
    taken = {}
    for part in ("norm", "gate", "context", "output"):
        if batch > 1 or part != "norm":
            graph = captured(
                lambda p=part: [layer_kernels(weights, buffers, tiles, i, *pending, only=p) for i in range(depth)]
            )
            taken[part] = median_us(graph.replay, inner=depth)
    if blocks:
        buffers.lengths.fill_(weights.attention[0].chunk)
        graph = captured(lambda: [block(weights, buffers, tiles, i, *pending) for i in range(blocks)])
        taken["attention"] = median_us(graph.replay, inner=blocks)
    taken["head"] = median_us(captured(lambda: head(weights, buffers, tiles, *pending)).replay)
    return taken


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
    single = state.map(lambda held: held.float() if held.is_floating_point() else held)
    quick, again = (
        GraphDecoder(model, single),
        GraphDecoder(model, single, tiles=Tiles.for_batch(batch).with_(overlap=False)),
    )
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
        "state_error": max(error(a["modes"], b["modes"]) for a, b in pairs_of_states if "modes" in a),
        "overlap_changes_nothing": same,
    }


def sweep(weights: Weights, batch: int, tiles: Tiles, variants: list[dict[str, Any]], until: float) -> tuple:
    """Try one change of the tiles after another, each on the whole step; keep what is faster."""
    best = step_us(weights, batch, tiles)
    rows: list[dict[str, Any]] = [{"batch": batch, "change": "none", "us": best}]
    for changes in variants:
        if time.perf_counter() - STARTED > until:
            break
        candidate, row = tiles.with_(**changes), {"batch": batch, "change": str(changes)}
        rows.append(row)
        try:
            row["us"] = step_us(weights, batch, candidate)
        except Exception as problem:  # a tile that does not fit is an answer too
            row["error"] = str(problem)[:200]
            continue
        if row["us"] < best:
            best, tiles = row["us"], candidate
    return tiles, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=list(VARIANTS), default="gss")
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--skip-sweep", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = gss.build_model(gss.preset(arguments.model)).cuda().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms as training leaves them, not zeros and ones
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    results: dict[str, Any] = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "checks": [check(model, batch, steps) for batch, steps in ((1, 66), (3, 8), (64, 66))],
    }
    for row in results["checks"]:
        print(json.dumps(row), flush=True)
        limit = 2e-5 if row["batch"] == 1 and arguments.model == "gss" else 2e-2  # a chunk's keys are bfloat16
        assert row["error_with_the_same_rounded_weights"] < limit, "the kernels are wrong: nothing is timed"
    print(f"checked after {time.perf_counter() - STARTED:.0f} s", flush=True)

    weights = prepare(model, 64)
    results |= {"folds": [], "steps": [], "tiles": {}, "parts": {}}
    chosen = {}
    to_try = VARIANTS[arguments.model]
    for number, (batch, variants) in enumerate(to_try):
        until = 0.0 if arguments.skip_sweep else arguments.seconds - 12 - 8 * (len(to_try) - number)
        chosen[batch], tried = sweep(weights, batch, Tiles.for_batch(batch), variants, until)
        results["steps"] += tried
        results["tiles"][batch] = asdict(chosen[batch])
        for row in tried:
            print(row, flush=True)
        results["parts"][batch] = {
            name: parts_us(weights, batch, tiles)
            for name, tiles in (
                ("overlap", chosen[batch]),
                ("one after another", replace(chosen[batch], overlap=False)),
            )
        }
        print(f"batch {batch}, µs a kernel:", results["parts"][batch], flush=True)
    for batch, precision, tile in FOLDS:
        if arguments.skip_sweep or arguments.model != "gss" or time.perf_counter() - STARTED > arguments.seconds - 12:
            break
        candidate = Tiles.for_batch(batch).with_(fold=tile, fold_precision=precision)
        buffers = Buffers(weights, batch, candidate)
        row = {"batch": batch, "precision": precision, "tile": asdict(tile)}
        results["folds"].append(row)
        try:
            row["us"] = median_us(lambda b=buffers, t=candidate: launch_fold(weights, b, t), repeats=5)
            print(
                f"fold, batch {batch}, {precision} {tile}: {row['us']:.0f} µs, {row['us'] / 64:.1f} a token", flush=True
            )
            if row["us"] <= min(r["us"] for r in results["folds"] if r["batch"] == batch and "us" in r):
                chosen[batch] = replace(chosen[batch], fold=tile, fold_precision=precision)
        except Exception as problem:
            row["error"] = str(problem)[:200]
            print(row, flush=True)
        del buffers
    print("fastest tiles:", chosen)

    results["decoding"] = []
    for batch in (1, 8, 64):
        decoder = GraphDecoder(model, model.initial_state(batch), tiles=chosen[batch], weights=weights)
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
