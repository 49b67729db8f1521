"""Throughput of `gss serve` beside bare generation, in one run: tokens per second at 1, 8 and 64 streams.

    python -m experiments.serve_throughput --out benchmarks/results/serve-cpu.json
    python -m experiments.serve_throughput --device cuda --preset gss --tokens 1024

A server is started as a user starts it, and clients in this process keep a number of requests under way, each for the
same number of tokens after a prompt of its own, over plain HTTP: answers in one, and streamed. Between their turns
`gss.decode.stream` produces as many tokens for as many prompts side by side in this process, with as many
threads as the server's model has. The three take turns, and the median of the rounds counts. Of streamed answers, the
time between two arrivals at a client is noted too.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import gss
from gss.bench.machine import provenance
from gss.config import to_mapping
from gss.data import load_tokenizer
from gss.decode import Request, Sampling, stream
from gss.io.checkpoint import save
from gss.io.files import write_json

PROMPT = 32
REQUESTS = 4


def make_run(folder: Path, preset: str, vocabulary: str = "bytes") -> Path:
    """A run folder with an untrained model: its weights do not matter for time."""
    tokenizer = load_tokenizer(vocabulary)
    model = gss.build_model(gss.preset(preset, vocab_size=tokenizer.vocab_size), seed=0)
    folder.mkdir()
    facts = {"preset": preset, "model": to_mapping(model.config)}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    tokenizer.save(folder / "tokenizer")
    save(folder / "checkpoints", 1, {"model": model.state_dict()}, {})
    return folder


@contextmanager
def serving(run: Path, *options: str) -> Iterator[int]:
    """A server of a run, started as a user starts it; its port."""
    command = [sys.executable, "-m", "gss", "serve", str(run), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline().rpartition(":")[2])
    finally:
        server.terminate()
        try:
            server.wait(60)
        except BaseException:
            server.kill()
            raise


def prompts(streams: int, draw: random.Random) -> list[list[int]]:
    """Prompts of one length, none like another."""
    return [[draw.randrange(256) for _ in range(PROMPT)] for _ in range(streams)]


def bare(model: gss.LanguageModel, streams: int, tokens: int, sampling: Sampling, draw: random.Random) -> float:
    """Tokens a second of generation by itself."""
    started = time.perf_counter()
    requests = [
        Request(prompt=prompt, max_tokens=tokens, sampling=sampling, seed=seed)
        for seed, prompt in enumerate(prompts(streams, draw))
    ]
    count = sum(len(output.tokens) for output in stream(model, requests))
    assert count == streams * tokens
    return count / (time.perf_counter() - started)


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any], gaps: list[float]
) -> int:
    """One request on an open connection; how many tokens came. Notes the seconds between two arrivals of a stream."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"
    writer.write("\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    if body["stream"]:
        last, before = b"", 0.0
        while not last.endswith(b"0\r\n\r\n"):
            received = await reader.read(1 << 16)
            assert received
            now = time.perf_counter()
            if before and b'"choices":[{' in received:
                gaps.append(now - before)
            last, before = (last + received)[-1024:], now
        events = last.decode(errors="replace").split("data: ")
        return json.loads(events[-2].partition("\n")[0])["usage"]["completion_tokens"]
    length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
    return json.loads(await reader.readexactly(length))["usage"]["completion_tokens"]


async def served(
    port: int, streams: int, tokens: int, requests: int, options: dict[str, Any], draw: random.Random
) -> tuple[float, list[float]]:
    """Tokens per second that clients get, and the gaps in their streams; each sends its next request when it has had
    its last answer."""
    gaps: list[float] = []

    async def client(own: list[list[int]], first: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        count = 0
        for number, prompt in enumerate(own):
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": first + number, **options}
            count += await ask(reader, writer, body, gaps)
        writer.close()
        return count

    lists = [prompts(requests, draw) for _ in range(streams)]
    started = time.perf_counter()
    counts = await asyncio.gather(*(client(own, 1000 * number) for number, own in enumerate(lists)))
    assert sum(counts) == streams * tokens * requests
    return sum(counts) / (time.perf_counter() - started), gaps


def spread(gaps: list[float]) -> dict[str, float]:
    """The median of the times between two arrivals, and the time that one in a hundred exceeds, in milliseconds."""
    cuts = statistics.quantiles(gaps, n=100)
    return {"median_ms": round(1e3 * cuts[49], 2), "p99_ms": round(1e3 * cuts[98], 2)}


def measure(arguments: argparse.Namespace, port: int, model: gss.LanguageModel) -> list[dict[str, Any]]:
    """A row for each number of streams and way of sampling."""
    draw = random.Random(0)
    rows = []
    for temperature in (0.0, 0.8):
        sampling = Sampling(temperature=temperature)
        for streams in arguments.streams:
            tokens = arguments.tokens
            plain: dict[str, Any] = {"temperature": temperature, "stream": False}
            streamed = {**plain, "stream": True, "stream_options": {"include_usage": True}}
            speeds: dict[str, list[float]] = {"generate": [], "server": [], "server streaming": []}
            between: list[float] = []
            for turn in range(arguments.rounds + 1):
                one = {"generate": bare(model, streams, tokens, sampling, draw)}
                for name, options in (("server", plain), ("server streaming", streamed)):
                    one[name], gaps = asyncio.run(served(port, streams, tokens, REQUESTS, options, draw))
                    between += gaps if turn else []
                if turn:
                    for name, speed in one.items():
                        speeds[name].append(speed)
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            row = {
                "sampling": "greedy" if temperature == 0 else f"temperature {temperature}",
                "streams": streams,
                "tokens_per_second": {name: round(speed, 1) for name, speed in medians.items()},
                "share": {
                    name: round(medians[name] / medians["generate"], 3) for name in medians if name != "generate"
                },
                "between_events": spread(between),
                "rounds": {name: [round(speed, 1) for speed in values] for name, values in speeds.items()},
            }
            rows.append(row)
            print(
                f"{row['sampling']:>16} {streams:>3} streams: generate {medians['generate']:>8,.0f} tokens/s, "
                + ", ".join(f"{name} {medians[name]:>8,.0f} ({share:.0%})" for name, share in row["share"].items()),
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="gss-tiny")
    parser.add_argument("--run", type=Path, help="a run folder in place of an untrained model of the preset")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or make_run(Path(folder) / "run", arguments.preset)
        with serving(run, "--device", arguments.device, "--threads", str(arguments.threads)) as port:
            rows = measure(arguments, port, gss.load(run, device=arguments.device).model)
    what = (
        f"precision auto; prompts of {PROMPT} tokens, no two alike, {arguments.tokens} tokens each; {REQUESTS} "
        "requests per client, the next when the last is answered; median of the rounds, in turns"
    )
    about = {"model": arguments.preset, "threads": arguments.threads, "what": what}
    if arguments.out:
        write_json(arguments.out, {**provenance(torch.device(arguments.device)), **about, "rows": rows})
    floor = {"server": 0.6, "server streaming": 0.4} if arguments.device == "cuda" else {}
    short = [row for row in rows if any(share < floor.get(name, 0.8) for name, share in row["share"].items())]
    if short:
        sys.exit(f"below its share of bare generation: {[(row['sampling'], row['streams']) for row in short]}")


if __name__ == "__main__":
    main()
