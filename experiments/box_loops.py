"""The model in the box, taught not to run in loops: its own texts are searched for repeats, and those made less likely.

    python -m experiments.box_loops BOOKS --out box-2 --from box [--work runs/loops] [--steps 200] [--minutes 9.5]

BOOKS and WORK are as in `experiments.box`; a corpus that is there (WORK/data) is used. Every step

1. takes beginnings of sentences from training books and lets the model continue them at a low temperature;
2. adds −log(1 − p) of each token that completes an n-gram which stood in its text before: sequence-level unlikelihood
   (Welleck et al. 2019), here over sampled texts;
3. adds the usual loss on rows of books, and takes one step on both.

The model runs with its matrices rounded as they will ship, and the optimizer moves the whole ones (straight-through),
so what is learned is not lost in rounding. Rates of loops are over the card's prompts with other seeds than the card's.

`--from` may be a run with whole weights, which is better than the box's rounded ones; `--card` then names the box with
the facts of its training.
"""

import argparse
import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.box import AFTER_TRAINING, Clock, corpus, finish
from experiments.box_texts import COOL, PROMPTS, TOKENS, faults
from gss.data import Dataset, Prefetch, Segments, Tokenizer, open_dataset
from gss.decode import Engine, Request, Sampling
from gss.io import checkpoint
from gss.lm import run_folder
from gss.model import LanguageModel
from gss.nn.quantized import BITS, packed_twin
from gss.precision import running
from gss.training.config import TrainConfig
from gss.training.distributed import joined
from gss.training.folder import RunFolder
from gss.training.loop import validation_losses
from gss.training.start import first_model, plan
from gss.training.step import Stepper

SIZES = {"cpu": ["length=512", "batch_tokens=2048"], "cuda": ["length=4096", "batch_tokens=65536"]}
MEASURED = ["report.evaluate_lengths=[4096]", "report.evaluate_tokens=262144"]
TEXTS, ROWS = {"cpu": 24, "cuda": 128}, {"cpu": 8, "cuda": 128}
"""Continuations in each step, and how many side by side: the states of more do not fit a CPU's caches."""
SHORTEST, LONGEST = 4, 40
"""Tokens of a beginning."""
SENTENCE = re.compile(r"(?:[.!?][\"'”’]?\s+|\n\n\s*)(?=[\"'“‘]?[A-Z])")
"""What stands before the beginning of a sentence, or of a heading."""
AFTER = AFTER_TRAINING + 30
"""Seconds for measuring and scoring on a GPU."""
MEASURED_SEED = 1000
"""The first of the seeds for rates of loops; the card's are 0 to 15."""


class Text(NamedTuple):
    ids: list[int]
    """The end-of-document id, a beginning, and how the model went on."""
    given: int
    """How many of them the model was given."""


class Rounded:
    """A model whose matrices are rounded as the box stores them, but while the optimizer moves them."""

    def __init__(self, model: LanguageModel, optimizer: torch.optim.Optimizer, weights: str) -> None:
        self._bits = BITS[weights]
        self._layers = [layer for layer in model.modules() if packed_twin(layer, self._bits) is not None]
        self._whole: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: self.restore())
        optimizer.register_step_post_hook(lambda *_: self.round())
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        self._whole = [layer.weight.clone() for layer in self._layers]  # type: ignore[operator]
        for layer in self._layers:
            layer.weight.copy_(packed_twin(layer, self._bits).weight)  # type: ignore[operator, union-attr, arg-type]

    @torch.no_grad()
    def restore(self) -> None:
        for layer, whole in zip(self._layers, self._whole, strict=True):
            layer.weight.copy_(whole)  # type: ignore[operator]


def beginnings(dataset: Dataset, tokenizer: Tokenizer, draw: random.Random) -> Iterator[list[int]]:
    """Beginnings of sentences from anywhere in the books, as prompts are encoded."""
    while True:
        place = draw.randrange(max(1, len(dataset.tokens) - 200))
        found = SENTENCE.split(tokenizer.decode(dataset.tokens[place : place + 200].tolist()), maxsplit=1)
        ids = tokenizer.encode(found[-1]).tolist()[: draw.randint(SHORTEST, LONGEST)]
        if len(found) > 1 and len(ids) >= SHORTEST:
            yield [tokenizer.eos_id, *ids]


