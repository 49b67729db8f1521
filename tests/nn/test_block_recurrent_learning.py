"""Recurrent Transformers on windows learn what no window reaches."""

import torch
import torch.nn.functional as F

import gss
from tests.conftest import small_config

SYMBOLS, COUNT, GAP = 8, 4, 24


def _step(model: gss.LanguageModel, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """One step on the copied symbols of every row; returns their loss."""
    logits = model(tokens[:, :-1], keep_state=False)[0][:, -COUNT:]
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, -COUNT:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _copies(generator: torch.Generator) -> torch.Tensor:
    """Four symbols, a gap of three windows, a mark, the four symbols again: 29 tokens back, where two layers of
    windows of 8 reach 16."""
    symbols = torch.randint(0, SYMBOLS, (32, COUNT), generator=generator)
    gap = torch.full((32, GAP), SYMBOLS)
    return torch.cat([symbols, gap, torch.full((32, 1), SYMBOLS + 1), symbols], dim=1)


def _copy_loss(family: str, steps: int) -> float:
    torch.manual_seed(0)
    sizes = {"vocab_size": SYMBOLS + 2, "width": 32, "feedforward_width": 64, "recurrent.vectors": 8}
    model = gss.build_model(small_config(family, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    losses = [_step(model, optimizer, _copies(generator)) for _ in range(steps)]
    return sum(losses[-10:]) / 10


def test_recurrent_models_copy_over_a_distance_that_slide_cannot() -> None:
    chance = 2.08  # ln 8
    slide = _copy_loss("slide", 150)
    assert slide > chance - 0.05
    for family in ("rec-fixed-skip", "feedback-fixed-skip", "feedback-lstm-single"):
        assert _copy_loss(family, 150) < 0.6 * slide, family
