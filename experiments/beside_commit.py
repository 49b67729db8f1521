"""This commit's speed compared with another's on one GPU: a GSS layer forward and backward, and a training step.

    git archive COMMIT src | tar x -C OTHER
    python -m experiments.beside_commit OTHER [--rounds 2] [--out FILE]

The two take turns, each turn in a process that imports `gss` from its tree. The best turn counts, since other work on
the machine can only slow one down.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
SHAPES = ((16, 4096), (1, 65_536))


def measure() -> dict[str, float]:
    """Milliseconds of the `gss` that is imported."""
    import torch

    import gss
    from gss.nn.gss import GSSLayer

    config = gss.preset("gss")
    found = {}
    for batch, length in SHAPES:
        torch.manual_seed(0)
        layer = GSSLayer(config).cuda()
        x = torch.randn(batch, length, config.width, device="cuda", requires_grad=True)

        def both_ways(layer: Any = layer, x: Any = x) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                y, _ = layer(x, keep_state=False)
            y.sum().backward()

        found[f"layer, {batch} × {length:,}, ms"] = _milliseconds(both_ways, 20)
    batch, length = SHAPES[0]
    found[f"training step, {batch} × {length:,}, ms"] = _milliseconds(_training_step(config, batch, length), 10)
    return found


def _training_step(config: Any, batch: int, length: int) -> Any:
    import torch

    import gss
    from gss.loss import next_token_loss

    torch._dynamo.reset()
    model = gss.build_model(config).cuda()
    for layer in model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, config.vocab_size, (batch, length), device="cuda")
    mask = torch.ones_like(tokens, dtype=torch.bool)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            hidden, _ = model.hidden(tokens, keep_state=False)
            loss = next_token_loss(model.logits, model.embedding.weight, hidden, tokens, mask)
        (loss / tokens.numel()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _milliseconds(run: Any, repeats: int) -> float:
    """The median, timed by events without synchronizing in between."""
    import torch

    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the other commit's tree, with its src")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.other is None:
        print(json.dumps(measure()))
        return
    turns: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    for _ in range(given.rounds):
        for name, tree in (("other", given.other), ("this", HERE)):
            paths = os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(Path(__file__).resolve())]
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True, text=True
            )
            turns[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, turns[name][-1], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(turns, indent=1) + "\n", encoding="utf-8")
    print("| | other | this | this ÷ other |\n|---|---:|---:|---:|")
    for figure in turns["this"][0]:
        old, new = (min(turn[figure] for turn in turns[name]) for name in ("other", "this"))
        print(f"| {figure} | {old:,.2f} | {new:,.2f} | {new / old:.3f} |")


if __name__ == "__main__":
    main()
