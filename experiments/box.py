"""The model in the box, from archives of books to the folder that ships, within a given time on one GPU.

    python -m experiments.box BOOKS --out box --minutes 9.5 [--work runs/box] [--tokenizer DIR] [--commit ID]

BOOKS holds books-train-*.tar.xz and books-valid.tar.xz (train/*.txt and valid/*.txt inside), or is such a folder of
text. In turn: unpack, train the vocabulary, tokenise, time a few steps with and without torch.compile, train as many
steps of the recipe `box` as fit into what is left of the time, round to int4, score the rounded model on the held-out
books at 512, 4k, 16k and 65k tokens, write the card, print a sample. What WORK holds already is not done again, and a
run that was cut short goes on: give the same command. A run stopped by the clock is written out too, and its card says
so; with --train-minutes or --steps it is not, and goes on in the next call.

`--from RUN` continues from trained weights with the recipe `fine-tune`, which needs no GPU:

    python -m experiments.box BOOKS --out box --from box --steps 600 --compile no --minutes 600 --score-tokens 1048576

`--trial` does all of it on a CPU in under a minute: a tiny model, a few of the books, or, without BOOKS, this
repository's own documentation.
"""

import argparse
import json
import math
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import gss
from experiments.box_export import FACTS, folder_size, write_box, write_card
from experiments.box_texts import PROMPT, TOKENS, line_breaks, samples, unpack, unwrap_books
from gss.accounting import account
from gss.bench.machine import source_commit
from gss.data import Dataset, load_tokenizer, open_dataset, prepare, read_manifest
from gss.data.tokenizer_training import train_tokenizer
from gss.evaluation import evaluate
from gss.io.runs import read_metrics
from gss.lm import load, run_folder
from gss.paper import LENGTHS
from gss.recipes import recipe_path
from gss.serve.about import time_constants

CONFIG, CONTINUED = recipe_path("box"), recipe_path("fine-tune")
PIECES, SAMPLE_BYTES = 8192, 30_000_000
TEMPERATURE = 0.8  # what `gss generate` samples with
PROBE_STEPS = 60
# Seconds kept for what follows training: rounding, scoring five million tokens at four lengths, the card.
AFTER_TRAINING = 100.0
# Seconds kept for saving a run that goes on in the next call.
SAVING = 20.0
# The share of the measured speed that is counted on, as evaluations, samples and checkpoints take time too.
CAUTION = 0.93
KEPT = ("training", "data", "hardware", "date", "commit")
"""What a card says of the training that its own continues from."""
TRIAL_STEPS = 12
TRIAL = [
    "model.width=64",
    "model.depth=3",
    "model.feedforward_width=64",
    "model.attention.heads=2",
    "model.matrix_state.heads=2",
    "model.matrix_state.value_width=32",
    "model.state_space.modes=8",
    "length=256",
    "batch_tokens=1024",
    "optimizer.warmup_steps=2",
    "device=cpu",
    "report.log_every=2",
    "report.evaluate_tokens=2048",
    "report.evaluate_lengths=[256]",
    "report.sample_tokens=20",
]


class Clock:
    """The time that all of it may take."""

    def __init__(self, minutes: float) -> None:
        self.started, self.limit = time.monotonic(), minutes * 60

    @property
    def left(self) -> float:
        return self.started + self.limit - time.monotonic()

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {what}", flush=True)


def corpus(arguments: argparse.Namespace, clock: Clock) -> Path:
    """The prepared corpus; its vocabulary is trained on the train split, or given."""
    data, vocabulary = arguments.work / "data", arguments.tokenizer or arguments.work / "vocabulary"
    if (data / "manifest.json").exists():
        clock.say(f"the corpus is in {data} already")
        return data
    text = unpack(arguments.books, arguments.work / "text", arguments.trial)
    clock.say(f"text in {text}")
    if not (vocabulary / "vocabulary.json").exists():
        # A trial's text has few words: ask for few pieces, of little text.
        pieces, most = (512, 200_000) if arguments.trial else (PIECES, SAMPLE_BYTES)
        made = train_tokenizer([str(text / "train")], vocabulary, vocab_size=pieces, max_bytes=most, force=True)
        clock.say(f"vocabulary of {made.vocab_size:,} pieces in {vocabulary}")
    also = unwrap_books(text / "train", arguments.work / "unwrapped" / "train")
    clock.say(f"{also:,} books once more with the lines of each paragraph joined")
    manifest = prepare([str(text), str(arguments.work / "unwrapped")], data, load_tokenizer(vocabulary))
    counts = ", ".join(f"{facts['tokens']:,} tokens of {name}" for name, facts in manifest.splits.items())
    clock.say(f"prepared {counts}")
    return data


