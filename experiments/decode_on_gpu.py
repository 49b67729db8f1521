"""The speed of decoding on a GPU in the commands that users run, with the goal next to each figure.

    python -m experiments.decode_on_gpu decode.json --vocabulary t5.model --seconds 230 [--code DATA]

The parts run one after another, the most important first. If one fails, takes too long, or there is too little time
left for it, the others still run; the file is written after each. With random weights (`--model`): `gss generate` with
empty and with full caches, in seconds from the command to the first text and tokens per second after it; where those
seconds go; the error of decoded logits against float64, and of greedy tokens against the plain decoder; and
`gss.decode.stream` with 64 prompts and 1; `gss serve` with 64 clients. Speculation is measured on text that repeats
itself: with the bundled model after the beginnings of this package's longest files (as in the figure for CPUs), and
with `--code`, a corpus of `gss prepare`, with a model trained on it for `--steps` steps, after held-out code. `--tiny`
runs everything in small sizes on any device; `--part NAME`, once or several times, runs only those parts.

The caches are Triton's, the driver's and, if the installed packages have no compiled bytecode, Python's.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gss
from experiments.measurements import header
from experiments.parts import Parts
from experiments.quality import RECIPE
from experiments.serve_throughput import make_run, served, serving, spread
from gss.bench.check import check_decoding
from gss.bench.machine import release
from gss.data import open_dataset
from gss.decode import GREEDY, Decoder, Engine, Request, Sampling, decoder, stream
from gss.generate import prompt_ids
from gss.precision import resolved, running

SAMPLED = Sampling(temperature=0.8, top_p=0.95)
WAYS = {"greedy": GREEDY, "0.8, top-p 0.95": SAMPLED}
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "PYTORCH_KERNEL_CACHE_PATH")
STAGES = """
import sys, time
marks = {"python": time.time()}
import torch; marks["import torch"] = time.time()
wait = torch.cuda.synchronize if sys.argv[2] == "cuda" else lambda: None
torch.zeros(1, device=sys.argv[2]); marks["CUDA"] = time.time()
import gss; from gss.decode import Engine, Request, Sampling; from gss.precision import running
marks["import gss"] = time.time()
lm = gss.load(sys.argv[1], device=sys.argv[2]); wait(); marks["load"] = time.time()
engine = Engine(lm.model, rows=1); wait(); marks["plans"] = time.time()
engine.submit(Request(prompt=list(range(2, 12)), max_tokens=200, sampling=Sampling(temperature=0.8, top_p=0.95)))
engine.admit()
with torch.no_grad(), running(lm.model, engine.precision):
    read = engine.prompts.round(); wait(); marks["prompt"] = time.time()
    list(engine._begin(read)); wait(); marks["first token"] = time.time()
engine.step(); wait(); marks["8 tokens, capture"] = time.time()
engine.step(); wait(); marks["8 tokens"] = time.time()
for _ in range(8): engine.step()
wait(); marks["64 tokens, fold"] = time.time()
import json; print(json.dumps([marks, "torch._dynamo" in sys.modules, len(sys.modules)]))
"""


def command(run: Path, tokens: int, *options: str) -> dict[str, Any]:
    """`gss generate` as a process: seconds to the first text it prints, what it says of its speed, seconds in all."""
    line = [sys.executable, "-m", "gss", "generate", str(run), "--prompt", "Once upon a time", "--no-echo"]
    line += ["--device", DEVICE.type, "--tokens", str(tokens), *options]
    started, arrivals = time.perf_counter(), []
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            while part := os.read(process.stdout.fileno(), 1 << 16):
                arrivals.append((time.perf_counter() - started, len(part)))
            said = process.stderr.read().decode(errors="replace")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(said[-1500:])
    speed = re.search(r"then ([\d,]+) tokens/s", " ".join(said.split()))
    rate = float(speed[1].replace(",", "")) if speed else 0.0
    first, last = arrivals[0][0], arrivals[-1][0]
    found = {"first_text_s": round(first, 2), "tokens_per_s": rate, "tokens": round(rate * (last - first))}
    return {**found, "seconds": round(time.perf_counter() - started, 2), "prints": len(arrivals)}


def stages(run: Path) -> dict[str, Any]:
    """Seconds of each stage from a process's start to its tokens; modules, and whether PyTorch's compiler is one."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-c", STAGES, str(run), DEVICE.type], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    marks, compiler, modules = json.loads(done.stdout.splitlines()[-1])
    before = [started, *marks.values()]
    seconds = {name: round(at - last, 3) for (name, at), last in zip(marks.items(), before, strict=False)}
    return {**seconds, "compiler imported": compiler, "modules": modules}