def continued(stepper: Stepper, prompts: Sequence[list[int]], temperature: float, seed: int) -> list[Text]:
    """The model's own continuations of prompts, which begin with the end-of-document id."""
    model, sampling = stepper.model.eval(), Sampling(temperature=temperature)
    engine = Engine(model, rows=ROWS[model.device.type], precision=stepper.precision, speculate=False)
    for place, prompt in enumerate(prompts):
        request = Request(prompt=prompt, max_tokens=TOKENS, sampling=sampling, seed=seed + place, eos_id=prompt[0])
        engine.submit(request)
    new: dict[Request, list[int]] = defaultdict(list)
    for output in engine.run():
        new[output.request] += output.tokens
    model.train()
    return [Text([*request.prompt, *ids], len(request.prompt)) for request, ids in new.items()]


def repeats(text: Text, order: int) -> list[int]:
    """Where the model completed an n-gram that stood in the text before."""
    seen, found = set(), []
    for end in range(order, len(text.ids) + 1):
        gram = tuple(text.ids[end - order : end])
        if gram in seen and end > text.given:
            found.append(end - 1)
        seen.add(gram)
    return found


def unlikelihood(model: LanguageModel, texts: Sequence[Text], order: int, precision: str) -> tuple[Tensor, float]:
    """The sum of −log(1 − p) over repeats, for each token that the model wrote, and the share of them that repeat."""
    size = 64 * math.ceil((LONGEST + TOKENS) / 64) + 1  # one shape for all steps, in whole chunks of inputs
    tokens = torch.zeros(len(texts), size, dtype=torch.int64)
    marked = torch.zeros(len(texts), size, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text.ids)] = torch.tensor(text.ids)
        marked[row, repeats(text, order)] = True
    written = sum(len(text.ids) - text.given for text in texts)
    share = int(marked.sum()) / written
    row_of, place = (index.to(model.device) for index in marked.nonzero(as_tuple=True))
    tokens = tokens.to(model.device)
    with running(model, precision):
        hidden, _ = model.hidden(tokens[:, :-1], keep_state=False)
        logits = model.logits(hidden[row_of, place - 1]).float()
    others = logits.scatter(1, tokens[row_of, place].unsqueeze(1), -torch.inf)
    return (logits.logsumexp(1) - others.logsumexp(1)).sum() / written, share


def measure(stepper: Stepper, tokenizer: Tokenizer, held_out: Dataset, count: int) -> dict[str, float | int]:
    """Loops and blank lines in continuations of the card's prompts, and the loss on held-out books."""
    given = [[tokenizer.eos_id, *tokenizer.encode(PROMPTS[i % len(PROMPTS)]).tolist()] for i in range(count)]
    texts = continued(stepper, given, COOL, MEASURED_SEED)
    found = faults([tokenizer.decode(text.ids[text.given :]) for text in texts])
    ((length, loss),) = validation_losses(stepper.model, held_out, stepper.config, "fp32").items()
    rate = 16 * (found["blank"] + found["loops"]) / count
    return {**found, "per_16": rate, "length": length, "loss": loss, "perplexity": math.exp(loss)}