def command(arguments: argparse.Namespace, data: Path, run: Path, settings: list[str]) -> list[str]:
    trial = TRIAL if arguments.trial else []
    sets = [item for setting in [*trial, *settings, *arguments.set] for item in ("--set", setting)]
    how = ["--config", str(CONTINUED), "--from", arguments.start] if arguments.start else ["--config", str(CONFIG)]
    base = [sys.executable, "-m", "gss", "train", *how]
    return [*base, "--data", str(data), "--out", str(run), *sets]


def probe(arguments: argparse.Namespace, data: Path, compiled: bool, seconds: float) -> dict[str, Any]:
    """Tokens a second of a short run, and what starting it took beside its steps; an error after so many seconds."""
    run = arguments.work / f"probe-compile-{str(compiled).lower()}"
    shutil.rmtree(run, ignore_errors=True)
    quick = [f"steps={PROBE_STEPS}", "report.log_every=20", "report.evaluate_every=0"]
    started = time.monotonic()
    line = command(arguments, data, run, [*quick, f"compile={str(compiled).lower()}"])
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"compile": compiled, "error": f"not done after {seconds:.0f} s"}
    seconds = time.monotonic() - started
    if done.returncode:
        return {"compile": compiled, "error": done.stderr[-1500:]}
    row = read_metrics(run / "metrics.jsonl")[-1]
    config = json.loads((run / "config.json").read_text())
    speed = row["tokens_per_second"]
    return {
        "compile": compiled,
        "tokens_per_second": speed,
        "batch_tokens": config["batch_tokens"],
        "startup_seconds": seconds - PROBE_STEPS * config["batch_tokens"] / speed,
    }


def plan(arguments: argparse.Namespace, data: Path, clock: Clock) -> dict[str, Any]:
    """How many steps, and whether compiled: as decided in an earlier call, as asked for, or as fits the time."""
    kept = arguments.work / "plan.json"
    if kept.exists():
        return json.loads(kept.read_text())
    choices = {"auto": (False, True), "no": (False,), "yes": (True,)}[arguments.compile]
    if arguments.trial or (arguments.steps and len(choices) == 1):  # there is nothing to time
        decided: dict[str, Any] = {"steps": arguments.steps or TRIAL_STEPS, "compile": choices == (True,), "probes": []}
    else:
        probes = [probe(arguments, data, compiled, clock.left / 3) for compiled in choices]
        clock.say(f"probes: {json.dumps(probes)}")
        best = max(probes, key=lambda row: row.get("tokens_per_second", 0.0))
        if "error" in best:
            raise RuntimeError(f"training fails: {best['error']}")
        whole = arguments.train_minutes and arguments.train_minutes * 60
        seconds = (whole or clock.left - AFTER_TRAINING) - best["startup_seconds"]
        fits = int(seconds * CAUTION * best["tokens_per_second"] / best["batch_tokens"])
        decided = {"steps": arguments.steps or fits, "compile": best["compile"], "probes": probes}
    if decided["steps"] < 10:
        raise ValueError(f"{arguments.minutes} minutes leave time for {decided['steps']} steps: give more --minutes")
    _keep(arguments.work, decided)
    return decided


def _asked(arguments: argparse.Namespace) -> bool:
    """Whether the number of steps does not depend on the time of this call."""
    return bool(arguments.steps or arguments.train_minutes)