@torch.no_grad()
def check(model: gss.LanguageModel, count: int, rows: int) -> dict[str, Any]:
    """How far logits are from float64, for 1 row and many; how many tokens that the graph chose are the plain
    decoder's, and by how much of a logit the others fall short of its best, at most."""
    found: dict[str, Any] = {}
    for batch in (1, rows):
        figure = check_decoding(model, "", batch)
        found[f"logits against float64, {batch}"] = f"{figure.value:.2e}, {figure.note} (limit {figure.limit:.0e})"
        release(DEVICE)
    start = model.initial_state(1)
    with running(model, resolved("auto", model)):
        graph = decoder(model, start)
    assert isinstance(graph, Decoder) != ON_GPU, "this model has no CUDA graph"
    first = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    tokens = graph.generate(count, first).tokens[:, 0]
    plain = Decoder(model, start)
    logits = torch.cat([plain.step(token[None]) for token in torch.cat([first, tokens[:-1]])])
    shortfall = float((logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]).max())
    assert shortfall < 0.1, f"the graph's tokens are not the plain decoder's: they fall short by {shortfall}"
    same = int((logits.argmax(-1) == tokens).sum())
    return {**found, "greedy tokens, equal": f"{same} of {count}", "shortfall": shortfall}


def timed(model: gss.LanguageModel, batch: int, tokens: int, sampling: Sampling) -> dict[str, float]:
    """One run of `stream`: seconds to the first token, and tokens per second of all rows after it."""
    prompts = torch.randint(0, model.config.vocab_size, (batch, 128)).tolist()
    requests = [
        Request(prompt=prompt, max_tokens=tokens, sampling=sampling, seed=row) for row, prompt in enumerate(prompts)
    ]
    started, first, count = time.perf_counter(), 0.0, 0
    for output in stream(model, requests, speculate=False):  # random weights repeat themselves too much
        first = first or time.perf_counter() - started
        count += len(output.tokens)
    seconds = time.perf_counter() - started - first
    return {"first_token_s": round(first, 3), "tokens_per_s": round((count - batch) / seconds, 1)}


def streamed(model: gss.LanguageModel, tokens: int, batches: tuple[int, ...]) -> dict[str, Any]:
    """`stream` of each size, sampled and then greedy; after a short run, which compiles."""
    found = {}
    for batch in batches:
        for way in reversed(WAYS):
            timed(model, batch, min(tokens, 160), WAYS[way])
            found[f"{way}, {batch}"] = timed(model, batch, tokens, WAYS[way])
    return found


def clients(run: Path, tokens: int, number: int, rounds: int) -> dict[str, Any]:
    """`gss serve` with many clients, sampled as `stream` is: answers in one and streamed, by turns."""
    draw = random.Random(0)
    found: dict[str, Any] = {}
    started = time.perf_counter()
    with serving(run, "--device", DEVICE.type, "--drain", "0") as port:
        found["ready_s"] = round(time.perf_counter() - started, 2)
        plain: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "stream": False}
        kinds = {"server": plain}
        kinds["server streaming"] = {**plain, "stream": True, "stream_options": {"include_usage": True}}
        speeds: dict[str, list[float]] = {name: [] for name in kinds}
        gaps: list[float] = []
        for turn in range(rounds + 1):
            for name, options in kinds.items():
                speed, between = asyncio.run(served(port, number, tokens if turn else 32, 2, options, draw))
                if turn:  # the first is to see that it works
                    speeds[name].append(round(speed, 1))
                    gaps += between
    for name, each in speeds.items():
        found[name] = {"tokens_per_s": statistics.median(each), "rounds": each}
    found["between events"] = spread(gaps)
    return found


def continued(engine: Engine, request: Request) -> tuple[list[int], float, int]:
    """The tokens of a request, seconds after the first of them, and in how many steps they came."""
    engine.submit(request)
    outputs, first = [], 0.0
    for output in engine.run():
        first = first or time.perf_counter()
        outputs.append(output.tokens)
    seconds = time.perf_counter() - first
    return [token for part in outputs for token in part], seconds, sum(map(bool, outputs)) - 1


