"""A custom hybrid, trained in plain PyTorch: the layers are a list of names, the rest is an ordinary training loop.

python examples/custom_hybrid.py FILE.txt --steps 200
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import gss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--length", type=int, default=256)
options = parser.parse_args()

# Start from any preset; `gss settings model` lists the settings of a model.
config = gss.preset(
    "gss2-tiny",
    vocab_size=256,
    pattern=("gss", "gss", "gss2", "attention"),
    gate_width=256,
    state_space={"modes": 32},
    attention={"heads": 4, "sliding": 64},
)
model = gss.build_model(config, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.frombuffer(bytearray(options.file.read_bytes()), dtype=torch.uint8).long()
if len(text) <= options.length:
    raise SystemExit(f"{options.file} is too short: give at least {options.length + 1} bytes")

torch.manual_seed(0)
for step in range(options.steps):
    starts = torch.randint(len(text) - options.length, (8,)).tolist()
    rows = torch.stack([text[start : start + options.length + 1] for start in starts])
    logits, _ = model(rows[:, :-1], keep_state=False)
    loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0 or step == options.steps - 1:
        print(f"step {step}: {loss.item():.3f} nats per byte")
