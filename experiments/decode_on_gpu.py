"""What users get from decoding on a GPU, in the user's own commands.

    python -m experiments.decode_on_gpu decode.json --vocabulary t5.model --seconds 120

Run folders of presets with random weights are made. Then, as far as the seconds go and each by itself, so that one
failure leaves the others: `gss generate` with an empty cache of compiled kernels and with a full one, in seconds from
the command to the first text and tokens per second after it; where those seconds go; greedy tokens of the CUDA graph
beside the plain decoder's, teacher-forced; `gss.decode.stream` with 1 and 64 prompts; `gss serve` with 64 clients; the
other presets through the same check and `stream`; speculation beside decoding without it, which alone is

    python -m experiments.decode_on_gpu speculation.json --speculation --run RUN --text model.py

where random weights repeat one token for ever if they are greedy, and never repeat themselves if they are sampled: the
best case and the worst. RUN continues the text's first 5,000 characters. Needs a CUDA device.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

import gss
from experiments.serve_throughput import make_run, served, serving, spread
from gss.decode import GREEDY, Decoder, Engine, Request, Sampling, decoder, stream
from gss.generate import prompt_ids
from gss.precision import running

SAMPLED = Sampling(temperature=0.8, top_p=0.95)
WAYS = {"greedy": GREEDY, "0.8, top-p 0.95": SAMPLED}
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "PYTORCH_KERNEL_CACHE_PATH")
STAGES = """
import sys, time
marks = {"python": time.time()}
import torch; marks["import torch"] = time.time()
torch.zeros(1, device="cuda"); marks["CUDA"] = time.time()
import gss; from gss.decode import Engine, Request, Sampling; from gss.precision import running
marks["import gss"] = time.time()
lm = gss.load(sys.argv[1], device="cuda"); torch.cuda.synchronize(); marks["load"] = time.time()
engine = Engine(lm.model, rows=1); torch.cuda.synchronize(); marks["plans"] = time.time()
engine.submit(Request(prompt=list(range(2, 12)), max_tokens=200, sampling=Sampling(temperature=0.8, top_p=0.95)))
engine.admit()
with torch.no_grad(), running(lm.model, engine.precision):
    read = engine.prompts.round(); torch.cuda.synchronize(); marks["prompt"] = time.time()
    list(engine._begin(read)); torch.cuda.synchronize(); marks["first token"] = time.time()
