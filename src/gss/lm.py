"""A model with its vocabulary, as `gss.load` returns it: it generates text, scores text and reads text into a state."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from gss import box
from gss.accounting import account
from gss.choices import nearest
from gss.data import Tokenizer, load_tokenizer
from gss.generate import first_state, prompt_ids, read, stream_texts
from gss.io import checkpoint
from gss.io.devices import pick_device
from gss.io.files import read_json, write_json, written_folder
from gss.io.runs import load_model, read_config
from gss.io.states import load_state
from gss.model import LanguageModel, build_model
from gss.nn.context import Context
from gss.nn.quantized import quantize, unpacked_state, weights_of
from gss.nn.state import ModelState
from gss.ops import fast
from gss.ops.cpu.pages import use_large_pages
from gss.precision import resolved, running
from gss.sampling import OPTIONS, Sampling, SamplingOptions
from gss.scoring import score_sequences


@dataclass(frozen=True)
class Score:
    """The score of a text: how likely the model finds it.

    >>> score = gss.load(run).score("the cat")
    >>> len(score.tokens) == len(score.log_probabilities)
    True
    >>> score.perplexity > 1
    True
    """

    tokens: tuple[int, ...]
    """Token ids of the text."""
    log_probabilities: tuple[float, ...]
    """Log-probability of each token given those before it, in nats."""

    @property
    def log_probability(self) -> float:
        """Log-probability of the whole text, in nats."""
        return math.fsum(self.log_probabilities)

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(min(-self.log_probability / max(1, len(self.tokens)), 700.0))


@dataclass(frozen=True, eq=False)
class LM:
    """A trained model and the vocabulary that it was trained with.

    It unpacks into model, tokenizer, step and preset. The model by itself is a plain `torch.nn.Module`.

    >>> lm = gss.load(run)
    >>> text = lm.generate("the ", max_tokens=20, temperature=0.8)
    >>> lm.score("the cat").perplexity < lm.score("q9#~]x!").perplexity
    True
    """

    model: LanguageModel
    tokenizer: Tokenizer
    step: int = 0
    """The training step of the checkpoint."""
    preset: str | None = None
    """Name of the preset that the model is based on; None if unknown."""
    eos_first: bool = False
    """Whether rows of training started with the end-of-document id, as the windows of `gss.evaluate` then do."""

    def __repr__(self) -> str:
        size = account(self.model.config).parameters
        name = self.preset or ", ".join(self.model.config.kinds)
        return f"<LM {name}: {size:,} parameters, {self.tokenizer.vocab_size:,} ids, step {self.step:,}>"

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer, self.step, self.preset))

    def generate(self, prompt: str = "", **options: Any) -> str:
        """Continue a prompt and return the text. Takes the options of `stream`.

        >>> lm = gss.load(run)
        >>> lm.generate("the ", max_tokens=8, seed=1) == lm.generate("the ", max_tokens=8, seed=1)
        True
        """
        return "".join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        state: ModelState | None = None,
        precision: str = "auto",
        speculate: bool | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Continue a prompt, yielding the text as it is produced, in whole characters.

        max_tokens            maximum number of tokens; the text also ends at the end of the document
        temperature           0 is greedy, 1 samples from the model's own distribution
        top_k, top_p, min_p   keep this many of the most likely tokens; those that make up this total probability; those
                              at least this fraction as likely as the most likely one
        repetition_penalty    above 1, makes tokens that have occurred less likely; `gss.sampling` has all options
        seed                  the same seed gives the same text
        stop                  one string, or several, before which the text ends
        state                 the result of `read`; the prompt, which must not be empty, continues from it
        precision             fp32, bf16 (autocast), or auto: bf16 on a GPU that supports it
        speculate             speculative decoding by lookup; the text stays the same. Default: on a CPU, and
                              on a GPU at temperature 0

        >>> lm = gss.load(run)
        >>> pieces = list(lm.stream("the ", max_tokens=5, temperature=0))
        >>> "".join(pieces) == lm.generate("the ", max_tokens=5, temperature=0)
        True
        """
        options: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "stop": stop, "state": state}
        for name in sampling.keys() - OPTIONS.keys():
            known = [*options, "precision", "speculate", *OPTIONS]
            raise TypeError(f"there is no option {name!r} of generated text{nearest(name, known)}")
        options |= {"sampling": Sampling(**sampling), "precision": precision, "speculate": speculate}
        pieces = stream_texts(self.model, self.tokenizer, [prompt], **options)
        return (piece.text for piece in pieces if piece.text)

    def read(
        self,
        text: str,
        state: ModelState | None = None,
        *,
        precision: str = "auto",
        context: Context | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> ModelState:
        """Read a text, as the start of a document or following `state`, and return the state after it.

        You can read a long text once and continue from it as often as you like; `gss.save_state` writes the state to a
        file. If several ranks all call this with their `gss.nn.context.Context`, they read the text together, and all
        get the state. `progress` is called with the share read so far, piece by piece.

        >>> lm = gss.load(run)
        >>> state = lm.read("Once upon a time")
        >>> text = lm.generate(" there was", state=state, max_tokens=10)
        >>> text == lm.generate("Once upon a time there was", max_tokens=10)
        True
        """
        if not text and state is not None:
            return state  # the end-of-document id, which stands for an empty text elsewhere, would begin a new one
        ids = prompt_ids(self.tokenizer, text, state or first_state(self.model))
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        with running(self.model, resolved(precision, self.model)):
            return read(self.model, tokens, state, context=context, progress=progress)[1]

    def score(self, text: str, *, precision: str = "auto") -> Score:
        """Score a text, token by token, as a document from its start.

        >>> score = gss.load(run).score("the cat")
        >>> score.log_probability < 0
        True
        """
        ids = prompt_ids(self.tokenizer, text)
        with running(self.model, resolved(precision, self.model)):
            logs = [part.log_probability[0] for part in score_sequences(self.model, [ids])]
        return Score(tuple(ids[1:]), tuple(torch.cat(logs).tolist()) if logs else ())


def load(
    run: str | Path | None = None,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    weights: str | None = None,
    state: str | Path | ModelState | None = None,
) -> LM:
    """Load a trained model, in evaluation mode: a run's newest good checkpoint, or that of a given step.

    `run` is a run folder, or a folder written by `gss export`; without it, or with "box", you get the bundled model.
    With a `state`, or the path of one, every text starts from that state. The device "auto" is a GPU if there is one.
    `weights` (bf16, int8 or int4) quantizes the matrices, which makes the model smaller and faster to decode on a CPU;
    `gss quantize` does so permanently. A quantized model cannot be trained; `weights="fp32"` unpacks it. A model that
    is stored in another format than the one asked for is unpacked and rounded again.

    >>> lm = gss.load(run)
    >>> lm.step
    12
    >>> gss.load().tokenizer.vocab_size
    8192
    """
    folder = run_folder(run)
    config = read_config(folder)
    device = pick_device("auto") if device == "auto" else torch.device(device)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(fast.prepare, device)  # hashing the weights leaves a core free for it
        model, step = load_model(folder, config, step, mapped=device.type != "cpu")
    if weights is not None:
        model = _in_format(model, weights)
    if state is not None:
        model.start_from(state if isinstance(state, ModelState) else load_state(state))
    if device.type == "cpu":
        use_large_pages(model)
    eos_first = config.get("eos_first") is True
    return LM(model.to(device), load_tokenizer(folder), step, config.get("preset"), eos_first)


def _in_format(model: LanguageModel, weights: str) -> LanguageModel:
    """The model with its matrices in fp32, bf16, int8 or int4; rounded again, if they are in another format."""
    stored = weights_of(model)
    if stored not in (None, weights):
        packed, model = model, build_model(model.config).eval()
        model.start_from(first_state(packed))
        model.load_state_dict(unpacked_state(packed))
    if weights not in (stored, "fp32"):
        quantize(model, weights)
    return model


def load_to_export(run: str | Path | None, **options: Any) -> LM:
    """`load`, for use without gss; an error if texts start from a tuned state."""
    lm = load(run, **options)
    if lm.model.first is not None:
        raise ValueError(f"{run} is a tuned initial state and cannot be exported: export the model it was tuned for")
    return lm


def run_folder(run: str | Path | None) -> Path:
    """The folder of a run, or of the bundled model."""
    return box.folder() if run is None or (str(run) == "box" and not Path(run).exists()) else Path(run)


def quantize_run(run: str | Path | None, out: str | Path, weights: str, *, step: int | None = None) -> Path:
    """Write a run folder with a run's model, its matrices in bf16, int8 or int4; `load` reads it like any other.

    It keeps only the run's configuration, its vocabulary and the record of its data. A run that is quantized already
    is unpacked and rounded again, with a warning; it is refused if it has that format.

    >>> small = quantize_run(run, folder / "small", "int8")
    >>> gss.load(small).score("the cat").perplexity > 1
    True
    """
    source, target = run_folder(run), Path(out)
    with written_folder(target) as aside:
        lm = load(source, step=step)
        name, stored = run or box.NAME, weights_of(lm.model)
        if stored == weights:
            raise ValueError(f"the weights of {name} are in {weights} already: use it as it is, or choose other bits")
        if stored:
            warnings.warn(f"{name} is stored in {stored}, so its weights are now rounded twice", stacklevel=2)
        model = _in_format(lm.model, weights)
        kept = {name: value for name, value in read_config(source).items() if name != "model_type"}  # an export's
        write_json(aside / "config.json", kept)
        if seen := read_json(source / "data.json"):
            write_json(aside / "data.json", {name: value for name, value in seen.items() if name != "folder"})
        lm.tokenizer.save(aside / "tokenizer")
        checkpoint.save(aside / "checkpoints", lm.step, {checkpoint.MODEL: model.state_dict()}, {"weights": weights})
    return target