def speculated(model: gss.LanguageModel, prompts: list[list[int]], count: int, rounds: int = 5) -> dict[str, Any]:
    """Continuing prompts with speculation and without, by turns: for each prompt the ratio of the median seconds, how
    many tokens are equal before the first that differs, and tokens per step."""
    engines = {name: Engine(model, rows=1, speculate=name == "with") for name in ("with", "without")}
    found: dict[str, Any] = {}
    for way, sampling in WAYS.items():
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        ratios, equal, per_step = [], [], []
        for prompt in prompts:
            request = Request(prompt=prompt, max_tokens=count, sampling=sampling)
            turns = [{name: continued(engine, request) for name, engine in engines.items()} for _ in range(rounds + 1)]
            medians = {name: statistics.median(turn[name][1] for turn in turns[1:]) for name in engines}  # first: warm
            for name, value in medians.items():
                seconds[name].append(value)
            ratios.append(round(medians["without"] / medians["with"], 2))
            ours, plain = (turns[-1][name][0] for name in engines)
            equal.append([*(a == b for a, b in zip(ours, plain, strict=True)), False].index(False))
            per_step.append(round(count / turns[-1]["with"][2], 2))
        tokens = (count - 1) * len(prompts)
        found[way] = {f"tokens_per_s {name}": round(tokens / sum(each)) for name, each in seconds.items()}
        found[way] |= {"ratio": statistics.median(ratios), "ratios": ratios, "equal": equal, "of": count}
        found[way]["tokens per step"] = per_step
    return found


def after_files(count: int, number: int, characters: int, rounds: int) -> dict[str, Any]:
    """`speculated` for the bundled model after the beginnings of the package's longest files."""
    lm = gss.load(device=DEVICE)
    files = sorted(Path(gss.__file__).parent.rglob("*.py"), key=lambda path: path.stat().st_size)[-number:]
    texts = [path.read_text(encoding="utf-8")[:characters] for path in files]
    return speculated(lm.model, [prompt_ids(lm.tokenizer, text) for text in texts], count, rounds)


