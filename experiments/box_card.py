"""The card of the model in the box: what it is, what it read, how well it does at which length, what it cannot do.

Knows plain data only: every figure comes from the facts that the training script measured.
"""

from collections.abc import Mapping
from typing import Any

FIELDS = (
    "parameters",
    "layers",
    "vocabulary",
    "bytes",
    "data",
    "training",
    "scores",
    "held_out",
    "rounding",
    "hardware",
    "versions",
    "date",
    "commit",
    "sample",
)
"""What must be known to write a card."""

LOOP_WORDS, LOOP_TIMES = 4, 4
"""A text runs in a loop where this many words in a row stand in it this many times."""


def card(facts: Mapping[str, Any]) -> str:
    """The text of card.md; ValueError names what is missing."""
    missing = [name for name in FIELDS if name not in facts]
    if missing:
        raise ValueError(f"the card needs {', '.join(missing)}: measure them first")
    data, training, held_out = facts["data"], facts["training"], facts["held_out"]
    lengths = [f"{row['length']:,}" if row["length"] else "whole books" for row in facts["scores"]]
    kind = facts.get("weights", "bf16")
    scores = [
        _row("tokens of context", *lengths),
        _row(*["---"] * (len(lengths) + 1)),
        _row("perplexity per token", *(f"{row['perplexity']:.2f}" for row in facts["scores"])),
        _row("bits per byte", *(f"{row['bits_per_byte']:.4f}" for row in facts["scores"])),
        _row("perplexity per word", *(f"{row['word_perplexity']:.1f}" for row in facts["scores"])),
    ]
    rows = {
        "parameters": f"{facts['parameters']:,}; {facts['layers']}",
        "weights and vocabulary": f"{facts['bytes']:,} bytes: matrices in {kind}, the rest in float32",
        "vocabulary": facts["vocabulary"],
        "trained on": f"{data['what']}: {data['documents']:,} documents, {data['bytes']:,} bytes, "
        f"{data['tokens']:,} tokens, hash `{data['hash'][:16]}`",
        **({"first training": _training(facts["before"])} if "before" in facts else {}),
        "training": _training(facts),
        "made": f"{facts['date']}, commit `{facts['commit']}`, {facts['versions']}",
    }
    table = "\n".join(_row(what, value) for what, value in rows.items())
    measured = "\n".join(scores)
    family = "GSS2" if "gss2" in facts["layers"] else "GSS-Hybrid"
    tried = facts.get("samples")
    written = (
        f"\n\nOf {tried['texts']} texts of {tried['tokens']} tokens at temperature {tried['temperature']:g}, "
        f"{tried['blank']} have five or more line breaks in a row and {tried['loops']} run in a loop (the same\n"
        f"{LOOP_WORDS} words {LOOP_TIMES} times or more)."
        if tried
        else ""
    )
    written += _against_loops(facts) + _line_breaks(facts) + _memory(facts)
    quoted = "\n".join(f"> {line}".rstrip() for line in facts["sample"]["text"].splitlines())
    return f"""# The model in the box

A {family} language model that writes in the manner of old books. It comes with `gss` and is used where no run is
named: `gss generate --prompt "…"`, `gss serve`, `gss.load()`.

| | |
|---|---|
{table}

## How well it does

On {held_out["documents"]:,} held-out documents, {held_out["tokens"]:,} tokens, each length over the same targets, with
the weights as they ship, computed in {facts.get("precision", "float32")}:

{measured}

{_rounding(facts)}{written}

## Data

Project Gutenberg books from PG-19's train split, in the public domain in the United States, without their licence
texts. The held-out books are from PG-19's validation split and from train books that were kept out; near-duplicates
of them were dropped from the training data. Nothing else was read: no web text, no private text.

## Limits

- It is small: sentences hold together, stories and facts do not. What it says is made up.
- English of the eighteenth to the early twentieth century, with the spelling, the line breaks and the views of its
  time; some of those are offensive. Other languages and code are nearly unknown to it.
- It follows no instructions and answers no questions: it goes on with a text.
- It was trained on pieces of {training["length"]:,} tokens; longer contexts were only measured, in the table above.
- It was tested for nothing but perplexity. Use it to try the library, not for decisions about anything.

## A sample

Prompt “{facts["sample"]["prompt"]}”, temperature {facts["sample"]["temperature"]:g}, seed {facts["sample"]["seed"]}:

{quoted}
"""


def _training(facts: Mapping[str, Any]) -> str:
    training, tokens = facts["training"], facts["data"]["tokens"]
    seen, planned = training["steps"] * training["batch_tokens"], training["planned_steps"]
    return (
        f"{training['steps']:,} steps of {training['batch_tokens']:,} tokens at length {training['length']:,}: "
        f"{seen:,} tokens, {seen / tokens:.1f} times through the data; rate {training['learning_rate']:g}, seed "
        f"{training['seed']}; {training['minutes']:.1f} minutes on {facts['hardware']}, "
        f"{training['tokens_per_second']:,.0f} tokens per second"
        + (f"; stopped by the clock, {planned:,} steps were planned" if training["steps"] < planned else "")
    )


def _rounding(facts: Mapping[str, Any]) -> str:
    kind, rounding = facts.get("weights", "bf16"), facts["rounding"]
    if "unlikelihood" in facts:  # that training rounds
        return f"The last training had the matrices rounded to {kind} in every step, as they ship."
    return (
        f"Rounding the matrices to {kind} took perplexity at {rounding['length']:,} tokens from "
        f"{rounding['before']:.3f} to\n{rounding['after']:.3f} ({rounding['tokens']:,} tokens)."
    )


def _against_loops(facts: Mapping[str, Any]) -> str:
    known = facts.get("unlikelihood")
    if not known:
        return ""
    before, after = ((known[when]["blank"], known[when]["loops"]) for when in ("before", "after"))
    return (
        f"\n\nThe last training made repeats in its own texts less likely (unlikelihood of {known['order']}-grams,\n"
        f"weight {known['weight']:g}). Of {known['after']['texts']} texts with other seeds, {sum(before)} ran into "
        f"line breaks or a loop before it\nand {sum(after)} after it."
    )


def _line_breaks(facts: Mapping[str, Any]) -> str:
    found = facts.get("line_breaks")
    if not found:
        return ""
    return (
        f"\n\nPrompts may be typed in one line: on pieces of held-out books it needs {found['broken']:.3f} bits per "
        f"byte with\ntheir line breaks and {found['joined']:.3f} with the lines of each paragraph joined."
    )


def _memory(facts: Mapping[str, Any]) -> str:
    layers = facts.get("memory", {}).get("layers")
    if not layers:
        return ""
    medians, slow = ([layer["quantiles"][level] for layer in layers] for level in ("0.5", "0.95"))
    return (
        f"\n\nOf the modes of its state spaces, half last {min(medians):,.0f} tokens or more in the layer with the "
        f"shortest memory\nand {max(medians):,.0f} in that with the longest; one in twenty lasts "
        f"{min(slow):,.0f} to {max(slow):,.0f}."
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
