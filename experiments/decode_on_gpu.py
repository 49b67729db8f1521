"""What users get from decoding on a GPU: tokens checked against the plain path, then `gss.decode.stream` timed.

    python experiments/decode_on_gpu.py decode.json --tokens 3000

The `gss` preset with random weights (or a run folder, with --run). Greedy tokens of the CUDA graph must be almost the
likeliest ones by the plain decoder, teacher-forced. Then batches of 1 and 64, greedy and with temperature 0.8 and top-p
0.95: seconds to the first token, and tokens per second after it, the capture of graphs included. Needs a CUDA device.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import gss
from gss.decode import GREEDY, Decoder, Request, Sampling, decoder, stream
from gss.precision import running


@torch.no_grad()
def check(model: gss.LanguageModel, count: int = 300) -> float:
    """By how much of a logit the tokens that the graph chose fall short of the plain decoder's best, at most."""
    start = model.initial_state(1)
    with running(model, "bf16"):
        graph = decoder(model, start)
    assert not isinstance(graph, Decoder), "this model has no CUDA graph"
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    tokens = graph.generate(count, first).tokens[:, 0]
    plain = Decoder(model, start)
    shortfall = 0.0
    for before, token in zip(torch.cat([first, tokens]), tokens, strict=False):
        logits = plain.step(before[None])[0]
        shortfall = max(shortfall, float(logits.max() - logits[token]))
    return shortfall


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
    return {"batch": batch, "first_token_s": first, "tokens_per_s": (count - batch) / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--model", default="gss")
    parser.add_argument("--tokens", type=int, default=3000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = gss.load(options.run).model if options.run else gss.build_model(gss.preset(options.model))
    model = model.cuda().eval()
    shortfall = check(model)
    print(f"greedy tokens fall short of the plain decoder's best by at most {shortfall:.4f}")
    assert shortfall < 0.1, "the graph's tokens are not the plain decoder's"
    rows = []
    for name, sampling in (("greedy", GREEDY), ("0.8, top-p 0.95", Sampling(temperature=0.8, top_p=0.95))):
        for batch in (1, 64):
            timed(model, batch, 64, sampling)  # compiles the kernels
            rows.append({"sampling": name, **timed(model, batch, options.tokens, sampling)})
            speed, first = rows[-1]["tokens_per_s"], rows[-1]["first_token_s"]
            print(f"{name:>16}, {batch:>2} rows: {speed:>9,.0f} tokens/s, the first after {first:.3f} s")
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": options.model}
    found = {**facts, "shortfall": shortfall, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
