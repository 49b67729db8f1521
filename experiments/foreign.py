"""Language models of other libraries, of about the size of one of ours, to compare with it.

Each is built and called as its own users do it. If its library is missing, or it cannot be built, it is `Unavailable`,
with the reason.
"""

import importlib
import importlib.util
import logging
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from experiments.measurements import TrainingSpeed
from experiments.pypi_gss import PYPI_GSS, pypi_gss_model
from gss.accounting import account
from gss.bench.machine import autocast, intervals, median_seconds, release
from gss.config import ModelConfig
from gss.decode import BLOCK
from gss.training.config import OptimizerConfig
from gss.training.optim import build_optimizer, clip_gradients


class Unavailable(ValueError):  # noqa: N818
    """A peer that cannot run here; its row shows the message."""


class Foreign(nn.Module):
    """Another library's model: tokens and next tokens in, the mean loss out."""

    def __init__(self, module: nn.Module, compilable: bool) -> None:
        super().__init__()
        self.module = module
        self.compilable = compilable
        """Whether its users would use `torch.compile`; the others have their own kernels, or complex numbers."""

    @property
    def parameter_count(self) -> int:
        """The number of parameters, counting tied ones once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def last_logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the last token, computed together with the model's cache."""
        raise NotImplementedError

    def continuation(self, tokens: Tensor) -> Callable[[], Tensor]:
        """A function that returns the next greedy token of each row, [B], each time it is called."""
        raise NotImplementedError


class _PyPI(Foreign):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.module(tokens, labels=targets)

    def last_logits(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)[:, -1]

    def continuation(self, tokens: Tensor) -> Callable[[], Tensor]:
        return lambda: self.last_logits(tokens).argmax(-1)  # without a state, every token costs the whole context


