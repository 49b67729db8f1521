"""Generated tasks that require memory, as pure functions of a seed; and training a small model on one of them.

Each task returns tokens [rows, length] and a mask of the same shape that marks the targets, which are predicted from
the tokens before them. There are `vocabulary` ids in all, and `items` to remember.

    induction           … ! a … ! a                 what followed the mark the last time
    selective-copying   … a … b … ! a b             the items among the noise, in order
    recall              k v k v … k v … k v         the value that came with each key (multi-query associative recall)
    passkey             … ! 4 1 5 … ! 4 1 5         digits, found again however long the noise is

Training batches are a function of the seed and the step; the training step is that of `gss train`. Accuracy is measured
on new sequences, including longer ones.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import Generator

from gss.config import ModelConfig, override
from gss.data import Batch, as_tensors
from gss.model import LanguageModel, build_model
from gss.nn.gss2 import GSS2Layer
from gss.precision import check, resolved, running
from gss.scoring import PIECE, score_sequences
from gss.training import OptimizerConfig, TrainConfig
from gss.training.distributed import World
from gss.training.step import Stepper

_TRAINING, _TEST = 0, 1  # random streams


class Draw(NamedTuple):
    """Sequences of a task."""

    tokens: npt.NDArray[np.int64]  # [B, L]
    mask: npt.NDArray[np.bool_]  # [B, L], True where the token is a target that counts


def induction(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Noise with a mark (the last id) and tokens after it, which must be repeated after the mark at the end."""
    return _marked(rng, rows, length, items, vocabulary - 1, (0, vocabulary - 1))


