"""The model card of an exported folder: the model, its training data, how to load it, and its limits.

Markdown with the front matter that model hubs read.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gss.lm import LM

_KINDS = {"gss": "GSS", "dss": "DSS", "attention": "attention"}


def model_card(name: str, lm: LM, run: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The text of README.md; `run` and `data` are the contents of a run folder's config.json and data.json, if any."""
    model, tokenizer, step, _ = lm
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = ", ".join(f"{count} × {_KINDS.get(kind, kind)}" for kind, count in Counter(config.layers).items())
    facts = {
        "parameters": f"{parameters:,}",
        "layers": f"{layers}, width {config.width}",
        "preset": run.get("preset", "not recorded"),
        "vocabulary": f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, hash `{tokenizer.hash[:16]}`",
        "training steps": f"{step:,}",
        "tokens per step": f"{run['batch_tokens']:,}" if "batch_tokens" in run else "not recorded",
        "sequence length in training": f"{run['length']:,}" if "length" in run else "not recorded",
        "training data": f"{data['tokens']:,} tokens of {data['documents']:,} documents" if data else "not recorded",
        "hash of the data": f"`{data['hash']}`" if data.get("hash") else "not recorded",
    }
    rows = "\n".join(f"| {what} | {value} |" for what, value in facts.items())
    memory = (
        "Its memory of a text is of constant size: a token costs the same at any position."
        if model.bounded_state
        else "It keeps keys and values of every token read: memory grows with the text."
    )
    losses = f"The vocabulary does not keep: {', '.join(tokenizer.losses)}.\n" if tokenizer.losses else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gss, state-space-model, long-context]
---

# {name}

A language model of the [Gated State Spaces](https://arxiv.org/abs/2206.13947) family, trained with `gss`. {memory}

| | |
|---|---|
{rows}

## Use

```python
import gss.hf  # pip install 'gss-lm[hf]'; registers the classes, so that no remote code is needed
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0], skip_special_tokens=True))
```

The tokenizer puts the end-of-document token in front of a text: the model was trained with it there.

## Limits

It continues text in the manner of its training data; it follows no instructions and its statements may be false,
or as biased as that data. It was not tested for any use. Texts much longer than those it was trained on may be
continued less well.
{losses}"""
