"""A model with its vocabulary: `gss.load` gives one; it writes text, scores text and reads text into a state."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from gss import box
from gss.data import Tokenizer, load_tokenizer
from gss.generate import first_state, prompt_ids, read, stream_texts
from gss.io import checkpoint
from gss.io.devices import pick_device
from gss.io.files import read_json, write_json, written_folder
from gss.io.runs import load_model, read_config
from gss.io.states import load_state
from gss.model import LanguageModel, build_model
from gss.nn.context import Context
from gss.nn.quantized import is_quantized, quantize, unpacked_state
from gss.nn.state import ModelState
from gss.ops import fast
from gss.ops.cpu.pages import use_large_pages
from gss.precision import resolved, running
from gss.sampling import Sampling, SamplingOptions
from gss.scoring import score_sequences


@dataclass(frozen=True)
class Score:
    """How likely a text is to a model.

    >>> score = gss.load(run).score("the cat")
    >>> len(score.tokens) == len(score.log_probabilities)
    True
    >>> score.perplexity > 1
    True
    """

    tokens: tuple[int, ...]
    """Ids of the text."""
    log_probabilities: tuple[float, ...]
    """Log-probability of each token given those before it, in nats."""

    @property
    def log_probability(self) -> float:
        """Log-probability of the whole text, in nats."""
        return math.fsum(self.log_probabilities)

    @property
    def perplexity(self) -> float:
        """exp(−nats per token)."""
        return math.exp(min(-self.log_probability / max(1, len(self.tokens)), 700.0))


@dataclass(frozen=True, eq=False)
class LM:
    """A trained model and the vocabulary that it was trained with.

    It unpacks into model, tokenizer, step and preset. The model alone is a plain `torch.nn.Module`.

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
    """Name of the preset that the model started from; None if unknown."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer, self.step, self.preset))

    def generate(self, prompt: str = "", **options: Any) -> str:
        """The continuation of a prompt as one text, with the options of `stream`.

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
        """The continuation of a prompt, as it is produced, in whole characters.

        max_tokens            maximum number of tokens; the text also ends where the document does
        temperature           0 is greedy, 1 samples from the model's own distribution
        top_k, top_p, min_p   keep this many of the likeliest tokens; those that make up this probability; those at
                              least this fraction as likely as the likeliest
        repetition_penalty    over 1: tokens that have occurred become less likely; see `gss.sampling` for all options
        seed                  the same seed gives the same text
        stop                  a string to end before, or several
        state                 the result of `read`, which the prompt (then not empty) continues
        precision             fp32, bf16 (autocast), or auto: bf16 on a GPU that has it
        speculate             speculate by lookup; the text stays the same. By default on a CPU, where it is faster

        >>> lm = gss.load(run)
        >>> pieces = list(lm.stream("the ", max_tokens=5, temperature=0))
        >>> "".join(pieces) == lm.generate("the ", max_tokens=5, temperature=0)
        True
        """
        options: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "stop": stop, "state": state}
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
        """The state after a text, at the start of a document or after what `state` has read.

        A long text is read once and continued as often as you like; `gss.save_state` keeps the state in a file. Several
        ranks that all call this with their `gss.nn.context.Context` read it together, and all get the state. `progress`
        is called with the share that has been read, piece by piece.

        >>> lm = gss.load(run)
        >>> state = lm.read("Once upon a time")
        >>> text = lm.generate(" there was", state=state, max_tokens=10)
        >>> text == lm.generate("Once upon a time there was", max_tokens=10)
        True
        """
        ids = prompt_ids(self.tokenizer, text, state or first_state(self.model))
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.model.device)
        with running(self.model, resolved(precision, self.model)):
            return read(self.model, tokens, state, context=context, progress=progress)[1]

    def score(self, text: str, *, precision: str = "auto") -> Score:
        """How likely a text is, token by token, as a document from its start.

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
    """The model of a run folder, in evaluation mode: its newest good checkpoint, or that of a given step.

    Without a run, or with "box", this is the bundled model. It also reads a folder that `gss export` wrote. With a
    `state`, or the file of one, every text starts from that state. The device "auto" is a GPU where there is one.
    `weights` (bf16, int8 or int4) packs the matrices, which makes decoding faster and the model smaller; `gss quantize`
    does the same permanently. A model with packed weights cannot be trained; `weights="fp32"` unpacks them.

    >>> lm = gss.load(run)
    >>> lm.step
    12
    >>> gss.load().preset
    'gss-hybrid-small'
    """
    folder = run_folder(run)
    config = read_config(folder)
    device = pick_device("auto") if device == "auto" else torch.device(device)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(fast.prepare, device)  # hashing the weights leaves a core free for it
        model, step = load_model(folder, config, step, mapped=device.type != "cpu")
    if weights == "fp32" and is_quantized(model):
        packed, model = model, build_model(model.config).eval()
        model.load_state_dict(unpacked_state(packed))
    elif weights not in (None, "fp32"):
        quantize(model, weights)
    if state is not None:
        model.start_from(state if isinstance(state, ModelState) else load_state(state))
    if device.type == "cpu":
        use_large_pages(model)
    return LM(model.to(device), load_tokenizer(folder), step, config.get("preset"))


def load_to_export(run: str | Path | None, **options: Any) -> LM:
    """`load`, for use without gss: refused where texts start from a tuned state."""
    lm = load(run, **options)
    if lm.model.first is not None:
        raise ValueError(f"{run} is a tuned first state, which is not exported: export the model that it was tuned for")
    return lm


def run_folder(run: str | Path | None) -> Path:
    """The folder of a run, the box's where that is meant."""
    return box.folder() if run is None or (str(run) == "box" and not Path(run).exists()) else Path(run)


def quantize_run(run: str | Path | None, out: str | Path, weights: str, *, step: int | None = None) -> Path:
    """Write a run folder with a run's model, its matrices packed as bf16, int8 or int4; `load` reads it as any other.

    Of the run, only its configuration, its vocabulary and the record of its data are kept.

    >>> small = quantize_run(run, folder / "small", "int8")
    >>> gss.load(small).score("the cat").perplexity > 1
    True
    """
    source, target = run_folder(run), Path(out)
    with written_folder(target) as aside:
        lm = load(source, step=step, weights=weights)
        kept = {name: value for name, value in read_config(source).items() if name != "model_type"}  # an export's
        write_json(aside / "config.json", kept)
        if seen := read_json(source / "data.json"):
            write_json(aside / "data.json", {name: value for name, value in seen.items() if name != "folder"})
        lm.tokenizer.save(aside / "tokenizer")
        checkpoint.save(aside / "checkpoints", lm.step, {checkpoint.MODEL: lm.model.state_dict()}, {"weights": weights})
    return target
