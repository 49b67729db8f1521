"""A run folder as a folder of `transformers`, and back: the same weights to the bit, the same vocabulary.

Either folder is written beside its place and renamed, so that it is there whole or not at all. Knows both layouts;
what the weights and ids mean is the model's and the tokenizer's.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gss.config import to_mapping
from gss.hf.card import model_card
from gss.hf.config import GSSConfig
from gss.hf.model import GSSForCausalLM
from gss.hf.tokenizer import VOCABULARY, convert_tokenizer, read_vocabulary
from gss.io.checkpoint import save
from gss.io.files import read_json, require_new, write_file, write_json, written_folder
from gss.io.runs import EXPORTED
from gss.lm import load, run_folder
from gss.model import LanguageModel

_MODULE = "modeling_gss"
_CODE = '''"""The classes of this model, which are those of the gss library: https://arxiv.org/abs/2206.13947

After `import gss.hf` they are known to transformers, and neither this file nor trust_remote_code is needed.
"""

try:
    from gss.hf import GSSConfig, GSSForCausalLM, GSSSentencePieceTokenizer
except ImportError as error:
    raise ImportError("this model needs its library: pip install 'gss-lm[hf]', and then import gss.hf") from error

__all__ = ["GSSConfig", "GSSForCausalLM", "GSSSentencePieceTokenizer"]
'''


def export_run(run: str | Path, out: str | Path, *, step: int | None = None) -> Path:
    """Write the model of a run for `transformers`: its newest good checkpoint, or the one of a step."""
    folder, target = run_folder(run), Path(out)
    require_new(target)
    model, tokenizer, step, _ = load(folder, step=step, weights="fp32")
    if model.first is not None:
        raise ValueError(
            f"{folder} is a tuned first state, for which transformers has no place: export the model that it starts "
            "from, and use the state with gss"
        )
    settings, data = read_json(folder / "config.json"), read_json(folder / "data.json")
    if data:
        data.pop("folder", None)  # a path of the machine that trained
    with written_folder(target) as aside:
        try:
            GSSForCausalLM.of(model, eos_token_id=tokenizer.eos_id).save_pretrained(aside)
        except SafetensorError as error:
            raise OSError(
                f"could not write the weights to {target}: {error}. Nothing is left there; make room"
            ) from error
        convert_tokenizer(tokenizer).save_pretrained(aside)
        _add_code(aside)
        tokenizer.save(aside / VOCABULARY)
        card = model_card(target.resolve().name, model, tokenizer, step, settings, data)
        write_file(aside / "README.md", card)
        write_json(aside / EXPORTED, {"step": step, "config": settings, "data": data})
    return target


def _add_code(folder: Path) -> None:
    """Name the classes to `transformers` where `gss.hf` was not imported: for those who trust the file, of one import.

    A folder's code is the library's, of the version that is installed, and not a copy of it that would grow old.
    """
    write_file(folder / f"{_MODULE}.py", _CODE)
    names = {
        "config.json": {"AutoConfig": "GSSConfig", "AutoModelForCausalLM": "GSSForCausalLM"},
        "tokenizer_config.json": {"AutoTokenizer": "GSSSentencePieceTokenizer"},
    }
    for name, classes in names.items():
        settings = read_json(folder / name)
        found: dict[str, Any] = {auto: f"{_MODULE}.{own}" for auto, own in classes.items()}
        if name.startswith("tokenizer"):
            if settings.get("tokenizer_class") != "GSSSentencePieceTokenizer":
                continue  # a fast tokenizer, which needs no code
            found = {auto: [own, None] for auto, own in found.items()}
        write_json(folder / name, {**settings, "auto_map": found})


def import_folder(folder: str | Path, out: str | Path) -> Path:
    """Make a run folder, which `gss.load` and the commands read, of a folder that `transformers` reads.

    Weights come back as they are, in float32 or wider; there is no optimizer state, so the run is not one to go on
    training with `gss train`.
    """
    source, target = Path(folder), Path(out)
    require_new(target)
    if read_json(source / "config.json").get("model_type") != GSSConfig.model_type:
        raise ValueError(f"{source} is not an exported model: its config.json is missing or of another model_type")
    known = _read_run(source / EXPORTED)
    tokenizer, model = read_vocabulary(source), _read_model(source)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the vocabulary in {source} has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}: "
            "they do not belong together"
        )
    if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters()):
        model = model.float()  # runs hold full precision
    with written_folder(target) as aside:
        # The configuration last, over what the run's was: the model may have grown a vocabulary since.
        write_json(aside / "config.json", {**known["config"], "model": to_mapping(model.config)})
        if known["data"]:
            write_json(aside / "data.json", known["data"])
        tokenizer.save(aside / "tokenizer")
        tensors = {"model": model.state_dict()}
        save(aside / "checkpoints", known["step"], tensors, {"imported": True})
    return target


def _read_model(source: Path) -> LanguageModel:
    """The model of a folder, every weight of which comes from a safetensors file there."""
    if not any(source.glob("*.safetensors")):
        raise ValueError(
            f"{source} has no weights in a safetensors file, and others are not read, since unpickling one may run "
            "code: load the model where you trust it and write it anew with save_pretrained"
        )
    try:
        # With output_loading_info there are two answers, which transformers' types do not say.
        answers: Any = GSSForCausalLM.from_pretrained(
            source, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        wrapped, found = answers
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"the weights in {source} cannot be read: {error}") from error
    for what, names in (("lack", found["missing_keys"]), ("have besides", found["unexpected_keys"])):
        if names:
            raise ValueError(
                f"the weights in {source} are not those of the model that its config.json describes: they {what} "
                f"{', '.join(sorted(names)[:3])}{' and more' if len(names) > 3 else ''}"
            )
    return wrapped.model


def _read_run(path: Path) -> dict[str, Any]:
    """What a folder keeps of the run that it is from, as far as it does."""
    known = {"step": 0, "config": {}, "data": {}, **read_json(path)}
    step = known["step"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"{path} does not describe a run: its step is {step!r}, not a whole number")
    for name in ("config", "data"):
        if not isinstance(known[name], dict):
            raise ValueError(f"{path} does not describe a run: its {name} is {known[name]!r:.40}, not an object")
    return known
