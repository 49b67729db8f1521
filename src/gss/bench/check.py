"""Correctness before speed: compare results with plain arithmetic in float64, and refuse to report on wrong ones.

The limit is the unavoidable error of reduced precision: a path may be as far from float64 as bf16 operands are, or a
few times as far as plain PyTorch in the same precision.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gss.bench.machine import autocast
from gss.config import ModelConfig
from gss.decode import BLOCK, decoder
from gss.generate import read
from gss.loss import next_token_loss
from gss.model import LanguageModel, build_model
from gss.ops import fast

BF16_LIMIT, FLOAT32_LIMIT = 2e-2, 1e-4


@dataclass(frozen=True)
class Figure:
    """One figure of a measurement."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    """What an error may be at most."""
    note: str = ""


def check_training(config: ModelConfig, device: torch.device, length: int) -> list[Figure]:
    """Errors of the loss and of all gradients together on a small batch, refused where they are too large."""
    torch.manual_seed(0)
    model = build_model(config).to(device).eval()  # without dropout, which would hide any error
    rows, length = 2, min(length, 1024 if device.type == "cuda" else 128)
    tokens, targets = torch.randint(0, config.vocab_size, (2, rows, length), device=device)
    measured = _loss_and_gradients(model, tokens, targets, use_fast=True)
    plain = _loss_and_gradients(model, tokens, targets, use_fast=False)
    exact = _loss_and_gradients(model.double(), tokens, targets, use_fast=False)
    # One small parameter's gradient may be all wrong and be lost in the sum; alone it is allowed more noise.
    names = (name for name, _ in model.named_parameters())
    for name, ours, reference, truth in zip(names, measured[1:], plain[1:], exact[1:], strict=True):
        checked("", f"the gradient of {name}", [ours], [reference], [truth], least=0.1, factor=4)
    found = []
    for what, part in (("loss", slice(0, 1)), ("gradients", slice(1, None))):
        three = (result[part] for result in (measured, plain, exact))
        found.append(checked(f"error of the {what}", f"the {what} of a small batch", *three))
    return found


def _loss_and_gradients(model: LanguageModel, tokens: Tensor, targets: Tensor, use_fast: bool) -> list[Tensor]:
    precise = model.embedding.weight.dtype == torch.float64
    with nullcontext() if use_fast else fast.disabled():
        with nullcontext() if precise else autocast(tokens.device):
            loss = _loss(model, tokens, targets)
        gradients = torch.autograd.grad(loss / targets.numel(), list(model.parameters()), allow_unused=True)
    zeros = (g if g is not None else torch.zeros_like(p) for g, p in zip(gradients, model.parameters(), strict=True))
    return [loss.detach().reshape(1), *zeros]


@torch.no_grad()
def plain_loss(model: LanguageModel, inputs: Tensor, targets: Tensor) -> float:
    """The mean loss by plain float32 arithmetic, a row at a time."""
    with fast.disabled():
        pairs = zip(inputs.split(1), targets.split(1), strict=True)
        return sum(_loss(model, *pair).item() for pair in pairs) / targets.numel()


def _loss(model: LanguageModel, tokens: Tensor, targets: Tensor) -> Tensor:
    hidden, _ = model.hidden(tokens, keep_state=False)
    everything = torch.ones_like(targets, dtype=torch.bool)
    return next_token_loss(model.logits, model.embedding.weight, hidden, targets, everything)


@torch.no_grad()
def check_decoding(model: LanguageModel, name: str, rows: int = 2) -> Figure:
    """How far decoded logits are from the model's own in float64; refused where too far."""
    device = model.device
    tokens = torch.randint(0, model.config.vocab_size, (rows, 3 * BLOCK + 41), device=device)
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
    return checked(name, "decoded logits", [stepped], [plain], [exact])


def checked(name: str, what: str, *results: Sequence[Tensor], least: float | None = None, factor: float = 3) -> Figure:
    """The error of what was measured, refused where it is too large for its precision: over `least` and `factor` times
    that of plain PyTorch. The results are those measured, plain ones of the same precision, and exact ones."""
    measured, plain, exact = results
    own, usual = joint_error(measured, exact), joint_error(plain, exact)
    limit = max(least or (BF16_LIMIT if measured[0].is_cuda else FLOAT32_LIMIT), factor * usual)
    if not own <= limit:
        raise ValueError(
            f"{what}: off by {own:.1e} from float64 (plain PyTorch {usual:.1e}, limit {limit:.1e}); nothing is reported"
        )
    return Figure(name, own, "relative error", limit, f"plain {usual:.1e}")


def joint_error(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64, of all tensors as one long vector; infinite where there is a NaN."""
    pairs = [(a.double(), e.double()) for a, e in zip(actual, expected, strict=True)]
    difference = torch.stack([(a - e).square().sum() for a, e in pairs]).sum().sqrt()
    error = difference / torch.stack([e.square().sum() for _, e in pairs]).sum().sqrt().clamp(min=1e-300)
    return float("inf") if torch.isnan(error) else error.item()
