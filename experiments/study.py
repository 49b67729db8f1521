"""Runs of the paper's tables or of a study, within a given time; results also hold what the studies ask of them.

    python -m experiments.study init --only init-loud --scale small --data data --corpus books --out runs/init \\
        --seconds 540 [--shared] [--commit ID]

What is done is skipped, and what the time did not suffice for goes on with the same --out and --work. Results have time
constants by layer before and after training, and bits per byte by two counts: `raw`, the text before any vocabulary saw
it, and `given_back`, the text that the scored tokens decode to. For a lossless vocabulary they are the same; one that
drops newlines and unknown characters (T5's) never predicted what it dropped, nor paid for it.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.deadline import deadline
from experiments.results import ResultStore
from experiments.studies import STUDIES
from gss.config import parse_assignments
from gss.data import open_dataset
from gss.data.shards import COLUMNS
from gss.io.devices import pick_device
from gss.lm import load
from gss.model import LanguageModel, build_model
from gss.nn.state_space import DiagonalStateSpace
from gss.reproduce import SCALES, Trial, find_corpora, planned
from gss.reproduce.runner import score_trial, steps_done, train_trial
from gss.reproduce.trials import HELD_OUT

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_REACHES = (100, 1000, 4096)
_UNKNOWN = (" \u2047 ", "<unk>")  # as SentencePiece and the tokenizers library write it


def studied(trial: Trial, model: LanguageModel, result: dict[str, Any]) -> dict[str, Any]:
    """What a result holds beyond what `gss reproduce` measures."""
    raw, given_back = text_bytes(str(trial.corpus.folder), trial.scored_tokens)
    for row in result["lengths"].values():
        if row["loss"] is not None:
            bits = row["loss"] * result["evaluation"]["tokens"] / math.log(2)
            row |= {"bits_per_raw_byte": bits / raw, "bits_per_given_back_byte": bits / given_back}
    start = build_model(trial.config.model, trial.config.seed)
    texts = {"raw_bytes": raw, "given_back_bytes": given_back, "text": held_out_text(trial.corpus.folder)}
    return {
        "evaluation": {**result["evaluation"], **texts},
        "time_constants": {"start": time_constants(start), "end": time_constants(model)},
    }


@lru_cache(maxsize=8)
def text_bytes(folder: str, tokens: int) -> tuple[int, int]:
    """Bytes of the scored documents: of their raw text, and of what their tokens decode to, without the marks for
    unknown characters. A document that was cut counts with its share of its raw bytes."""
    dataset = open_dataset(folder, HELD_OUT, verify=False)
    tokenizer = dataset.tokenizer()
    raw, given_back, left = 0.0, 0, tokens
    for start, length, size in zip(dataset.starts, dataset.lengths, dataset.document_bytes, strict=True):
        count = min(int(length), left)
        if not count:
            break
        left -= count
        raw += float(size) * count / int(length)
        if not tokenizer.lossless:
            text = tokenizer.decode(dataset.tokens[start : start + count])
            given_back += len(without_unknown(text).encode())
    return round(raw), round(raw) if tokenizer.lossless else given_back


def without_unknown(text: str) -> str:
    """The text without the marks that stand for characters outside the vocabulary: those did not come back."""
    for mark in _UNKNOWN:
        text = text.replace(mark, "")
    return text


def held_out_text(folder: Path) -> str:
    """A hash of the held-out documents' texts in order, the same for every vocabulary: bits per byte compare there."""
    columns = np.fromfile(folder / f"{HELD_OUT}.documents", "<i8").reshape(len(COLUMNS), -1)
    digests = columns[[COLUMNS.index("digest_low"), COLUMNS.index("digest_high")]]
    return hashlib.sha256(digests.T.tobytes()).hexdigest()


@torch.no_grad()
def time_constants(model: LanguageModel) -> list[dict[str, Any]]:
    """For every state space, first to last: quantiles of −1/Re λ in tokens, and shares of modes that reach far."""
    found = []
    for number, layer in enumerate(model.sequence_layers(), 1):
        spaces = [module for module in layer.modules() if isinstance(module, DiagonalStateSpace)]
        for index, space in enumerate(spaces):
            tokens = space.time_constants().double().cpu().numpy()
            quantiles = [float(value) for value in np.quantile(tokens, QUANTILES)]
            found.append(
                {
                    "layer": f"{number}{'abcdef'[index] if len(spaces) > 1 else ''}",
                    "quantiles": dict(zip(map(str, QUANTILES), quantiles, strict=True)),
                    "share_over": {str(reach): float((tokens > reach).mean()) for reach in _REACHES},
                }
            )
    return found


def main() -> None:
    """Run a study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="a prepared corpus, or a folder of them")
    parser.add_argument("--corpus", action="append", default=[])
    parser.add_argument("--only", action="append", default=[], help="a system's name")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--evaluate-tokens", type=int)
    parser.add_argument("--set", action="append", default=[], help="a setting of every run, key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, help="save and stop when they are over")
    parser.add_argument("--shared", action="store_true", help="other work has the same device: keep no speed")
    parser.add_argument("--commit", default="", help="the commit to note")
    arguments = parser.parse_args()
    trials = planned(
        STUDIES[arguments.target],
        SCALES[arguments.scale],
        find_corpora([arguments.data], arguments.corpus),
        only=arguments.only,
        seeds=[int(seed) for seed in arguments.seeds.split(",")],
        tokens=arguments.tokens,
        evaluate_tokens=arguments.evaluate_tokens,
        changes=parse_assignments(arguments.set),
    )
    noted: dict[str, Any] = {"shared": arguments.shared}
    noted |= {"commit": arguments.commit} if arguments.commit else {}
    noted |= {"tokens_per_second": None} if arguments.shared else {}
    with deadline(arguments.seconds):
        left = run(trials, arguments.out, arguments.work or arguments.out / "runs", arguments.device, noted)
    print(f"not done: {', '.join(trial.name for trial in left)}" if left else "done")


def run(trials: Sequence[Trial], out: Path, work: Path, device: str, noted: Mapping[str, Any]) -> list[Trial]:
    """Train and score every trial that has no file in OUT/results yet; returns those that still have none.

    work            where run folders with checkpoints are, which only trials that are not done need
    noted           what every new result is to hold besides
    """
    store, where = ResultStore(out / "results"), pick_device(device)
    for trial in trials:
        store.find(trial)  # refuse what is not ours before any work is done
    for trial in trials:
        folder = work / trial.name
        if store.find(trial):
            print(f"{trial.name}: done before")
            continue
        print(f"{trial.name}: {trial.tokens:,} tokens")
        try:
            before, started = steps_done(folder), time.monotonic()
            if train_trial(trial, folder, where, quiet=True) is not None:
                break
            trained = time.monotonic()
            result = score_trial(trial, folder, where, lambda share: None)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            layout = {name: config[name] for name in ("compile", "micro_batch_tokens")}
            result["layout"] = {**layout, "tokens_per_second": result["tokens_per_second"]}
            result |= studied(trial, load(folder).model, result)
            wall = {"training": trained - started, "scoring": time.monotonic() - trained, "from_step": before}
            store.put(trial, {"wall_seconds": wall, **result, **noted})
        except (ValueError, RuntimeError) as error:  # diverged, or does not fit: the others may do
            print(f"{trial.name} failed: {error}")
    return [trial for trial in trials if not store.find(trial)]


if __name__ == "__main__":
    main()