engine.step(); torch.cuda.synchronize(); marks["8 tokens, capture"] = time.time()
engine.step(); torch.cuda.synchronize(); marks["8 tokens"] = time.time()
for _ in range(8): engine.step()
torch.cuda.synchronize(); marks["64 tokens, fold"] = time.time()
import json; print(json.dumps(marks))
"""


def command(run: Path, tokens: int, *options: str) -> dict[str, Any]:
    """`gss generate` as a process: seconds to the first text it prints, what it says of its speed, seconds in all."""
    line = [sys.executable, "-m", "gss", "generate", str(run), "--prompt", "Once upon a time", "--no-echo"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*line, "--tokens", str(tokens), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    arrivals = []
    while part := os.read(process.stdout.fileno(), 1 << 16):
        arrivals.append((time.perf_counter() - started, len(part)))
    said = process.stderr.read().decode(errors="replace")
    if process.wait():
        raise RuntimeError(said[-1500:])
    speed = re.search(r"then ([\d,]+) tokens/s", " ".join(said.split()))
    rate = float(speed[1].replace(",", "")) if speed else 0.0
    first, last = arrivals[0][0], arrivals[-1][0]
    found = {"first_text_s": round(first, 2), "tokens_per_s": rate, "tokens": round(rate * (last - first))}
    return {**found, "seconds": round(time.perf_counter() - started, 2), "prints": len(arrivals)}


def stages(run: Path) -> dict[str, float]:
    """Seconds of each stage from a process's start to its tokens."""
    started = time.time()
    done = subprocess.run([sys.executable, "-c", STAGES, str(run)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    marks = json.loads(done.stdout.splitlines()[-1])
    before = [started, *marks.values()]
    return {name: round(at - last, 3) for (name, at), last in zip(marks.items(), before, strict=False)}


@lru_cache(maxsize=1)
def untrained(name: str) -> gss.LanguageModel:
    """A preset with random weights."""
    return gss.build_model(gss.preset(name), seed=0).cuda().eval()


@torch.no_grad()
def check(name: str, count: int = 300) -> dict[str, float]:
    """How many tokens that the graph chose are the plain decoder's, and by how much of a logit the others fall short
    of its best, at most."""
    model = untrained(name)
    start = model.initial_state(1)
    with running(model, "bf16"):
        graph = decoder(model, start)
    assert not isinstance(graph, Decoder), "this model has no CUDA graph"
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    tokens = graph.generate(count, first).tokens[:, 0]
    plain = Decoder(model, start)
    logits = torch.cat([plain.step(token[None]) for token in torch.cat([first, tokens[:-1]])])
    shortfall = float((logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]).max())
    assert shortfall < 0.1, f"the graph's tokens are not the plain decoder's: they fall short by {shortfall}"
    return {"tokens": count, "equal": int((logits.argmax(-1) == tokens).sum()), "shortfall": shortfall}


def timed(model: gss.LanguageModel, batch: int, tokens: int, sampling: Sampling) -> dict[str, float]:
    """One run of `stream`: seconds to the first token, and tokens per second of all rows after it."""
    prompts = torch.randint(0, model.config.vocab_size, (batch, 128)).tolist()
    requests = [
        Request(prompt=prompt, max_tokens=tokens, sampling=sampling, seed=row) for row, prompt in enumerate(prompts)
    ]
    started, first, count = time.perf_counter(), 0.0, 0
    for output in stream(model, requests):
        first = first or time.perf_counter() - started
        count += len(output.tokens)
    seconds = time.perf_counter() - started - first
    return {"first_token_s": round(first, 3), "tokens_per_s": round((count - batch) / seconds, 1)}


def streamed(name: str, tokens: int) -> dict[str, Any]:
    """`stream` in both ways, 1 and 64 prompts; the second of two runs, the first compiles."""
    model, found = untrained(name), {}
    for way, sampling in WAYS.items():
        for batch in (1, 64):
            timed(model, batch, 64, sampling)
            found[f"{way}, {batch}"] = timed(model, batch, tokens, sampling)
    return found


def continued(engine: Engine, request: Request) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a request, and how fast and in how many steps they came after the first."""
    engine.submit(request)
    outputs, first = [], 0.0
    for output in engine.run():
        first = first or time.perf_counter()
        outputs.append(output.tokens)
    seconds = time.perf_counter() - first
    tokens = [token for part in outputs for token in part]
    return tokens, {"tokens_per_s": round((len(tokens) - 1) / seconds, 1), "steps": sum(map(bool, outputs)) - 1}


def speculated(model: gss.LanguageModel, prompt: list[int], count: int) -> dict[str, Any]:
    """Decoding with speculation and without by turns: tokens per second in three rounds, their ratios, how many tokens
    are equal before the first that differs, and microseconds of each captured graph."""
    found: dict[str, Any] = {}
    for way, sampling in WAYS.items():
        request = Request(prompt=prompt, max_tokens=count, sampling=sampling)
        engines = {name: Engine(model, rows=1, speculate=name == "with") for name in ("with", "without")}
        rounds = [{name: continued(engine, request) for name, engine in engines.items()} for _ in range(4)]
        texts = [rounds[-1][name][0] for name in engines]
        same = [a == b for a, b in zip(*texts, strict=True)]
        found[f"{way}, equal"] = f"{[*same, False].index(False)} of {count}"
        for name in engines:
            found[f"{way}, {name}"] = [each[name][1] for each in rounds[1:]]  # the first compiles and captures
        with_it, without = found[f"{way}, with"], found[f"{way}, without"]
        pairs = zip(with_it, without, strict=True)
        found[f"{way}, ratio"] = [round(a["tokens_per_s"] / b["tokens_per_s"], 3) for a, b in pairs]
        graphs = engines["with"].decoder._room.graphs  # type: ignore[attr-defined]
        found[f"{way}, µs"] = {str(key[0]): replayed(graph) for key, (graph, _) in graphs.items()}
    return found


def replayed(graph: torch.cuda.CUDAGraph, times: int = 50) -> float:
    """Microseconds of a captured graph; what it works on is of no use afterwards."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) * 1000 / times, 1)


def after_text(run: Path, text: Path, count: int) -> dict[str, Any]:
    """`speculated` for a run that has read the beginning of a text."""
    lm = gss.load(run, device="cuda")
    prompt = prompt_ids(lm.tokenizer, text.read_text(encoding="utf-8")[:5000], None)
    return speculated(lm.model, prompt, count)


def clients(run: Path, tokens: int, requests: int) -> dict[str, Any]:
    """`gss serve` with 64 clients, sampled as `stream` is, answers in one and streamed."""
    draw = random.Random(0)
    found: dict[str, Any] = {}
    started = time.perf_counter()
    with serving(run, "--device", "cuda") as port:
        found["ready_s"] = round(time.perf_counter() - started, 2)
        plain: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "stream": False}
        events = {**plain, "stream": True, "stream_options": {"include_usage": True}}
        for _ in range(2):  # compiles for every number of rows that comes up
            asyncio.run(served(port, 64, 64, 2, plain, draw))
        found["warm_s"] = round(time.perf_counter() - started, 2)
        for name, options in (("server", plain), ("server streaming", events)):
            speed, gaps = asyncio.run(served(port, 64, tokens, requests, options, draw))
            found[name] = {"tokens_per_s": round(speed, 1), **(spread(gaps) if gaps else {})}
    return found