class _HuggingFace(Foreign):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.module(input_ids=tokens, labels=tokens, use_cache=False).loss  # shifts the labels itself

    def last_logits(self, tokens: Tensor) -> Tensor:
        return self.module(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[:, -1]

    def continuation(self, tokens: Tensor) -> Callable[[], Tensor]:
        after = self.module(input_ids=tokens, use_cache=True, logits_to_keep=1)

        def step() -> Tensor:
            nonlocal after
            token = after.logits[:, -1].argmax(-1)
            cache = {name: after[name] for name in ("past_key_values", "cache_params") if name in after}
            after = self.module(input_ids=token.unsqueeze(1), use_cache=True, **cache)
            return token

        return step


def build_foreign(name: str, config: ModelConfig, length: int) -> Foreign:
    """The peer of that name, with the depth at which it is about as large as our model of this config."""
    if name not in FOREIGN:
        raise ValueError(f"there is no peer {name!r}; choose from: {', '.join(FOREIGN)}, or the name of a preset")
    with _hushed():
        try:
            return FOREIGN[name](config, length)
        except ImportError as error:
            raise Unavailable(f"not installed ({error.name or error})") from None


@contextmanager
def _hushed() -> Iterator[None]:
    """Silence the libraries' advice, a dozen lines per model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _pypi_gss(config: ModelConfig, length: int) -> Foreign:
    if importlib.util.find_spec("gated_state_spaces_pytorch") is None:
        raise Unavailable(f"not installed (pip install {PYPI_GSS})")
    return _PyPI(pypi_gss_model(config).train(), compilable=False)


def _huggingface(
    library: str, config_class: str, settings: Callable[[ModelConfig, int], dict[str, Any]], compilable: bool = False
) -> Callable[[ModelConfig, int], Foreign]:
    """A model of `transformers` or in its form, with the number of layers that comes closest to the size of ours."""

    def build(config: ModelConfig, length: int) -> Foreign:
        configured = getattr(importlib.import_module(library), config_class)
        make = importlib.import_module("transformers").AutoModelForCausalLM.from_config
        given = {"vocab_size": config.vocab_size, **settings(config, length)}
        layers = "n_layer" if "n_embd" in given else "num_hidden_layers"
        with torch.device("meta"):
            sizes = [make(configured(**given, **{layers: depth})).parameters() for depth in (1, 2)]
            one, two = (sum(parameter.numel() for parameter in parameters) for parameters in sizes)
        depth = max(1, round(1 + (account(config).parameters - one) / (two - one)))
        return _HuggingFace(make(configured(**given, **{layers: depth})).train(), compilable)

    return build


def _heads(config: ModelConfig) -> int:
    """Heads of 64, the usual width."""
    return max(1, config.width // 64)


def _gpt2(config: ModelConfig, length: int) -> dict[str, Any]:
    sizes = {"n_embd": config.width, "n_head": _heads(config), "n_positions": length}
    return {**sizes, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "sdpa"}


def _llama(config: ModelConfig, length: int) -> dict[str, Any]:
    inner = -(-8 * config.width // 3 // 64) * 64
    sizes = {"hidden_size": config.width, "intermediate_size": inner, "num_attention_heads": _heads(config)}
    return {**sizes, "max_position_embeddings": length, "tie_word_embeddings": True, "attn_implementation": "sdpa"}


def _mamba2(config: ModelConfig, length: int) -> dict[str, Any]:
    head = min(64, config.width)
    sizes = {"hidden_size": config.width, "head_dim": head, "num_heads": 2 * config.width // head, "n_groups": 1}
    return {**sizes, "tie_word_embeddings": True}


def _gla(config: ModelConfig, length: int) -> dict[str, Any]:
    sizes = {"hidden_size": config.width, "num_heads": max(1, config.width // 256)}
    return {**sizes, "max_position_embeddings": length, "tie_word_embeddings": True}


FOREIGN: dict[str, Callable[[ModelConfig, int], Foreign]] = {
    "pypi-gss": _pypi_gss,
    "hf-gpt2": _huggingface("transformers", "GPT2Config", _gpt2, compilable=True),
    "hf-llama": _huggingface("transformers", "LlamaConfig", _llama, compilable=True),
    "hf-mamba2": _huggingface("transformers", "Mamba2Config", _mamba2),
    "fla-gla": _huggingface("fla.models", "GLAConfig", _gla),
    "fla-mamba2": _huggingface("fla.models", "Mamba2Config", _mamba2),
}


def train_foreign(
    name: str, like: ModelConfig, batch: int, length: int, device: torch.device, compiled: bool, repeats: int
) -> TrainingSpeed:
    """The speed of training another library's model of about the size of ours, as its users do it."""
    release(device)
    torch.manual_seed(0)
    tokens = torch.randint(0, like.vocab_size, (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    try:
        model = build_foreign(name, like, length).to(device)
        if compiled and model.compilable:
            model.module.compile()
        optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-4))
        parameters = list(model.parameters())

        def step() -> Tensor:
            with autocast(device):
                loss = model(inputs, targets)
            loss.backward()
            clip_gradients(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        first = step().item()
        if not first < float("inf"):
            raise ValueError(f"the loss is {first}")
        seconds = statistics.median(intervals(step, repeats, device, warmup=2))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return TrainingSpeed(inputs.numel() / seconds, model.parameter_count, peak)
    finally:
        release(device)


@torch.no_grad()
def prefill_foreign(name: str, like: ModelConfig, batch: int, length: int, device: torch.device, repeats: int) -> float:
    """Tokens per second of reading a prompt, including the model's cache."""
    release(device)
    tokens = torch.randint(0, like.vocab_size, (batch, length), device=device)
    foreign = build_foreign(name, like, length).to(device).eval()

    def run() -> Tensor:
        with autocast(device):
            return foreign.last_logits(tokens)

    if not torch.isfinite(run()).all():
        raise ValueError("its logits are not finite")
    return tokens.numel() / statistics.median(intervals(run, repeats, device, warmup=1))


@torch.no_grad()
def decode_foreign(name: str, like: ModelConfig, context: int, device: torch.device, repeats: int) -> float:
    """Tokens per second of greedy decoding, batch 1, after a context."""
    release(device)
    foreign = build_foreign(name, like, context + BLOCK * (repeats + 2)).to(device).eval()
    tokens = torch.randint(0, like.vocab_size, (1, context), device=device)
    count = 1 if name == "pypi-gss" else BLOCK  # which recomputes
    with autocast(device):
        step = foreign.continuation(tokens)

        def rounds() -> Tensor:
            for _ in range(count):
                token = step()
            return token.cpu()  # waits for the device

        return count / median_seconds({name: rounds}, max(1, repeats // 2))[name]
