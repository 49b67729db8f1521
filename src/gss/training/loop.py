"""The training loop: from a configuration, prepared data and a run folder to checkpoints; resumes by itself.

It handles everything between two steps: logging, evaluation, samples, saving, stopping. Steps, checkpoints and the
layout of the run folder are defined elsewhere.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gss.accounting import flops_per_token
from gss.config import to_mapping
from gss.data import Batches, Dataset, Lanes, Lengthened, Packed, Prefetch, Segments, open_dataset
from gss.evaluation import evaluate, longest_document
from gss.generate import Sampling, first_state, generate
from gss.io import checkpoint
from gss.io.states import save_state
from gss.model import LanguageModel
from gss.training import snapshot, start
from gss.training.config import TrainConfig, differences
from gss.training.distributed import World, gathered, joined, reshard
from gss.training.folder import RunFolder, data_facts, data_stamps
from gss.training.interrupt import Interrupt
from gss.training.progress import Progress, matmul_rate, open_trackers, perplexity
from gss.training.step import Stepper, StepResult

_VALIDATION = "valid"
_CPU_FLOPS = 1.5e10  # per second and thread: a rough estimate, for a warning
BATCHINGS: dict[str, type[Batches]] = {"segments": Segments, "lanes": Lanes, "packed": Packed}


@dataclass(frozen=True)
class TrainResult:
    """The result of a call of `train`.

    >>> gss.TrainResult(run=folder, step=100, loss=2.5).signal is None
    True
    """

    run: Path
    step: int
    """Steps taken in total, including those before a resume."""
    loss: float | None
    """Loss of the last step; None if no step was left to take."""
    signal: int | None = None
    """The signal that stopped it early; None if it finished."""


def train(
    config: TrainConfig | str | None,
    data: str | Path,
    out: str | Path,
    *,
    recipe: str | Path | None = None,
    allow: Sequence[str] = (),
    quiet: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train a model on the prepared corpus `data`, in the run folder `out`, or resume the run in that folder.

    `config` is a whole configuration, or the name of a preset. A preset may come with a `recipe` (a name or a TOML
    file; None chooses one for the model and the machine) and settings. `None` with `start="box"` or a run folder starts
    from the weights of that model. If `out` has checkpoints, training resumes from the newest good one. It must be the
    same run, with the same model, batches, optimizer and data; `allow` names settings that may differ, for example
    ["steps"] to train longer. Under torchrun, every process calls this.

    >>> small = {"width": 16, "depth": 1, "gate_width": 32, "channels": 4}
    >>> muon = {"name": "muon", "learning_rate": 0.01}
    >>> result = gss.train("gss-tiny", corpus, folder, steps=2, length=64, batch_tokens=128, quiet=True,
    ...                    model=small, optimizer=muon, report={"evaluate_every": 0, "sample_every": 0})
    >>> result.step, gss.load(folder).step
    (2, 2)
    """
    chosen = ""
    if not isinstance(config, TrainConfig):
        config, chosen = start.plan(data, out, config, recipe, settings)
    elif recipe is not None or settings:
        raise ValueError("a configuration cannot be combined with a recipe or settings: give a preset's name")
    start.refuse_unknown(allow, config)
    with joined(config.device) as world:
        if chosen and world.leads and not quiet:
            print(chosen, flush=True)
        # The leader verifies the hashes of the data; the others wait for it.
        dataset = world.on_leader(lambda: open_dataset(data, "train"))
        dataset = dataset or open_dataset(data, "train", verify=False)
        folder = RunFolder(out)
        try:
            world.on_leader(folder.open)
            return _Run(config, dataset, folder, world, allow, quiet).go()
        finally:
            folder.close()


