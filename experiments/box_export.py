"""From a run to a folder that ships: weights with matrices in int4, int8 or bf16, the vocabulary, no optimizer.

The result is a run folder, so that everything that reads runs reads it: `gss.load`, the commands, `gss export`.
State-space parameters, norms and biases stay in float32: they are few, and the rates and frequencies among them stand
in exponents.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from experiments.box_card import card
from gss.io import checkpoint
from gss.io.files import write_file
from gss.lm import load, quantize_run
from gss.nn.quantized import unpacked_state

MOST_BYTES = 16_000_000
"""All files of the folder together may not be larger."""
CARD, FACTS = "card.md", "box.json"
"""The card for people, and the figures that it is made from."""


def write_box(run: str | Path, out: str | Path, *, step: int | None = None, weights: str = "int4") -> Path:
    """Write the model of a run to a new or empty folder, whole or not at all; the card comes with `write_card`.

    Matrices in bf16 are stored as such and float32 once loaded, so that they can be trained or packed further.
    """
    tokenizer = load(run, step=step).tokenizer
    if not tokenizer.lossless:
        raise ValueError(f"the vocabulary of {run} loses {', '.join(tokenizer.losses)}: the box has a lossless one")
    target = quantize_run(run, out, weights, step=step)
    if weights == "bf16":
        lm = load(target)
        packed, whole = lm.model.state_dict(), unpacked_state(lm.model)
        stored = {name: tensor if name in packed else tensor.bfloat16() for name, tensor in whole.items()}
        checkpoint.save(target / "checkpoints", lm.step, {checkpoint.MODEL: stored}, {"weights": weights})
    try:
        check_size(target)
    except ValueError:
        shutil.rmtree(target)
        raise
    return target


def write_card(box: str | Path, facts: dict[str, Any]) -> Path:
    """Write the card and the figures that it is made from into the folder."""
    target = Path(box)
    text = card(facts)  # refuses facts that are not complete, before anything is written
    write_file(target / FACTS, json.dumps(facts, indent=1) + "\n")
    write_file(target / CARD, text)
    check_size(target)
    return target / CARD


def folder_size(folder: str | Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def check_size(folder: str | Path) -> None:
    """Refuse a folder that is too large to ship."""
    size = folder_size(folder)
    if size > MOST_BYTES:
        raise ValueError(
            f"the box would have {size:,} bytes, more than the {MOST_BYTES:,} that it may have: "
            "take a smaller model or vocabulary"
        )
