"""Configuration of a training run (model, batches, optimizer, checkpoints, reporting) as frozen dataclasses.

`resolve` builds a run from a preset, a recipe and settings. `differences` compares two runs, ignoring settings that
change the result only by rounding. Imports no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gss.choices import Checked, chosen, limited
from gss.config import ModelConfig, flattened, override, parse_assignments, to_mapping
from gss.presets import preset
from gss.recipes import read_recipe
from gss.training.schedule import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """The optimizer, the learning rates of its parameter groups, and the schedule. Defaults are the paper's."""

    prefix = "optimizer."
    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    """AdamW (the paper's), Muon or Adafactor. Muon takes orthogonalized steps on the layers' matrices and uses AdamW
    for the rest; it learns more in few steps, at AdamW's rates or somewhat higher ones. Adafactor is what the
    Block-Recurrent Transformers were trained with; its rates are relative to each parameter's size."""
    learning_rate: float = limited(1.6e-3, gt=0)
    """Base rate of everything except the state spaces (the paper tuned it over 6.4e-3, 3.2e-3, 1.6e-3, 8e-4)."""
    matrix_learning_rate: float | None = limited(None, gt=0)
    """Base rate of the layers' matrices, on the same schedule. None: `learning_rate`."""
    schedule: str = chosen("cosine", SCHEDULES)
    """The schedule after the warm-up: a cosine that reaches the final rate at the last step, or 1/√step, but never
    below the final rate."""
    final_learning_rate: float = limited(1e-6, ge=0)
    """The rate at which the schedule ends."""
    warmup_steps: int = limited(1000, ge=0)
    """Steps of linear warm-up; 0 for none."""
    state_space_learning_rate: float = limited(1e-3, gt=0)
    """Rate of state-space parameters: constant, without warm-up."""
    embedding_factor: float = limited(1.0, gt=0)
    """Multiplies the base rate of the embedding, which is also the head, and divides its weight decay. The embedding
    starts as N(0, 1) and Adam moves an entry by about the rate per step, so it hardly learns in a short run. There,
    √width is far better (docs/training.md)."""
    weight_decay: float = limited(0.1, ge=0)
    """Weight decay of matrices, including the embedding; norms, biases and state-space parameters have none."""
    betas: tuple[float, float] = limited((0.9, 0.98), ge=0, lt=1)
    """Decay rates of Adam's moments. The paper only says Adam; 0.98 comes from the example whose other numbers it uses.
    Adafactor uses the first as its momentum (0 for none) and ignores the second."""
    epsilon: float = limited(1e-8, gt=0)
    """Added to Adam's denominator, so that it is never zero."""
    clip_norm: float = limited(1.0, gt=0)
    """The maximum norm of all gradients together; larger ones are clipped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas must be two numbers, not {self.betas!r}")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """When checkpoints are written, and which of them are kept."""

    prefix = "checkpoint."
    every: int = limited(1000, ge=1)
    """Steps between checkpoints; another is written at the end and when the run is stopped."""
    keep_last: int = limited(3, ge=2)
    """Number of newest checkpoints to keep: at least 2, in case the last one is damaged."""
    keep_every: int | None = limited(None, ge=1)
    """Also keep checkpoints whose step is a multiple of this. None: only the newest."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Checked):
    """What is logged, evaluated and sampled during training."""

    prefix = "report."
    log_every: int = limited(10, ge=1)
    """Steps between progress lines (the metrics file has every step)."""
    evaluate_every: int = limited(1000, ge=0)
    """Steps between evaluations on the validation split; 0 for none."""
    evaluate_lengths: tuple[int, ...] = limited((), ge=1)
    """Evaluation lengths, reduced to the longest document if necessary. Empty: the training length."""
    evaluate_tokens: int = limited(1 << 18, ge=1)
    """Maximum number of validation tokens per evaluation."""
    sample_every: int = limited(1000, ge=0)
    """Steps between samples of text; 0 for none."""
    sample_prompt: str = ""
    """The prompt of samples. Empty: the start of a document."""
    sample_tokens: int = limited(200, ge=1)
    """Tokens per sample."""
    tensorboard: bool = False
    """Also write TensorBoard files to RUN/tensorboard (needs the tensorboard extra)."""
    wandb: bool = False
    """Also log to Weights & Biases, as a run in the project gss (needs the wandb extra)."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Checked):
    """How the model and its sequences are distributed over processes. `parallel=fsdp2` sets the strategy."""

    prefix, shorthand = "parallel.", "strategy"
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: every process has a copy of the model; fsdp2: parameters and optimizer state are sharded."""
    context: int = limited(1, ge=1)
    """Number of processes that share each sequence: each takes a stretch of it, and they pass states between them. They
    have consecutive ranks, and the number of processes must be a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """A training run. Defaults are the paper's for long documents: 125k steps of 128 segments of 4,096 tokens.

    >>> config = gss.TrainConfig(preset="gss-tiny", model=gss.preset("gss-tiny"), length=512, batch_tokens=4096)
    >>> config.rows
    8
    """

    preset: str = "gss"
    """Name of the preset that the model is based on."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model. Its vocab_size is that of the data unless it is set."""
    start: str | None = None
    """Weights to start from, with a fresh optimizer and schedule: a run folder, an exported folder, or "box". None:
    random weights."""
    lora: int | None = limited(None, ge=1)
    """Rank of the LoRA updates of every dense layer of `start`; everything else is frozen. None: no LoRA."""
    tune: Literal["all", "state"] = "all"
    """What is trained: the weights, or only the initial state, with the model of `start` frozen."""
    seed: int = limited(0, ge=-(2**63), lt=2**64)
    """Determines the initial weights and the order of the data."""
    steps: int = limited(125_000, ge=1)
    """Optimizer steps."""
    length: int = limited(4096, ge=1)
    """L, tokens per row."""
    late_length: int | None = limited(None, ge=1)
    """Tokens per row in the last steps, a multiple of `length`, with fewer rows. Short rows teach more per token; long
    rows teach the model to use a long context. None: `length` to the end."""
    late_share: float = limited(0.1, gt=0, lt=1)
    """Share of the steps, at the end of training, that use rows of `late_length`."""
    batch_tokens: int = limited(1 << 19, ge=1)
    """Tokens per step over all processes: rows × length."""
    micro_batch_tokens: int | None = limited(None, ge=1)
    """Tokens that a process runs at a time; gradients are accumulated over several micro-batches. None: all its
    rows."""
    piece_tokens: int | None = limited(None, ge=1)
    """Tokens of a row in memory at a time. Rows are read and back-propagated piece by piece, which is exact and costs
    about a third more. None: whole rows."""
    batching: Literal["segments", "lanes", "packed"] = "segments"
    """segments: independent segments of documents (the paper's); lanes: rows follow documents and carry the state;
    packed: rows hold several short documents (LM1B)."""
    eos_first: bool = False
    """Whether rows that begin inside a document also start with the end-of-document id, as prompts do. Without it, a
    model of long documents takes every prompt for the beginning of one, such as a title page."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """auto is bf16 on a GPU, else fp32. bf16 means autocast: parameters, states and state-space arithmetic stay fp32.
    fp8 is bf16 with the wide products of GSS and feed-forward layers and the head's gradients in 8 bits, on GPUs that
    support it."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if there is one."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model and its sequences are distributed over processes."""
    compile: bool = False
    """Compile every layer with torch.compile."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Rates, decay, schedule."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When and how many."""
    report: ReportConfig = field(default_factory=ReportConfig)
    """Progress, evaluation, samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.late_length is not None and self.batching == "lanes":
            raise ValueError("late_length does not work with lanes, whose rows persist: use batching=segments")
        longest = ("length" if self.late_length is None else "late_length", self.longest)
        ranks = ("parallel.context", self.parallel.context)
        parts = {"late_length": ("length", self.length), "batch_tokens": longest, "micro_batch_tokens": longest}
        for name, (unit, size) in (parts | {"length": ranks, "piece_tokens": ranks}).items():
            value = getattr(self, name) or 0
            if value % size:
                raise ValueError(
                    f"{name} ({value}) must be a multiple of {unit} ({size}): try {value // size * size or size}"
                )
        if self.piece_tokens is not None and self.batching == "packed":
            raise ValueError("piece_tokens does not work with packed rows: leave it out, or use another batching")
        state = self.tune == "state"
        if self.start is None and (state or self.lora is not None):
            raise ValueError(f"{'tune=state' if state else 'lora'} needs trained weights to start from: add --from")
        if state and self.lora is not None:
            raise ValueError("tune=state and lora cannot be combined: one freezes the weights, one trains them")
        if state and self.batching == "packed":
            raise ValueError("tune=state does not work with packed rows: use batching=segments or batching=lanes")
        if self.parallel.strategy == "fsdp2" and (state or self.lora is not None):
            raise ValueError("lora and tune=state train too few parameters to shard: use parallel=ddp")

    @property
    def rows(self) -> int:
        """Rows of a step over all processes."""
        return self.batch_tokens // self.length

    @property
    def longest(self) -> int:
        """Tokens of the longest rows."""
        return self.late_length or self.length

    @property
    def first_late_step(self) -> int:
        """The first step with rows of `late_length`, counted from 0."""
        return self.steps if self.late_length is None else self.steps - round(self.late_share * self.steps)