def validation_losses(model: LanguageModel, dataset: Dataset, config: TrainConfig, precision: str) -> dict[int, float]:
    """Nats per token at each configured length; lengths beyond the longest document are reduced to it.

    A model that trains in fp8 is evaluated in bf16, the precision in which it will be used.
    """
    report = config.report
    precision = "bf16" if precision == "fp8" else precision
    longest = longest_document(dataset, report.evaluate_tokens)
    lengths = sorted({min(length, longest) for length in report.evaluate_lengths or (config.length,)})
    result = evaluate(
        model, dataset, lengths, max_tokens=report.evaluate_tokens, precision=precision, eos_first=config.eos_first
    )
    return {row.length: row.loss for row in result.rows if row.length is not None}


def _batches(config: TrainConfig, dataset: Dataset) -> Batches:
    """Every batch of the run."""

    def of(length: int) -> Batches:
        made = BATCHINGS[config.batching](dataset, length, config.batch_tokens // length, config.seed)
        made.eos_first = config.eos_first
        return made

    short = of(config.length)
    return short if config.late_length is None else Lengthened(short, of(config.late_length), config.first_late_step)


class _Run:
    """A run in one process."""

    def __init__(
        self, config: TrainConfig, dataset: Dataset, folder: RunFolder, world: World, allow: Sequence[str], quiet: bool
    ) -> None:
        self.config, self.dataset, self.folder, self.world = config, dataset, folder, world
        self.validation = None
        if _VALIDATION in dataset.manifest.splits:
            self.validation = open_dataset(dataset.folder, _VALIDATION, verify=False)
        self.batches = _batches(config, dataset)
        torch.manual_seed(config.seed)
        resuming = bool(checkpoint.checkpoints(folder.checkpoints))
        self.stepper = Stepper(start.first_model(config, dataset, resuming), config, world)
        self.step = 0
        trackers = open_trackers(config, folder.path) if world.leads else []
        self.progress = Progress(config.steps, trackers, quiet or not world.leads)
        self._pending: list[StepResult] = []
        self._last_row: dict[str, Any] | None = None
        self._data_stamps = data_stamps(dataset)
        self._flops = 3 * flops_per_token(config.model, config.length)
        self._peak = matmul_rate(world.device, torch.float32 if self.stepper.precision == "fp32" else torch.bfloat16)
        self._clock = time.perf_counter()
        self._saved_at: int | None = None
        self._resume(set(allow))

    def go(self) -> TrainResult:
        """Train to the end, to a signal or to an error."""
        config, world, rank, ranks = self.config, self.world, self.stepper.replica, self.stepper.replicas
        self._introduce()
        interrupt = Interrupt()
        ahead = Prefetch(self.batches, self.step, config.steps, rank=rank, world=ranks, device=world.device)
        with self.progress, interrupt, ahead:
            self._clock = time.perf_counter()
            for batch in ahead:
                self._pending.append(self.stepper.step(batch, self.step))
                self.step += 1
                self.progress.stepped(self.step)
                stop = bool(world.largest(interrupt.signal is not None))
                self._between_steps(stop or self.step == config.steps)
                if stop:
                    name = interrupt.signal.name if interrupt.signal else "a signal to another process"
                    self.progress.note(f"stopped by {name} after step {self.step:,}, saved; run it again to resume")
                    return self._result(int(interrupt.signal or 15))
        return self._result(None)

    def _between_steps(self, last: bool) -> None:
        config, step = self.config, self.step
        report = config.report
        evaluate = report.evaluate_every and (step % report.evaluate_every == 0 or step == config.steps)
        sample = report.sample_every and (step % report.sample_every == 0 or step == config.steps)
        save = last or step % config.checkpoint.every == 0
        show = last or step % report.log_every == 0
        if show or evaluate or sample or save:
            self._log(show)
        if evaluate:
            self._evaluate()
        if sample:
            self._sample()
        if save:
            self._save()
        if evaluate or sample or save:
            self._clock = time.perf_counter()  # their time does not count as training time

    def _resume(self, allow: set[str]) -> None:
        """Load the newest good checkpoint if there is any; refuse to resume it as another run."""
        found = self.world.on_leader(self._find_checkpoint)
        step = self.world.largest(-1 if found is None else found)
        if step < 0:
            return
        saved = checkpoint.load(self.folder.checkpoints / f"step-{step:08d}", verified=True)
        if not all(isinstance(saved.trainer.get(name), dict) for name in ("config", "data", "optimizer")):
            raise ValueError(
                f"{saved.path} has weights only, so training cannot resume from it: start a new run from them, with "
                f"--from {self.folder.path} and another --out"
            )
        start.refuse_changes(saved.trainer, self.config, self.dataset, allow)
        if step > self.config.steps:
            raise ValueError(f"{self.folder.path} already has {step:,} steps, more than steps={self.config.steps:,}")
        another = "optimizer.name" in differences(saved.trainer["config"], self.config)
        snapshot.restore(self.stepper, saved.tensors, None if another else saved.trainer["optimizer"])
        self.step = self._saved_at = step

    def _find_checkpoint(self) -> int:
        path, damaged = checkpoint.newest_good(self.folder.checkpoints)
        for what in damaged:
            self.progress.note(f"warning: {what}; using the one before it")
        if path is None and damaged:
            raise ValueError(f"no checkpoint in {self.folder.checkpoints} is intact: restore one, or delete them all")
        return -1 if path is None else checkpoint.step_of(path)

    def _introduce(self) -> None:
        config, world = self.config, self.world
        if not world.leads:
            return
        self.folder.describe(config, self.dataset, world.size, world.device)
        self.folder.cut_metrics(self.step)
        parameters = list(self.stepper.model.parameters())
        total = sum(parameter.numel() for parameter in parameters)
        learned = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        share = f", of which {learned:,} are trained," if learned < total else ""
        self.progress.note(
            f"{config.preset}: {total:,} parameters{share} on {world.size} × {world.device.type}; "
            f"{len(self.dataset.tokens):,} tokens of {self.dataset.folder}, {self.batches.steps_per_epoch:,} steps per "
            f"epoch; run folder {self.folder.path}"
        )
        if config.report.evaluate_every and self.validation is None:
            self.progress.note(f"the data has no split {_VALIDATION!r}: there will be no evaluation during training")
        if world.device.type == "cpu":
            flops = (config.steps - self.step) * config.batch_tokens * self._flops / world.size
            days = flops / (_CPU_FLOPS * torch.get_num_threads()) / 86400
            if days > 1:
                several = config.longest < (config.micro_batch_tokens or config.batch_tokens)
                less = f"micro_batch_tokens={config.longest}" if several else "piece_tokens=4096"
                self.progress.note(
                    f"warning: {config.steps:,} steps of {config.batch_tokens:,} tokens take about {days:,.0f} days on "
                    "this CPU. Ctrl-C stops. For a shorter run, use --config tiny or cpu, or --set steps=…; to use "
                    f"less memory, --set {less}"
                )
        if self.step:
            end = "" if self.step < config.steps else ": nothing is left to do (--set steps=N --allow steps trains on)"
            self.progress.note(f"resuming from step {self.step:,} of {config.steps:,}{end}")

    def _log(self, show: bool) -> None:
        """Fetch the results since the last call, stop if they are not finite, write them and show the last one."""
        pending, self._pending = self._pending, []
        numbers = torch.stack(
            [torch.stack([result.loss, result.gradient_norm, result.targets.to(result.loss)]) for result in pending]
        ).tolist()  # waits for the device
        seconds = max(time.perf_counter() - self._clock, 1e-9)
        self._clock = time.perf_counter()
        speed = len(pending) * self.config.batch_tokens / seconds
        mfu = speed * self._flops / self.world.size / self._peak if self._peak else None
        rows: list[dict[str, Any]] = []
        steps = range(self.step - len(pending) + 1, self.step + 1)
        for step, (loss, norm, targets), result in zip(steps, numbers, pending, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._write(rows)
                raise ValueError(
                    f"the loss at step {step:,} is {loss} and the gradient's norm {norm} (learning rate "
                    f"{result.learning_rate:.2e}): the run diverged and was stopped. Nothing after it was saved; the "
                    f"same command resumes from {self._newest()}. If it happens again, lower optimizer.learning_rate "
                    "or raise optimizer.warmup_steps (with --allow), or set precision=fp32"
                )
            row = {"kind": "train", "step": step, "loss": loss, "learning_rate": result.learning_rate}
            rows.append({**row, "gradient_norm": norm, "targets": int(targets), "tokens_per_second": speed, "mfu": mfu})
        self._write(rows)
        self._last_row = rows[-1]
        if show:
            self.progress.training(rows[-1], (self.config.steps - self.step) * seconds / len(pending))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self.world.leads:
            self.folder.append_metrics(rows)
            for row in rows:
                at = f" at {row['length']}" if "length" in row else ""
                numbers = {k: v for k, v in row.items() if k not in ("kind", "step", "length") and v is not None}
                self.progress.scalars(row["step"], {f"{row['kind']}/{k}{at}": v for k, v in numbers.items()})

    def _evaluate(self) -> None:
        """Every process runs the same evaluation (under FSDP2 each holds a shard of the model); the leader writes."""
        if self.validation is None:
            return
        stepper = self.stepper
        losses = validation_losses(stepper.model, self.validation, self.config, stepper.precision)
        reshard(self.stepper.model)
        for length, loss in losses.items():
            self._write([{"kind": "evaluation", "step": self.step, "length": length, "loss": loss}])
            self.progress.note(
                f"step {self.step:,} · validation at {length:,} tokens: loss {loss:.4f}, "
                f"perplexity {perplexity(loss):.2f}"
            )

    def _sample(self) -> None:
        """Write the sample prompt and its continuation, without dropout; under FSDP2 every process must generate it."""
        model, prompt, most = self.stepper.model, self.config.report.sample_prompt, self.config.report.sample_tokens
        how = {"sampling": Sampling(temperature=0.8), "seed": self.config.seed, "precision": "fp32"}
        with gathered(model):
            text = prompt + generate(model.eval(), self.dataset.tokenizer(), prompt, max_tokens=most, **how)
        model.train()
        if self.world.leads:
            self.folder.write_sample(self.step, text)
        self.progress.note(f"step {self.step:,} · sample:\n{text}")

    def _save(self) -> None:
        """Write a checkpoint unless this step has one. `_log` has checked that all results up to here are finite."""
        if self._saved_at == self.step:
            return
        tensors, scalars = snapshot.take(self.stepper)
        trainer = {
            "step": self.step,
            "config": to_mapping(self.config),
            "data": data_facts(self.dataset),
            "optimizer": scalars,
            "processes": self.world.size,
        }
        self.world.on_leader(lambda: self._write_checkpoint(tensors, trainer))
        self._saved_at = self.step

    def _write_checkpoint(self, tensors: snapshot.Groups, trainer: dict[str, Any]) -> None:
        if data_stamps(self.dataset) != self._data_stamps:
            raise ValueError(
                f"the data changed during the run, so step {self.step:,} was not saved: the files in "
                f"{self.dataset.folder} are not those that the run started with. Put them back and run the same "
                f"command again; it resumes from {self._newest()}"
            )
        checkpoint.save(self.folder.checkpoints, self.step, tensors, trainer)
        if self.config.tune == "state":
            state = first_state(self.stepper.model)
            assert state is not None
            save_state(state, self.folder.path / "state.safetensors")
        keep = self.config.checkpoint
        checkpoint.retain(self.folder.checkpoints, self.step, keep.keep_last, keep.keep_every)

    def _newest(self) -> str:
        return "the start" if self._saved_at is None else f"step {self._saved_at:,}"

    def _result(self, signal: int | None) -> TrainResult:
        return TrainResult(self.folder.path, self.step, self._last_row["loss"] if self._last_row else None, signal)
