"""How a run starts: its first weights (random or trained), what is trained (all weights, a LoRA update or only the
initial state), and its default settings (those of the run being resumed, or a recipe that suits the model).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gss.accounting import account
from gss.choices import WITH_DROPOUT, nearest
from gss.config import ModelConfig, flattened, from_mapping, override, parse_assignments, to_mapping
from gss.data import Dataset, open_dataset
from gss.io.devices import pick_device
from gss.io.runs import read_config
from gss.lm import load, run_folder
from gss.model import LanguageModel, build_model
from gss.nn.lora import add_lora
from gss.training.config import TrainConfig, differences, resolve
from gss.training.folder import data_facts

_DECISIVE = ("preset", "model", "start", "lora", "tune", "device")
"""Settings on which the choice of a recipe depends."""
_TINY, _SMALL = 4_000_000, 150_000_000
"""Number of parameters up to which a model learns something in a minute on a CPU, and in minutes on a GPU."""
_PASSES, _STRONG_DECAY, _DROPOUT = 4, 1.0, 0.15
"""A model that reads its corpus this often overfits; stronger weight decay and dropout prevent that. Over 6.4 passes
they lower held-out perplexity by 12% to 15% (docs/results.md). With fewer passes we have not tried them.
"""


def first_model(config: TrainConfig, dataset: Dataset, resuming: bool = False) -> LanguageModel:
    """The model before the first step, with everything that is not trained frozen. A resumed run gets its weights from
    its checkpoint and does not need what it started from."""
    fresh = config.start is None or resuming
    model = build_model(config.model) if fresh else _loaded(str(config.start), config, dataset)
    if config.model.vocab_size < dataset.vocab_size:
        raise ValueError(
            f"the data's vocabulary has {dataset.vocab_size} ids, the model {config.model.vocab_size}: prepare the "
            "text again with the model's own vocabulary (`gss prepare --tokenizer RUN`), or give another --out"
        )
    if config.lora is not None:
        add_lora(model, config.lora)
    if config.tune == "state":
        model.requires_grad_(False)
        model.start_from(model.initial_state(1))
        assert model.first is not None
        if not model.first.learn():
            raise ValueError(
                "there is nothing for tune=state to learn: attention reads nothing before the first token, and this "
                "model has no state space. Train its weights, or use LoRA"
            )
    return model.train()


def _loaded(start: str, config: TrainConfig, dataset: Dataset) -> LanguageModel:
    """The trained model; refuses data with another vocabulary, and a config of another model."""
    lm = load(start, weights="fp32")
    if dataset.manifest.tokenizer["hash"] != lm.tokenizer.hash:
        raise ValueError(
            f"{dataset.folder} was prepared with a different vocabulary from that of {start}: prepare the text again "
            f"with --tokenizer {start}"
        )
    if lm.model.config != config.model:
        raise ValueError(f"the model of {start} has different settings from this run: leave out the model's settings")
    if lm.model.first is not None and config.tune != "state":
        raise ValueError(f"{start} is a tuned initial state: start from the model that it was tuned for")
    return lm.model


def plan(
    data: str | Path,
    out: str | Path,
    preset: str | None = None,
    recipe: str | Path | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
) -> tuple[TrainConfig, str]:
    """The configuration of a run in `out` on the corpus `data`, and a sentence on what was chosen, if anything was.

    Without a recipe these are the settings of the run in `out`, if there is one, else the recipe that suits the model,
    the machine and what is trained. With `start` among the settings the model is that of the weights.
    """
    sets = dict(settings) if isinstance(settings, Mapping) else parse_assignments(settings)
    dataset = open_dataset(data, verify=False)
    vocabulary: int | None = dataset.vocab_size
    if recipe is None and (Path(out) / "data.json").is_file():  # not by config.json, which an exported folder has, too
        begun = from_mapping(TrainConfig, read_config(Path(out)))
        if preset in (None, begun.preset):
            return resolve(None, None, sets, None, begun), f"using the settings of the run in {out}"
    base = None
    if start := sets.get("start"):
        if preset is not None:
            raise ValueError(f"the model comes from {start}: leave out --preset")
        known = read_config(run_folder(start))
        model = from_mapping(ModelConfig, known["model"])
        base = TrainConfig(preset=known.get("preset") or "gss", model=model, start=start)
        vocabulary = None  # the model's is compared when its weights are loaded
    if recipe is not None:
        return resolve(preset, recipe, sets, vocabulary, base), ""
    # The other settings are checked together with the recipe that they are meant for.
    known = {name: value for name, value in sets.items() if name.partition(".")[0] in _DECISIVE}
    recipe, reason = _suited(resolve(preset, None, known, vocabulary, base))
    said = f"using the recipe {recipe}, for {reason} (choose another with --config; `gss settings` lists all settings)"
    config = resolve(preset, recipe, sets, vocabulary, base)
    passes = config.steps * config.batch_tokens / len(dataset.tokens)
    if recipe == config.optimizer.name == "muon" and passes >= _PASSES:
        decided, stronger = flattened(sets).keys(), {}  # by the user; by us
        if not {"optimizer", "optimizer.weight_decay"} & decided:
            stronger["optimizer.weight_decay"] = _STRONG_DECAY
        possible = WITH_DROPOUT.issuperset(config.model.kinds) and not config.model.dropout
        if possible and not {"model", "model.dropout"} & decided:
            stronger["model.dropout"] = _DROPOUT
        if stronger:
            config = override(config, stronger)
            chosen = " and ".join(f"{name}={value:g}" for name, value in stronger.items())
            said += f". It reads the corpus {passes:.1f} times, hence {chosen}"
    return config, said


def _suited(config: TrainConfig) -> tuple[str, str]:
    """The name of the recipe that suits a run on this machine, and the reason."""
    if config.tune == "state":
        return "tune-state", "tuning an initial state"
    if config.lora is not None:
        return "lora", f"LoRA of rank {config.lora}"
    if config.start is not None:
        return "fine-tune", "fine-tuning"
    parameters = account(config.model).parameters
    size = f"{parameters / 1e6:,.1f}M parameters"
    if parameters < _TINY:
        return "quickstart", size
    if pick_device(config.device).type == "cpu":
        return "cpu", f"{size} on a CPU"
    return ("muon", f"{size} on a GPU") if parameters < _SMALL else ("pg19", f"{size}, the paper's")


def refuse_unknown(allow: Sequence[str], config: TrainConfig) -> None:
    """Refuse names in --allow that are not settings."""
    known = sorted({*flattened(to_mapping(config)), "data.hash"})
    for name in allow:
        if name not in known:
            raise ValueError(
                f"--allow {name}: there is no such setting{nearest(name, known, known, '`gss settings` lists all')}"
            )


def refuse_changes(trainer: dict[str, Any], config: TrainConfig, dataset: Dataset, allow: set[str]) -> None:
    """Refuse to resume a checkpoint with other settings or data, except for those that are allowed to differ."""
    changed = {name: values for name, values in differences(trainer["config"], config).items() if name not in allow}
    now = data_facts(dataset)
    for name in ("hash", "tokenizer"):
        if (before := trainer["data"].get(name)) != now[name] and f"data.{name}" not in allow:
            changed[f"data.{name}"] = (before, now[name])
    if changed:
        # A different preset is a different model: leave out the settings that change with it.
        shown = {name: values for name, values in changed.items() if "preset" not in changed or "model." not in name}
        what = "; ".join(f"{name} was {json.dumps(old)}, now {json.dumps(new)}" for name, (old, new) in shown.items())
        flags = " ".join(f"--allow {name}" for name in changed)
        # A model with other settings cannot load this checkpoint at all, and ids of another vocabulary mean other text.
        fixed = {name for name in changed if name.startswith("model.") and name != "model.dropout"}
        other = fixed or "data.tokenizer" in changed
        otherwise = "" if other else f", or resume anyway with {flags}"
        raise ValueError(
            f"the run in this folder has different settings: {what}. Restore them, or choose another --out{otherwise}"
        )