def train(
    arguments: argparse.Namespace, config: TrainConfig, data: Path, folder: RunFolder, clock: Clock
) -> dict[str, Any]:
    """Train, write the run, and return what is known of it."""
    dataset, held_out = open_dataset(data, "train"), open_dataset(data, "valid", verify=False)
    tokenizer = dataset.tokenizer()
    prompts = beginnings(dataset, tokenizer, random.Random(config.seed))
    batches = Segments(dataset, config.length, config.rows, config.seed)
    batches.eos_first = config.eos_first
    with joined(config.device) as world:
        stepper = Stepper(first_model(config, dataset), config, world)
        model, step = stepper.model, 0
        count = arguments.texts or TEXTS[world.device.type]
        rounded = Rounded(model, stepper.optimizer, arguments.weights)
        folder.describe(config, dataset, world.size, world.device)
        known: dict[str, Any] = {"before": measure(stepper, tokenizer, held_out, arguments.measured)}
        clock.say(f"before: {known['before']}")
        started = time.monotonic()
        with Prefetch(batches, 0, config.steps, device=world.device) as ahead:
            for step, batch in enumerate(ahead, 1):
                begun = time.monotonic()
                given = [next(prompts) for _ in range(count)]
                seed = (1 << 32) + step * count  # far from any that is measured
                texts = continued(stepper, given, arguments.cool, seed)
                unlikely, share = unlikelihood(model, texts, arguments.order, stepper.precision)
                (arguments.weight * unlikely).backward()
                result = stepper.step(batch, step - 1)
                row = {"loss": result.loss, "unlikelihood": unlikely, "repeats": share, "norm": result.gradient_norm}
                row = {name: float(torch.as_tensor(value).detach()) for name, value in row.items()}
                speed = config.batch_tokens / (time.monotonic() - begun)
                folder.append_metrics([{"kind": "train", "step": step, **row, "tokens_per_second": speed}])
                if step % config.report.log_every == 0:
                    clock.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in row.items()))
                if clock.left < AFTER:
                    clock.say("the time for training is up")
                    break
        minutes = (time.monotonic() - started) / 60
        known["after"] = measure(stepper, tokenizer, held_out, arguments.measured)
        clock.say(f"after: {known['after']}")
        rounded.restore()
        checkpoint.save(folder.checkpoints, step, {checkpoint.MODEL: model.state_dict()}, {})
    asked = {"order": arguments.order, "weight": arguments.weight, "temperature": arguments.cool, "texts": count}
    return {"minutes": minutes, "unlikelihood": asked | known}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, nargs="?", help="the archives' folder; not needed if WORK has the corpus")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make; an earlier box there is replaced")
    parser.add_argument("--from", dest="start", metavar="RUN", default="box", help="the weights to continue from")
    parser.add_argument("--card", metavar="BOX", help="the box with the facts of the training so far; RUN without it")
    parser.add_argument("--work", type=Path, default=Path("runs/loops"), help="text, corpus, run")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything, measuring and scoring included")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--texts", type=int, help="continuations in each step; 128 on a GPU, 24 on a CPU")
    parser.add_argument("--weight", type=float, default=1.0, help="of the unlikelihood")
    parser.add_argument("--order", type=int, default=4, help="tokens of an n-gram that may not come again")
    parser.add_argument("--cool", type=float, default=COOL, help="the temperature of continuations")
    parser.add_argument("--weights", choices=tuple(BITS), default="int4", help="how matrices are stored")
    parser.add_argument("--measured", type=int, default=320, help="texts for the rates of loops, a multiple of 16")
    parser.add_argument("--score-tokens", type=int, help="score so many held-out tokens for the card; all without it")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, key=value")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="")
    parser.add_argument("--trial", action="store_true", help="score little")
    arguments = parser.parse_args(given)
    clock = Clock(arguments.minutes)
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.tokenizer = run_folder(arguments.start) / "tokenizer"
    data, folder = corpus(arguments, clock), RunFolder(arguments.work / "loops")
    settings = [f"start={arguments.start}", f"steps={arguments.steps}", f"device={arguments.device}"]
    settings += [*SIZES[arguments.device], "report.log_every=10", *MEASURED, *arguments.set]
    config, _ = plan(data, folder.path, recipe="fine-tune", settings=settings)
    folder.open()
    folder.cut_metrics(0)
    try:
        known = train(arguments, config, data, folder, clock)
    finally:
        folder.close()
    minutes, decided = known.pop("minutes"), {"steps": config.steps, "probes": []}
    arguments.start = arguments.card or arguments.start
    finish(arguments, folder.path, data, decided, minutes, clock, known)


if __name__ == "__main__":
    main()
