"""A state is a value: read a text once, then branch the state, batch it, save it and continue from it at will.

python examples/branch_state.py
"""

import tempfile
from pathlib import Path

import gss
from gss.decode import Request, stream

lm = gss.load()  # the bundled model; or gss.load("runs/books")
state = lm.read("It was a dark and stormy night, and the old house on the hill")

# Two continuations from the same place, in one batch: each request continues from the state.
endings = [" was empty.", " was full of light."]
prompts = [lm.tokenizer.encode(ending).tolist() for ending in endings]
requests = [Request(prompt=prompt, max_tokens=20, seed=1 + row, state=state) for row, prompt in enumerate(prompts)]
rows: dict[Request, list[int]] = {request: [] for request in requests}
for output in stream(lm.model, requests):
    rows[output.request] += output.tokens
for ending, row in zip(endings, rows.values(), strict=True):
    print(f"…{ending}{lm.tokenizer.decode(row)!r}")

# Saved to a file, a quarter of the size with int8. Reading on from it makes a new state; the old one is unchanged.
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "night.safetensors"
    gss.save_state(state, file, int8=True)
    later = lm.read(endings[0], state=gss.load_state(file))
    print(f"{file.stat().st_size:,} bytes; {int(state.position)} tokens read before, {int(later.position)} after")
