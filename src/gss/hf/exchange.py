"""Export a run folder for `transformers`, and import it back, with identical weights and vocabulary.

Folders are written under a temporary name and renamed, so they exist completely or not at all.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gss.config import to_mapping
from gss.hf.config import GSSConfig
from gss.hf.model import GSSForCausalLM
from gss.hf.tokenizer import MODULE, VOCABULARY, convert_tokenizer, read_vocabulary
from gss.io.checkpoint import save
from gss.io.files import read_json, write_file, write_json, written_folder
from gss.io.runs import EXPORTED, load_model, read_config, read_exported
from gss.lm import LM, load_to_export, run_folder

# Without `import gss.hf`, `transformers` finds the classes in a file that only imports those of the installed library,
# not a copy that would go stale: for users who trust it. Of the tokenizers, only SentencePiece's is a class of ours.
_CLASSES = {"AutoConfig": "GSSConfig", "AutoModelForCausalLM": "GSSForCausalLM"}
_CODE = '''"""The classes of this model, which are those of the gss library: https://arxiv.org/abs/2206.13947

After `import gss.hf` they are known to transformers, and neither this file nor trust_remote_code is needed.
"""

try:
    from gss.hf import GSSConfig, GSSForCausalLM, GSSSentencePieceTokenizer
except ImportError as error:
    raise ImportError("this model needs its library: pip install 'gss-lm[hf]', and then import gss.hf") from error

__all__ = ["GSSConfig", "GSSForCausalLM", "GSSSentencePieceTokenizer"]
'''
_KINDS = {"gss": "GSS", "dss": "DSS"}


def export_run(run: str | Path, out: str | Path, *, step: int | None = None) -> Path:
    """Write the model of a run for `transformers`: its newest intact checkpoint, or that of a step."""
    folder, target = run_folder(run), Path(out)
    with written_folder(target) as aside:
        lm = load_to_export(folder, step=step, weights="fp32")
        tokenizer, settings, data = lm.tokenizer, read_json(folder / "config.json"), read_json(folder / "data.json")
        data.pop("folder", None)  # a path of the machine that trained
        exported = GSSForCausalLM.of(lm.model, eos_token_id=tokenizer.eos_id)
        exported.config.auto_map = {name: f"{MODULE}.{own}" for name, own in _CLASSES.items()}
        try:
            exported.save_pretrained(aside)
        except SafetensorError as error:
            raise OSError(f"could not write the weights to {target}: {error}; free some space and try again") from error
        for written in aside.glob("*.safetensors"):  # which the library keeps from everybody else
            written.chmod((aside / "config.json").stat().st_mode)
        convert_tokenizer(tokenizer).save_pretrained(aside)
        write_file(aside / f"{MODULE}.py", _CODE)
        tokenizer.save(aside / VOCABULARY)
        write_file(aside / "README.md", model_card(target.resolve().name, lm, settings, data))
        write_json(aside / EXPORTED, {"step": lm.step, "config": settings, "data": data})
    return target


def import_folder(folder: str | Path, out: str | Path) -> Path:
    """Turn a folder that `transformers` reads into a run folder, which `gss.load` and the commands read.

    Weights become float32, read as `gss.load` reads them. There is no optimizer state, so `gss train` cannot resume the
    run.
    """
    source, target = Path(folder), Path(out)
    with written_folder(target) as aside:
        if read_json(source / "config.json").get("model_type") != GSSConfig.model_type:
            raise ValueError(f"{source} is not an exported model: its config.json is missing or of another model_type")
        config, known = read_config(source), read_exported(source)
        tokenizer, (model, step) = read_vocabulary(source), load_model(source, config)
        if tokenizer.vocab_size > model.config.vocab_size:
            sizes = f"{tokenizer.vocab_size} ids, but the model {model.config.vocab_size}"
            raise ValueError(f"the vocabulary in {source} has {sizes}: they do not belong together")
        # The model's configuration replaces the run's, since its vocabulary may have grown.
        write_json(aside / "config.json", {**known["config"], "model": to_mapping(model.config)})
        if known["data"]:
            write_json(aside / "data.json", known["data"])
        tokenizer.save(aside / "tokenizer")
        save(aside / "checkpoints", step, {"model": model.state_dict()}, {"imported": True})
    return target


def model_card(name: str, lm: LM, run: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The text of README.md, with the front matter that model hubs read.

    `run` and `data` are the contents of a run folder's config.json and data.json, if any.
    """
    model, tokenizer, step, _ = lm
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = ", ".join(f"{count} × {_KINDS.get(kind, kind)}" for kind, count in Counter(config.layers).items())
    facts = {
        "parameters": f"{parameters:,}",
        "layers": f"{layers}, width {config.width}",
        "preset": _recorded(run, "{preset}"),
        "vocabulary": f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, hash `{tokenizer.hash[:16]}`",
        "training steps": f"{step:,}",
        "tokens per step": _recorded(run, "{batch_tokens:,}"),
        "sequence length in training": _recorded(run, "{length:,}"),
        "training data": _recorded(data, "{tokens:,} tokens of {documents:,} documents"),
        "hash of the data": _recorded(data, "`{hash}`"),
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


def _recorded(values: Mapping[str, Any], form: str) -> str:
    """What is recorded, in words."""
    try:
        return form.format(**{name: value for name, value in values.items() if value is not None})
    except (KeyError, TypeError, ValueError):
        return "not recorded"