def table(found: dict[str, Any]) -> str:
    """The figures, a line each."""
    lines = []
    for part, values in found.items():
        if isinstance(values, dict) and "error" not in values:
            lines += [f"{part:>24}  {name:<20} {json.dumps(value)}" for name, value in values.items()]
        else:
            lines.append(f"{part:>24}  {'FAILED' if isinstance(values, dict) else values}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", default="bytes")
    parser.add_argument("--model", default="gss")
    parser.add_argument("--others", nargs="*", default=["gss2-small", "gss-hybrid"])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--served", type=int, default=1024, help="tokens per request to the server")
    parser.add_argument("--seconds", type=float, default=120.0, help="no further part is begun after so many")
    parser.add_argument("--speculation", action="store_true", help="measure speculation and nothing else")
    parser.add_argument("--run", type=Path, help="a run that speculates after --text")
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": options.model}

    def part(name: str, work: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        if begun - started > options.seconds:
            found[name] = "left out: no time"
            return
        try:
            found[name] = work()
        except Exception:
            found[name] = {"error": traceback.format_exc()[-2000:]}
            print(found[name]["error"], flush=True)
        print(f"{time.perf_counter() - begun:6.1f} s  {name}: {str(found[name])[:300]}", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    if options.speculation:
        for name in (options.model, "gss-hybrid"):
            prompt = torch.randint(0, untrained(name).config.vocab_size, (128,)).tolist()
            part(f"{name}, speculation", partial(speculated, untrained(name), prompt, options.tokens))
        if options.run and options.text:
            part(f"{options.run.name}, speculation", lambda: after_text(options.run, options.text, options.tokens))
        print(table(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in CACHES:
            os.environ[name] = str(Path(folder) / name)
            Path(os.environ[name]).mkdir()
        run = make_run(Path(folder) / "run", options.model, options.vocabulary)
        sampled = ("--temperature", "0.8", "--top-p", "0.95")
        part("generate, new machine", lambda: command(run, options.tokens, *sampled))
        compiled = list((Path(folder) / CACHES[0]).glob("*/*.cubin"))
        found["kernels compiled"] = sorted(path.stem for path in compiled)
        part("generate, warm", lambda: command(run, options.tokens, *sampled))
        part("generate, again", lambda: command(run, options.tokens, *sampled, "--seed", "1"))
        part("generate, greedy", lambda: command(run, options.tokens, "--temperature", "0"))
        part("stages", lambda: stages(run))
        for name in (options.model, *options.others):
            part(f"{name}, check", partial(check, name))
            part(f"{name}, stream", partial(streamed, name, options.tokens))
            if name == options.model:
                part("serve", lambda: clients(run, options.served, 3))
    bare, answers = found[f"{options.model}, stream"], found["serve"]
    for name in ("server", "server streaming"):
        if "0.8, top-p 0.95, 64" in bare and name in answers:
            share = answers[name]["tokens_per_s"] / bare["0.8, top-p 0.95, 64"]["tokens_per_s"]
            answers[name]["share_of_stream"] = round(share, 3)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