def passkey(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Noise with a mark (id 10) and digits (ids 0 to 9) after it, which must be repeated after the mark at the end."""
    return _marked(rng, rows, length, items, 10, (11, vocabulary))


def _marked(rng: Generator, rows: int, length: int, items: int, mark: int, noise: tuple[int, int]) -> Draw:
    """A mark and items (ids below it) at a random place in noise, and again at the end."""
    tokens = rng.integers(*noise, (rows, length))
    hidden = rng.integers(0, mark, (rows, items))
    place = rng.integers(0, length - 2 * items - 1, (rows, 1))
    string = np.concatenate([np.full((rows, 1), mark), hidden], axis=1)
    np.put_along_axis(tokens, place + np.arange(items + 1), string, axis=1)
    tokens[:, -items - 1 :] = string
    return _asked(tokens, items)


def selective_copying(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Items (ids from 2) at random places in noise (id 0); after a mark (id 1), the items in order."""
    content = rng.integers(2, vocabulary, (rows, items))
    tokens = np.zeros((rows, length), np.int64)
    places = np.sort(_distinct(rng, rows, length - items - 1, items), axis=1)
    np.put_along_axis(tokens, places, content, axis=1)
    tokens[:, -items - 1] = 1
    tokens[:, -items:] = content
    return _asked(tokens, items)


def recall(rng: Generator, rows: int, length: int, vocabulary: int, items: int) -> Draw:
    """Pairs of distinct keys (lower half of the ids) and values (upper half); then every key again at a random place,
    followed by its value as the target; random values in between."""
    half = vocabulary // 2
    tokens = rng.integers(half, vocabulary, (rows, length))
    pairs = np.stack([_distinct(rng, rows, half, items), rng.integers(half, vocabulary, (rows, items))], axis=2)
    tokens[:, : 2 * items] = pairs.reshape(rows, -1)
    slots = 2 * items + 2 * _distinct(rng, rows, (length - 2 * items) // 2, items)
    mask = np.zeros((rows, length), bool)
    for offset in (0, 1):
        np.put_along_axis(tokens, slots + offset, pairs[:, :, offset], axis=1)
    np.put_along_axis(mask, slots + 1, True, axis=1)
    return Draw(tokens, mask)


def _asked(tokens: npt.NDArray[np.int64], items: int) -> Draw:
    """The tokens with the last `items` as targets."""
    mask = np.zeros(tokens.shape, bool)
    mask[:, -items:] = True
    return Draw(tokens, mask)


def _distinct(rng: Generator, rows: int, among: int, count: int) -> npt.NDArray[np.int64]:
    """Distinct numbers below `among` in random order, [rows, count]."""
    chosen = rng.random((rows, among)).argpartition(count - 1, axis=1)[:, :count]  # far faster than sorting
    return rng.permuted(chosen, axis=1)


@dataclass(frozen=True)
class Task:
    """A task with its sizes."""

    name: str
    function: Callable[[Generator, int, int, int, int], Draw]
    vocabulary: int
    items: int
    shortest: Callable[[int], int]  # sequence, by the number of items
    fewest: Callable[[int], int]  # ids, by the number of items

    def draw(self, seed: int | Sequence[int], rows: int, length: int) -> Draw:
        """Sequences of a length, determined by the seed."""
        least, ids = self.shortest(self.items), self.fewest(self.items)
        if length < least:
            raise ValueError(f"{self.items} items need a length of {least} or more, not {length}: ask for fewer items")
        if self.vocabulary < ids:
            raise ValueError(f"this task needs a vocabulary of at least {ids}, not {self.vocabulary}")
        return self.function(np.random.default_rng(seed), rows, length, self.vocabulary, self.items)


_TASKS = (
    Task("induction", induction, 16, 1, lambda items: 2 * items + 2, lambda items: 3),
    Task("selective-copying", selective_copying, 16, 16, lambda items: 2 * items + 1, lambda items: 4),
    Task("recall", recall, 8192, 64, lambda items: 4 * items, lambda items: 2 * items),
    Task("passkey", passkey, 64, 5, lambda items: 2 * items + 2, lambda items: 12),
)
TASKS = {task.name: task for task in _TASKS}


def make_task(name: str, items: int | None = None, vocabulary: int | None = None) -> Task:
    """A task by name; None keeps a default size."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; choose from: {', '.join(TASKS)}")
    task = TASKS[name]
    if items is not None and items < 1:
        raise ValueError(f"a task needs at least 1 item, not {items}")
    return replace(task, vocabulary=vocabulary or task.vocabulary, items=items or task.items)


class Stage(NamedTuple):
    """A stage of the curriculum: training steps on easier sequences before the task itself."""

    items: int
    length: int
    rows: int
    steps: int


@dataclass(frozen=True)
class LengthAccuracy:
    """The accuracy of the likeliest token in new sequences of one length."""

    length: int
    sequences: int
    accuracy: float  # share of targets
    standard_error: float  # over sequences
    solved: float  # share of sequences with every target right


@dataclass(frozen=True)
class TaskResult:
    """The result of training on a task."""

    task: str
    items: int
    vocabulary: int
    length: int
    steps: int
    rows: int
    curriculum: tuple[Stage, ...]
    stretch: float
    seed: int
    optimizer: str
    learning_rate: float
    parameters: int
    loss: float  # mean over the last tenth of the steps, nats per target
    seconds: float
    accuracy: tuple[LengthAccuracy, ...]


def task_optimizer(config: ModelConfig, steps: int, name: str = "muon", rate: float = 3.2e-3) -> OptimizerConfig:
    """An optimizer for short runs: a tenth of the steps as warm-up, the embedding's rate scaled to its initial size."""
    factor = max(1.0, math.sqrt(config.width) * config.embedding_std)
    changes = {"name": name, "learning_rate": rate, "warmup_steps": steps // 10, "embedding_factor": factor}
    return override(OptimizerConfig(), changes)


def train_on_task(
    config: ModelConfig,
    task: Task,
    *,
    length: int,
    steps: int,
    rows: int = 64,
    curriculum: Sequence[Stage] = (),
    lengths: Sequence[int] = (),
    sequences: int = 64,
    stretch: float = 1.0,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: str = "auto",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> TaskResult:
    """Train a model (with the vocabulary of the task) and test it at `length` and other lengths.

    steps           the total number, including those of the curriculum
    rows            sequences per step
    curriculum      easier stages for the first steps
    lengths         further lengths to test at, with `sequences` new sequences each
    stretch         multiplies every time constant of the GSS2 layers after training
    optimizer       None: Muon, see `task_optimizer`
    report          called with the number of steps taken so far and in total
    """
    if min(rows, sequences) < 1:
        raise ValueError("rows and sequences must be at least 1")
    check(precision)
    stages = _stages(curriculum, Stage(task.items, length, rows, steps))
    for items, wanted in [(stage.items, stage.length) for stage in stages] + [(task.items, other) for other in lengths]:
        replace(task, items=items).draw(0, 1, wanted)  # raises for lengths that are too short, before any training
    config = override(config, {"vocab_size": task.vocabulary})
    optimizer = optimizer or task_optimizer(config, steps)
    longest, most = max(stage.length for stage in stages), max(stage.rows for stage in stages)
    run = TrainConfig(model=config, seed=seed, steps=steps, length=longest, batch_tokens=most * longest)
    run = override(replace(run, optimizer=optimizer), {"precision": precision})
    stepper = Stepper(build_model(config, seed), run, World(torch.device(device)))
    spaces = [layer.state_space for layer in stepper.model.layers if isinstance(layer, GSS2Layer)]
    if not (stretch == 1 or (spaces and 0 < stretch < math.inf)):
        raise ValueError(f"stretch needs GSS2 layers and a positive number, not {stretch!r}")
    started, losses = time.perf_counter(), []
    stepper.model.train()
    for step, stage in enumerate(itertools.chain(*([stage] * stage.steps for stage in stages))):
        easier = replace(task, items=stage.items)
        batch = _batch(easier, (seed, _TRAINING, step), stage.rows, stage.length, step, stepper)
        losses.append(stepper.step(batch, step).loss)
        report(step + 1, steps)
    last = torch.stack(losses[-max(1, steps // 10) :]).mean().item()
    seconds = time.perf_counter() - started
    for space in spaces:
        space.stretch(stretch)
    stepper.model.eval()
    tested = [
        task_accuracy(stepper.model, task, wanted, sequences=sequences, seed=seed, precision=precision)
        for wanted in dict.fromkeys((length, *lengths))
    ]
    parameters = sum(parameter.numel() for parameter in stepper.model.parameters())
    return TaskResult(
        task.name, task.items, task.vocabulary, length, steps, rows, tuple(curriculum), stretch, seed, optimizer.name,
        optimizer.learning_rate, parameters, last, seconds, tuple(tested),
    )  # fmt: skip


def _stages(curriculum: Sequence[Stage], last: Stage) -> list[Stage]:
    """All stages; the last one, the task itself, gets the remaining steps."""
    left = last.steps - sum(stage.steps for stage in curriculum)
    if left < 1:
        raise ValueError(f"the curriculum takes {last.steps - left:,} of {last.steps:,} steps: train for more steps")
    if any(min(stage) < 1 for stage in curriculum):
        raise ValueError("a stage of the curriculum needs at least 1 item, token, row and step")
    return [*curriculum, last._replace(steps=left)]


def task_accuracy(
    model: LanguageModel,
    task: Task,
    length: int,
    *,
    sequences: int = 64,
    seed: int = 0,
    precision: str = "auto",
    piece: int = PIECE,
    batch_tokens: int = 65_536,
) -> LengthAccuracy:
    """The accuracy of a model in evaluation mode on new sequences, read in pieces with the state carried."""
    rows = max(1, batch_tokens // min(piece, length))
    right = []
    for first in range(0, sequences, rows):
        tokens, mask = task.draw((seed, _TEST, length, first), min(rows, sequences - first), length)
        skip = mask.argmax(1) - 1  # targets before the first that counts
        with running(model, resolved(precision, model)):
            parts = score_sequences(model, list(tokens), skip=skip.tolist(), piece=piece)
            likeliest = np.concatenate([part.likeliest.numpy() for part in parts], axis=1)
        right.append(likeliest[mask[:, 1:]].reshape(len(tokens), -1))  # each row has as many targets
    hits = np.concatenate(right)
    shares = hits.mean(1)
    error = float(shares.std(ddof=1) / math.sqrt(sequences)) if sequences > 1 else math.nan
    return LengthAccuracy(length, sequences, float(shares.mean()), error, float(hits.all(1).mean()))


def _batch(
    task: Task, seed: tuple[int, ...], rows: int, length: int, step: int, stepper: Stepper
) -> Batch[torch.Tensor]:
    """A batch in which the target of every token is the next one; the last has none."""
    tokens, mask = task.draw(seed, rows, length)
    starts = np.zeros_like(mask)
    starts[:, 0] = True
    # No task asks for the first token, so the last place of the mask is False.
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), np.roll(mask, -1, axis=1), starts, step, 0)
    device = stepper.world.device
    return as_tensors(batch, pin=device.type == "cuda").map(lambda tensor: tensor.to(device, non_blocking=True))
