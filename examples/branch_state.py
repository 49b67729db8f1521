"""A state is a value: a text is read once, then branched, batched, kept in a file and continued, as often as you like.

python examples/branch_state.py
"""

import tempfile
from pathlib import Path

import gss
from gss.generate import stream_many

lm = gss.load()  # the model in the box; or gss.load("runs/books")
state = lm.read("It was a dark and stormy night, and the old house on the hill")

# Two ways on from the same place, side by side in one batch: each row has its own continuation of the state.
endings = [" was empty.", " was full of light."]
prompts = [lm.tokenizer.encode(ending).tolist() for ending in endings]
rows: list[list[int]] = [[], []]
for tokens in stream_many(lm.model, prompts, max_tokens=20, seeds=[1, 2], state=state.select([0, 0])):
    for row, token in zip(rows, tokens, strict=True):
        if token is not None:
            row.append(token)
for ending, row in zip(endings, rows, strict=True):
    print(f"…{ending}{lm.tokenizer.decode(row)!r}")

# Kept in a file, a quarter as large with int8; what is read on top of it is a new state, and the old one stays.
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "night.safetensors"
    gss.save_state(state, file, int8=True)
    later = lm.read(endings[0], state=gss.load_state(file))
    print(f"{file.stat().st_size:,} bytes; {int(state.position)} tokens read before, {int(later.position)} after")
