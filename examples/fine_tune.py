"""Fit the bundled model to a folder of texts: prepare them with its vocabulary, start from its weights, compare.

python examples/fine_tune.py my-books/ --out runs/mine --steps 100
"""

import argparse
from pathlib import Path

import gss
from gss.data import prepare

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("texts", help="A folder of .txt files, of which some are held out.")
parser.add_argument("--out", type=Path, default=Path("runs/mine"))
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--lora", type=int, help="Learn only this much on top of the dense layers.")
options = parser.parse_args()

box = gss.load()
data = options.out / "data"
prepare([options.texts], data, box.tokenizer, valid=0.2)
gss.train(
    None,  # the model is that of the weights
    data,
    options.out / "run",
    start="box",
    lora=options.lora,
    steps=options.steps,
    length=options.length,
    batch_tokens=4 * options.length,
)
for name, lm in {"the box": box, "fine-tuned": gss.load(options.out / "run")}.items():
    row = gss.evaluate(lm, data, [None], max_tokens=10_000).rows[0]
    print(f"{name}: {row.bits_per_byte:.3f} bits per byte")