def after_code(data: Path, preset: str, steps: int, folder: Path, count: int, tiny: bool) -> dict[str, Any]:
    """`speculated` for a model trained on a corpus of code, at six places of held-out code."""
    from gss.io.runs import read_metrics
    from gss.training import resolve

    changes = {"steps": steps, "compile": False, "optimizer.warmup_steps": steps // 5, "checkpoint.every": steps}
    changes |= {"batch_tokens": 512, "length": 128} if tiny else {}
    held_out = open_dataset(data, "valid")
    settings = [f"{key}={str(value).lower()}" for key, value in (RECIPE | changes).items()]
    gss.train(resolve(preset, None, settings, held_out.vocab_size), data, folder / "code", quiet=True)
    rows = [row for row in read_metrics(folder / "code" / "metrics.jsonl") if row["kind"] == "train"]
    model = gss.load(folder / "code", device=DEVICE).model
    places = [len(held_out.tokens) * place // 7 for place in range(1, 7)]
    prompts = [held_out.tokens[place : place + 1500].tolist() for place in places]
    trained = {"steps": steps, "loss": rows[-1]["loss"], "tokens_per_s": rows[-1]["tokens_per_second"]}
    return {"trained": trained, **speculated(model, prompts, count)}


def figure(found: Any, *path: str) -> Any:
    """One figure of what was found; None where its part has none."""
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def goals(found: dict[str, Any], rows: int) -> str:
    """The figures that have goals, a line each."""
    at = partial(figure, found)
    bare, gaps = at("stream", f"0.8, top-p 0.95, {rows}", "tokens_per_s"), at("serve", "between events") or {}

    def share(name: str) -> float | None:
        speed = at("serve", name, "tokens_per_s")
        return speed / bare if speed and bare else None

    lines: list[tuple[str, float | None, float, str]] = [
        ("generate, tokens/s after the first text", at("generate, warm", "tokens_per_s"), 5000, "≥"),
        ("generate, first text, warm, s", at("generate, warm", "first_text_s"), 4, "≤"),
        ("generate, first text, new machine, s", at("generate, new machine", "first_text_s"), 20, "≤"),
        (f"stream, {rows} prompts, tokens/s", bare, 120_000, "≥"),
        (f"serve, {rows} clients, share of stream", share("server"), 0.6, "≥"),
        (f"serve, {rows} clients, streaming, share of stream", share("server streaming"), 0.4, "≥"),
        ("serve, p99 ÷ median between events", gaps["p99_ms"] / gaps["median_ms"] if gaps else None, 5, "≤"),
        *((f"{part}, greedy, ×", at(part, "greedy", "ratio"), 1.5, "≥") for part in SPECULATION),
    ]  # fmt: skip
    shown = []
    for name, value, goal, kind in lines:
        reached = "" if not value else "yes" if (value >= goal if kind == "≥" else value <= goal) else "NO"
        shown.append(f"{name:<55} {value or float('nan'):>12,.2f}   {kind} {goal:>9,}   {reached}")
    return "\n".join(shown)


SPECULATION = ("speculation, bundled model", "speculation, model of code")


def new_caches(folder: Path) -> None:
    """Let the processes that are started compile everything anew, and keep it for the next."""
    for name in CACHES:
        os.environ[name] = str(folder / name)
        Path(os.environ[name]).mkdir()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not Path(importlib.util.cache_from_source(str(torch.__file__))).exists():
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", default="bytes")
    parser.add_argument("--model", default="gss")
    parser.add_argument("--others", nargs="*", default=["gss2-small", "gss-hybrid"])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--served", type=int, default=2048, help="tokens per request to the server")
    parser.add_argument("--seconds", type=float, default=230.0, help="no part is begun that would need more in all")
    parser.add_argument("--code", type=Path, help="a prepared corpus of code, with the splits train and valid")
    parser.add_argument("--trained", default="gss-small", help="the preset that is trained on it")
    parser.add_argument("--steps", type=int, default=200, help="for so many steps of 131,072 tokens")
    parser.add_argument("--commit", default="")
    parser.add_argument("--tiny", action="store_true", help="small sizes on any device, to see that everything runs")
    parser.add_argument("--part", action="append", default=[], dest="parts", help="run only parts of this name")
    options = parser.parse_args()
    rows, drafted, rounds, files = 64, 400, 2, (6, 5000, 5)
    if options.tiny:
        options.model, options.others, options.trained = "gss-tiny", ["gss2-tiny", "gss-hybrid-tiny"], "gss-tiny"
        options.tokens, options.served, options.steps = 40, 400, 5
        rows, drafted, rounds, files = 4, 20, 1, (1, 300, 1)
    elif not ON_GPU and options.parts != [SPECULATION[0]]:
        parser.error(f"there is no GPU: use --tiny to see that everything runs, or --part '{SPECULATION[0]}' alone")
    found: dict[str, Any] = {**header(options.commit), "model": options.model}
    unmeasured = lambda name, why: found.update({name: {"error": why}})  # noqa: E731
    parts = Parts(options.out, lambda: found, unmeasured, options.seconds, clean=partial(release, DEVICE))

    def run_part(name: str, work: Callable[[], dict[str, Any]], needs: float, most: float) -> None:
        if options.parts and name not in options.parts:
            return
        parts.run(name, lambda: found.update({name: work()}), needs, most)
        print(str(found[name])[:400], flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        new_caches(folder)
        found["bytecode"] = "compiled by the first process" if "PYTHONPYCACHEPREFIX" in os.environ else "installed"
        run = make_run(folder / "run", options.model, options.vocabulary)
        sampled = ("--temperature", "0.8", "--top-p", "0.95")
        run_part("generate, new machine", lambda: command(run, options.tokens, *sampled), 10, 60)
        compiled = (folder / CACHES[0]).glob("*/*.cubin")
        found["kernels compiled"] = sorted(path.stem for path in compiled)
        run_part("generate, warm", lambda: command(run, options.tokens, *sampled), 6, 30)
        run_part("generate, again", lambda: command(run, options.tokens, *sampled, "--seed", "1"), 6, 30)
        run_part("stages", lambda: stages(run), 5, 30)
        model = gss.load(run, device=DEVICE).model
        run_part("stream", lambda: streamed(model, options.tokens, (rows, 1)), 10, 60)
        run_part("serve", lambda: clients(run, options.served, rows, rounds), 25, 70)
        run_part(SPECULATION[0], lambda: after_files(drafted, *files), 10, 60)
        run_part("check", lambda: check(model, 300 if ON_GPU else 20, rows), 8, 40)
        if options.code:
            work = (options.code, options.trained, options.steps, folder, drafted, options.tiny)
            run_part(SPECULATION[1], lambda: after_code(*work), 45, 120)
        for name in options.others:
            other = gss.build_model(gss.preset(name), seed=0).to(DEVICE).eval()
            run_part(f"{name}, stream", partial(streamed, other, options.tokens // 2, (rows, 1)), 10, 40)
            run_part(f"{name}, check", partial(check, other, 300 if ON_GPU else 20, rows), 8, 40)
            del other
    print(goals(found, rows))


if __name__ == "__main__":
    main()
