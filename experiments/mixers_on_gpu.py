"""Trains candidates of experiments/mixers.py on a prepared corpus and scores them on held-out documents.

    python experiments/mixers_on_gpu.py DATA --names llama,ssa+lr=6.4e-3 --steps 500 --rows 16 --out results.json

DATA is a corpus of `gss prepare` with the splits train and valid. Every candidate gets the same batches. One process
per candidate, `--workers` at a time; what has not ended at `--seconds` is stopped and missing from the table. The JSON
has each document's loss at each length, so that two candidates can be paired over documents.
"""

import argparse
import itertools
import json
import logging
import math
import subprocess
import sys
import time
import tomllib
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mixers import Candidate, Model
from torch import Tensor

BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "ssa": {"pattern": "SSASSASSA"},
    "pure": {"pattern": "SSSSSSSSS"},
}


def variant(name: str) -> dict[str, Any]:
    """A candidate's settings from its name: a base, then `+key=value` in TOML's syntax."""
    base, *changes = name.split("+")
    settings = dict(BASES[base])
    for change in changes:
        settings |= tomllib.loads(change)
    return settings


def orthogonal(stack: Tensor) -> Tensor:
    """Newton–Schulz: [n, rows, columns] with all singular values near 1."""
    x = stack.bfloat16()
    if stack.shape[-2] > stack.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = -4.775 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return x.mT if stack.shape[-2] > stack.shape[-1] else x


class Muon:
    """On matrices, batched over those of one shape; decay decoupled, updates scaled as AdamW's root mean square."""

    def __init__(self, parameters: list[Tensor], decay: float = 0.1, momentum: float = 0.95) -> None:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            shapes.setdefault(tuple(parameter.shape), []).append(parameter)
        self.groups = [(members, torch.zeros_like(torch.stack(list(members)))) for members in shapes.values()]
        self.decay, self.momentum = decay, momentum
        self.orthogonal = torch.compile(orthogonal, dynamic=False) if parameters[0].is_cuda else orthogonal

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for members, average in self.groups:
            gradient = torch.stack([p.grad for p in members])
            average.lerp_(gradient, 1 - self.momentum)
            update = self.orthogonal(gradient.lerp(average, self.momentum)).float()
            scale = 0.2 * math.sqrt(max(update.shape[1:]))
            torch._foreach_mul_(members, 1 - rate * self.decay)
            torch._foreach_add_(members, list(update.unbind()), alpha=-rate * scale)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")


