"""Correctness before speed: compare what is measured with plain arithmetic in float64, and refuse where it differs.

The limit is what reduced precision costs anyway: a path may be as far from float64 as bf16 operands are, or a few times
as far as plain PyTorch in the same precision, and never further.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gss.bench.results import Measurement
from gss.config import ModelConfig
from gss.decode import BLOCK, decoder
from gss.generate import read
from gss.loss import next_token_loss
from gss.model import LanguageModel, build_model
from gss.ops import fast

BF16_LIMIT, FLOAT32_LIMIT = 2e-2, 1e-4


@dataclass(frozen=True)
class Errors:
    """How far the measured path and the plain one are from float64."""

    measured: float
    plain: float
    limit: float

    def demand(self, what: str) -> "Errors":
        """Refuse to go on where the measured path is too far off."""
        if not self.measured <= self.limit:
            raise ValueError(
                f"{what}: {self.measured:.1e} away from float64 (plain paths: {self.plain:.1e}, limit "
                f"{self.limit:.1e}), so nothing is reported"
            )
        return self

    def row(self, name: str, what: str) -> Measurement:
        """The measured error beside its limit."""
        note = f"{what}; plain {self.plain:.1e}"
        return Measurement(name, self.measured, "relative error", self.limit, note=note)


def limited(measured: float, plain: float, device: torch.device) -> Errors:
    """The two errors with the limit of a device's precision."""
    return Errors(measured, plain, max(BF16_LIMIT if device.type == "cuda" else FLOAT32_LIMIT, 3 * plain))


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on a GPU, float32 on a CPU: what training and prefill run in."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def joint_error(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64, of all tensors as one long vector; infinite where there is a NaN."""
    pairs = [(a.double(), e.double()) for a, e in zip(actual, expected, strict=True)]
    difference = torch.stack([(a - e).square().sum() for a, e in pairs]).sum().sqrt()
    error = difference / torch.stack([e.square().sum() for _, e in pairs]).sum().sqrt().clamp(min=1e-300)
    return float("inf") if torch.isnan(error) else error.item()


def check_training(config: ModelConfig, device: torch.device, length: int) -> dict[str, Errors]:
    """Errors of the loss and of all gradients together on a small batch, refused where they are too large."""
    torch.manual_seed(0)
    model = build_model(config).to(device)
    rows, length = 2, min(length, 1024 if device.type == "cuda" else 128)
    tokens, targets = torch.randint(0, config.vocab_size, (2, rows, length), device=device)
    measured = _loss_and_gradients(model, tokens, targets, use_fast=True)
    plain = _loss_and_gradients(model, tokens, targets, use_fast=False)
    exact = _loss_and_gradients(model.double(), tokens, targets, use_fast=False)
    errors = {}
    for what, part in (("loss", slice(0, 1)), ("gradients", slice(1, None))):
        measured_error, plain_error = (joint_error(found[part], exact[part]) for found in (measured, plain))
        errors[what] = limited(measured_error, plain_error, device).demand(f"the {what} of a small batch")
    # One small parameter's gradient may be all wrong and be lost in the sum; alone it is allowed more noise.
    names = (name for name, _ in model.named_parameters())
    for name, ours, reference, truth in zip(names, measured[1:], plain[1:], exact[1:], strict=True):
        own, usual = (joint_error([found], [truth]) for found in (ours, reference))
        Errors(own, usual, max(0.1, 4 * usual)).demand(f"the gradient of {name}")
    return errors


def _loss_and_gradients(model: LanguageModel, tokens: Tensor, targets: Tensor, use_fast: bool) -> list[Tensor]:
    precise = model.embedding.weight.dtype == torch.float64
    with nullcontext() if use_fast else fast.disabled():
        with nullcontext() if precise else autocast(tokens.device):
            hidden, _ = model.hidden(tokens, keep_state=False)
            everything = torch.ones_like(targets, dtype=torch.bool)
            loss = next_token_loss(model.logits, model.embedding.weight, hidden, targets, everything)
        gradients = torch.autograd.grad(loss / targets.numel(), list(model.parameters()), allow_unused=True)
    zeros = (g if g is not None else torch.zeros_like(p) for g, p in zip(gradients, model.parameters(), strict=True))
    return [loss.detach().reshape(1), *zeros]


@torch.no_grad()
def plain_loss(model: LanguageModel, inputs: Tensor, targets: Tensor) -> float:
    """The mean loss by plain float32 arithmetic, a row at a time."""
    total = 0.0
    with fast.disabled():
        for tokens, wanted in zip(inputs.split(1), targets.split(1), strict=True):
            hidden, _ = model.hidden(tokens, keep_state=False)
            counted = torch.ones_like(wanted, dtype=torch.bool)
            total += next_token_loss(model.logits, model.embedding.weight, hidden, wanted, counted).item()
    return total / targets.numel()


@torch.no_grad()
def check_decoding(model: LanguageModel) -> Errors:
    """How far decoded logits are from the model's own in float64; refused where too far."""
    device = model.device
    tokens = torch.randint(0, model.config.vocab_size, (2, 3 * BLOCK + 41), device=device)
    first = BLOCK + 17
    _, state = read(model, tokens[:, :first])
    with autocast(device):
        going_on = decoder(model, state)
        stepped = torch.stack([going_on.step(tokens[:, i]) for i in range(first, tokens.shape[1])], dim=1)
    with fast.disabled():
        with autocast(device):
            plain = model(tokens)[0][:, first:]
        twin = build_model(model.config).to(device).double()
        twin.load_state_dict(model.state_dict())
        exact = twin(tokens)[0][:, first:]
    errors = limited(joint_error([stepped], [exact]), joint_error([plain], [exact]), device)
    return errors.demand("decoded logits")
