"""A state is a value: a text is read once, then branched, batched, kept in a file and continued, as often as you like.

python examples/branch_state.py
"""

import tempfile
from pathlib import Path

import gss
from gss.decode import Request, stream

lm = gss.load()  # the bundled model; or gss.load("runs/books")
state = lm.read("It was a dark and stormy night, and the old house on the hill")

# Two ways on from the same place, side by side in one batch: each request continues from the state.
endings = [" was empty.", " was full of light."]
prompts = [lm.tokenizer.encode(ending).tolist() for ending in endings]
requests = [Request(prompt=prompt, max_tokens=20, seed=1 + row, state=state) for row, prompt in enumerate(prompts)]
rows: dict[Request, list[int]] = {request: [] for request in requests}
for output in stream(lm.model, requests):
    rows[output.request] += output.tokens
for ending, row in zip(endings, rows.values(), strict=True):
    print(f"…{ending}{lm.tokenizer.decode(row)!r}")

# Kept in a file, a quarter as large with int8; what is read on top of it is a new state, and the old one stays.
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "night.safetensors"
    gss.save_state(state, file, int8=True)
    later = lm.read(endings[0], state=gss.load_state(file))
    print(f"{file.stat().st_size:,} bytes; {int(state.position)} tokens read before, {int(later.position)} after")