# What may change when a run is resumed: reporting, and how the same arithmetic is laid out on machines.
_FREE = {
    "micro_batch_tokens",
    "piece_tokens",
    "precision",
    "device",
    "parallel",
    "compile",
    "activation_checkpointing",
    "checkpoint",
    "report",
}


def resolve(
    preset_name: str | None = None,
    recipe: str | Path | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
    vocab_size: int | None = None,
    base: TrainConfig | None = None,
) -> TrainConfig:
    """A run from a preset's name, a recipe and settings, each overriding the one before it.

    A recipe is a TOML file, or the name of one that comes with the package; settings are `key=value` strings or a
    mapping. The preset named here takes precedence over the recipe's, and `model` settings over the preset's.
    `vocab_size` is the tokenizer's, which the model gets unless its own is set; the model's may not be smaller. `base`
    is what the recipe changes, with its model in place of a preset's.
    """
    values = {} if recipe is None else read_recipe(recipe)
    sets = dict(settings) if isinstance(settings, Mapping) else parse_assignments(settings)
    if base is None:
        name = str(sets.pop("preset", None) or preset_name or values.get("preset") or "")
        if not name:
            raise ValueError("no model given: add --preset NAME (see gss presets) or --from RUN")
        model = preset(name)
        if vocab_size is not None:
            model = override(model, {"vocab_size": vocab_size})
        base = TrainConfig(preset=name, model=model)
    config = override(base, {k: v for k, v in values.items() if k != "preset"})
    config = override(config, sets)
    if vocab_size is not None and config.model.vocab_size < vocab_size:
        raise ValueError(
            f"the data's vocabulary has {vocab_size} ids, but the model only {config.model.vocab_size}: "
            "leave out model.vocab_size to use the data's"
        )
    return config


def differences(before: Mapping[str, Any], after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that would change the result of a resumed run: dotted name → (before, after). `before` is plain data.

    A setting that did not exist then counts as its default; one that the model does not use may have any value.
    """
    unused = {f"model.{name}" for name in after.model.unused}
    old, new = flattened(to_mapping(TrainConfig())) | flattened(before), flattened(to_mapping(after))
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if name.partition(".")[0] not in _FREE and name not in unused and old.get(name) != new.get(name)
    }