def _keep(work: Path, decided: dict[str, Any]) -> None:
    (work / "plan.json").write_text(json.dumps(decided, indent=1) + "\n")


def train(arguments: argparse.Namespace, data: Path, decided: dict[str, Any], clock: Clock) -> float:
    """Train, or go on, to the end or until the time is up; returns the minutes of this call and of those before it."""
    steps = decided["steps"]
    settings = [
        f"steps={steps}",
        f"compile={str(decided['compile']).lower()}",
        f"report.evaluate_every={max(1, steps // 3)}",
        f"checkpoint.every={max(1, steps // 12)}",
    ]
    if decided.get("complete"):
        return float(decided["minutes"])
    started = time.monotonic()
    kept = SAVING if _asked(arguments) else AFTER_TRAINING
    process = subprocess.Popen(command(arguments, data, arguments.work / "run", settings))
    try:
        code = process.wait(timeout=max(1.0, clock.left - kept))
    except subprocess.TimeoutExpired:
        clock.say("the time for training is up: saving what there is")
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code not in (0, 128 + signal.SIGTERM):
        raise RuntimeError(f"gss train ended with status {code}")
    decided["complete"] = code == 0
    decided["minutes"] = decided.get("minutes", 0.0) + (time.monotonic() - started) / 60
    _keep(arguments.work, decided)
    return decided["minutes"]


def score(box: Path, run: Path, held_out: Dataset, device: str, trial: bool, most: int | None) -> dict[str, Any]:
    """What the rounded model scores at each length that the books reach, and what rounding has cost."""
    beside = 1 << 17 if device == "cuda" else 1 << 14
    lengths, most, beside = (LENGTHS, most, beside) if not trial else ((128, 512), 8192, 4096)
    model = load(box, device=device, weights="fp32")
    reached = [length for length in lengths if length <= held_out.lengths.max()]
    result = evaluate(model, held_out, reached, max_tokens=most, batch_tokens=beside, precision="fp32")
    rows = [{**asdict(row), "perplexity": row.perplexity} for row in result.rows]
    for row in rows:
        row.pop("by_position")
    length, tokens = lengths[1], min(result.tokens, 1 << 20)
    before, after = (
        evaluate(which, held_out, [length], max_tokens=tokens, batch_tokens=beside, precision="fp32").rows[0]
        for which in (load(run, device=device), model)
    )
    return {
        "scores": rows,
        "held_out": {"documents": result.documents, "tokens": result.tokens, "hash": held_out.hash},
        "rounding": {
            "length": length,
            "tokens": tokens,
            "before": before.perplexity,
            "after": after.perplexity,
        },
    }