def train(name: str, data: str, steps: int, rows: int, length: int, seed: int, lengths: list[int]) -> dict[str, Any]:
    from gss.data.shards import open_dataset

    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = open_dataset(data, "train", verify=False)
    tokens = torch.from_numpy(dataset.tokens.astype(np.int32)).to(device)
    segments = (len(tokens) - 1) // length
    order = torch.from_numpy(np.random.default_rng(seed).permutation(segments)).to(device)
    settings = variant(name)
    rate, embedding_rate = settings.pop("lr", 3.2e-3), settings.pop("embedding_lr", None)
    decay = settings.pop("decay", 0.1)
    candidate = replace(Candidate(vocab=max(dataset.vocab_size, 256)), **settings)
    model = Model(candidate).to(device)
    embedding = model.embedding.weight
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.endswith(".weight") and p is not embedding]
    matrices = [p for p in matrices if min(p.shape) > 16]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen and p is not embedding]
    groups = [
        {"params": [embedding], "weight_decay": decay, "factor": (embedding_rate or rate) / rate},
        {"params": rest, "weight_decay": 0.0, "factor": 1.0},
    ]
    adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    muon = Muon(matrices, decay)
    if device == "cuda":
        for layer in model.layers:
            layer.compile()
    loss_of = torch.compile(cross_entropy) if device == "cuda" else cross_entropy

    def losses(x: Tensor, y: Tensor, backward: bool) -> Tensor:
        """Of every token, flat; gradients of their mean are added up when asked."""
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = model(x)
        cut = hidden.detach().requires_grad_(backward)
        found = []
        for part, target in zip(cut.flatten(0, 1).split(16_384), y.flatten().split(16_384), strict=True):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = loss_of(part, embedding, target)
            if backward:
                (loss.sum() / (rows * length)).backward()
            found.append(loss.detach())
        if backward:
            hidden.backward(cut.grad)
        return torch.cat(found)

    warm = min(100, steps // 8)
    micro = max(1, min(rows, 65_536 // length))
    history, started, total = [], time.perf_counter(), torch.zeros((), device=device)
    for step in range(steps):
        picked = order[(torch.arange(rows, device=device) + step * rows) % segments]
        window = tokens[picked[:, None] * length + torch.arange(length + 1, device=device)].long()
        progress = max(0.0, (step - warm) / max(1, steps - warm))
        now = rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in adam.param_groups:
            group["lr"] = now * group["factor"]
        for part in window.split(micro):
            total = total + losses(part[:, :-1], part[:, 1:], True).sum()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        muon.step(now)
        model.zero_grad(set_to_none=True)
        if step == 19:
            float(total)
            started = time.perf_counter()
        if step % 50 == 49:
            history.append(round(float(total) / (50 * rows * length), 4))
            total = torch.zeros_like(total)
            print(name, step + 1, history[-1], file=sys.stderr, flush=True)
    float(total)
    speed = (steps - 20) * rows * length / (time.perf_counter() - started)
    scores = score(model, losses, data, lengths, device)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "name": name,
        "settings": variant(name),
        "seed": seed,
        "parameters": parameters,
        "tokens": steps * rows * length,
        "tokens_per_second": round(speed),
        "train": history,
        **scores,
    }


@torch.no_grad()
def score(model: Model, losses: Any, data: str, lengths: list[int], device: str) -> dict[str, Any]:
    """Every held-out document's summed loss and tokens by length, and the mean loss by position at 4,096."""
    from gss.data.shards import open_dataset

    model.eval()
    held_out = open_dataset(data, "valid", verify=False)
    documents: dict[str, list[list[float]]] = {}
    positions = torch.zeros(4096, device=device)
    rows_at_4k = 0
    for length in lengths:
        found = []
        for d in range(len(held_out)):
            ids = torch.from_numpy(held_out.tokens[held_out.starts[d] : held_out.ends[d]].astype(np.int64)).to(device)
            count = min((len(ids) - 1) // length, 131_072 // length)
            if not count:
                found.append([0.0, 0])
                continue
            x, y = ids[: count * length].view(count, length), ids[1 : count * length + 1].view(count, length)
            each = max(1, 65_536 // length)
            parts = [losses(a, b, False) for a, b in zip(x.split(each), y.split(each), strict=True)]
            whole = torch.cat(parts)
            found.append([float(whole.double().sum()), count * length])
            if length == 4096:
                positions += whole.view(count, length).sum(0)
                rows_at_4k += count
        documents[str(length)] = found
    edges = [0, 16, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    by_position = [round(float(positions[a:b].mean()) / max(1, rows_at_4k), 4) for a, b in itertools.pairwise(edges)]
    half = {
        f"{what}-{length}": round(math.exp(sum(n for n, _ in part) / max(1, sum(c for _, c in part))), 3)
        for length, rows in documents.items()
        for what, part in (("choose", rows[0::2]), ("report", rows[1::2]))
    }
    return {"perplexity": half, "by_position": by_position, "documents": documents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--names", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("mixers.json"))
    parser.add_argument("--worker", action="store_true", help="be the process of one candidate")
    given = parser.parse_args()
    lengths = [int(part) for part in given.lengths.split(",")]
    if given.worker:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        found = train(given.names, given.data, given.steps, given.rows, given.length, given.seed, lengths)
        print(json.dumps(found), flush=True)
        return
    deadline = time.monotonic() + given.seconds
    results: list[dict[str, Any]] = []

    def work(name: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", "--names", name]
        try:
            left = max(1.0, deadline - time.monotonic())
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=left, check=True, text=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{name}: {type(error).__name__}", flush=True)
            return
        results.append(json.loads(done.stdout.splitlines()[-1]))
        given.out.write_text(json.dumps(results) + "\n")

    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(work, given.names.split(",")))
    for r in sorted(results, key=lambda r: r["perplexity"][f"choose-{lengths[-1]}"]):
        scores = " ".join(f"{r['perplexity'][f'choose-{n}']:8.3f}" for n in lengths)
        print(f"{r['name']:60} {r['parameters'] / 1e6:6.2f}M {r['tokens_per_second']:9,} {scores}", r["by_position"])


if __name__ == "__main__":
    main()