def facts(
    arguments: argparse.Namespace, run: Path, data: Path, decided: dict[str, Any], minutes: float
) -> dict[str, Any]:
    """All that the card says, from the run's own files, but the scores and the sample."""
    model, tokenizer, step, _ = load(arguments.out)
    config = json.loads((arguments.out / "config.json").read_text())
    manifest = read_manifest(data)
    split = manifest.splits["train"]
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    speeds = sorted(row["tokens_per_second"] for row in rows)
    every = math.ceil(len(rows) / 40)
    kinds = model.config.layers
    on_gpu = torch.cuda.is_available() and not arguments.trial
    return {
        "weights": arguments.weights,
        "parameters": account(model.config).parameters,
        "layers": ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
        + f", width {model.config.width}",
        "vocabulary": f"{tokenizer.kind}, {tokenizer.vocab_size:,} pieces, lossless, hash `{tokenizer.hash[:16]}`",
        "data": {
            "what": "a trial of the script" if arguments.trial else "public-domain books of PG-19",
            "documents": split["documents"],
            "tokens": split["tokens"],
            "bytes": split["bytes"],
            "hash": manifest.hash,
        },
        "training": {
            "steps": step,
            "planned_steps": decided["steps"],
            "batch_tokens": config["batch_tokens"],
            "length": config["length"],
            "learning_rate": config["optimizer"]["learning_rate"],
            "seed": config["seed"],
            "compile": config["compile"],
            "minutes": minutes,
            "tokens_per_second": speeds[len(speeds) // 2],
            "loss_curve": [[row["step"], round(row["loss"], 4)] for row in rows if row["step"] % every == 0],
        },
        "probes": decided["probes"],
        "hardware": torch.cuda.get_device_name() if on_gpu else f"a CPU ({platform.machine()})",
        "versions": f"gss {gss.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": arguments.commit or source_commit() or "not recorded",
        **before(arguments.start),
    }


def before(start: str | None) -> dict[str, Any]:
    """What is known of the training of the box that this one continues from."""
    if start is None:
        return {}
    known = json.loads((run_folder(start) / FACTS).read_text())
    return {"before": {name: known[name] for name in KEPT}}


def finish(
    arguments: argparse.Namespace,
    run: Path,
    data: Path,
    decided: dict[str, Any],
    minutes: float,
    clock: Clock,
    more: dict[str, Any] | None = None,
) -> None:
    """From a trained run to the folder that ships, with its card, on which `more` stands, too."""
    if (arguments.out / "config.json").exists():
        shutil.rmtree(arguments.out)
    box = write_box(run, arguments.out, weights=arguments.weights)
    device = "cuda" if torch.cuda.is_available() and not arguments.trial else "cpu"
    known = facts(arguments, run, data, decided, minutes) | (more or {})
    held_out = open_dataset(data, "valid")
    known |= score(box, run, held_out, device, arguments.trial, arguments.score_tokens)
    clock.say("scored")
    lm = load(box)
    known["memory"] = time_constants(lm.model)
    known["line_breaks"] = line_breaks(lm, islice(held_out.documents(), 4))
    text = lm.generate(PROMPT, max_tokens=200, temperature=TEMPERATURE)
    known["samples"] = samples(lm, 10 if arguments.trial else TOKENS)
    known["sample"] = {"prompt": PROMPT, "temperature": TEMPERATURE, "seed": 0, "text": PROMPT + text}
    known["bytes"] = folder_size(box)  # the card and its figures, a few kB, are not written yet
    write_card(box, known)
    print((box / "card.md").read_text())
    clock.say(f"{box}: {folder_size(box):,} bytes; put it at src/gss/box/model to ship it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?", help="the archives' folder; a trial does without")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make; an earlier box there is replaced")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything, preparation and scoring included")
    parser.add_argument("--work", type=Path, default=Path("runs/box"), help="text, corpus, run")
    parser.add_argument("--tokenizer", type=Path, help="a vocabulary that `gss tokenizer train` made")
    parser.add_argument("--train-minutes", type=float, help="of training alone; over several calls, if need be")
    parser.add_argument("--steps", type=int, help="instead of as many as fit; over several calls, if need be")
    parser.add_argument("--from", dest="start", metavar="RUN", help="continue from the weights of a run, or of the box")
    parser.add_argument("--weights", choices=("int4", "int8", "bf16"), default="int4", help="how matrices are stored")
    parser.add_argument("--score-tokens", type=int, help="score so many held-out tokens; all without it")
    parser.add_argument("--compile", choices=("auto", "yes", "no"), default="auto", help="auto: time both")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, key=value")
    parser.add_argument("--commit", default="")
    parser.add_argument("--trial", action="store_true")
    arguments = parser.parse_args()
    if arguments.books is None and not arguments.trial:
        parser.error("name the folder of the archives, or give --trial")
    clock = Clock(arguments.minutes)
    arguments.work.mkdir(parents=True, exist_ok=True)
    data = corpus(arguments, clock)
    decided = plan(arguments, data, clock)
    clock.say(f"{decided['steps']:,} steps, compile {decided['compile']}")
    minutes = train(arguments, data, decided, clock)
    clock.say("trained")
    if _asked(arguments) and not decided["complete"]:
        sys.exit("there are steps left, and they were asked for: give the same command again")
    if _asked(arguments) and clock.left < AFTER_TRAINING:
        sys.exit("trained, with too little time left to score it: give the same command again")
    finish(arguments, arguments.work / "run", data, decided, minutes, clock)


if __name__ == "__main__":
    main()
