"""Which parameter has which rate and decay, in every family; the schedule; the clipping."""

import math

import pytest
import torch
from train_runs import FAMILIES, small_config

from gss.model import build_model
from gss.training.config import OptimizerConfig, resolve
from gss.training.optim import (
    build_optimizer,
    clip_gradients,
    group_of_parameters,
    parameter_groups,
    set_learning_rates,
)
from gss.training.schedule import SCHEDULES, learning_rate

STATE_SPACE_NAMES = ("log_decay", "frequency", "log_frequency", "readout", "skip", "log_step")
WITH_TABLES = ("gss2", "feedback-lstm-single")


def _expected_group(name: str) -> str:
    """By name, so that this says something else than the code under test does."""
    last = name.rpartition(".")[2]
    if last in STATE_SPACE_NAMES:
        return "state_space"
    if last in ("taps", "table", "initial", "identity"):
        return "table"
    if last == "bias" or last.endswith("scale") or "norm" in name:
        return "undecayed"
    return "embedding" if name == "embedding.weight" else "decayed"


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_TABLES])
def test_every_parameter_has_its_group(family: str) -> None:
    model = build_model(small_config(family).model)
    groups = group_of_parameters(model)
    assert groups == {name: _expected_group(name) for name, _ in model.named_parameters()}
    assert ("state_space" in groups.values()) == (family not in ("transformer", "feedback-lstm-single"))
    assert ("table" in groups.values()) == (family in WITH_TABLES)


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_TABLES])
def test_rates_and_decay_over_a_run(family: str) -> None:
    config = OptimizerConfig(warmup_steps=10, learning_rate=2e-3, embedding_factor=8.0, betas=(0.8, 0.95), epsilon=1e-6)
    model = build_model(small_config(family).model)
    optimizer = build_optimizer(model, config)
    owner = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(owner) == len(list(model.parameters()))
    for step, base in ((0, 2e-4), (4, 1e-3), (9, 2e-3), (99, 1e-6)):
        set_learning_rates(optimizer, config, step, steps=100)
        for name, parameter in model.named_parameters():
            kind = _expected_group(name)
            group = owner[id(parameter)]
            rate = {"state_space": 1e-3, "embedding": 8 * base}.get(kind, base)
            assert group["lr"] == pytest.approx(rate), (name, step)
            decay = {"decayed": 0.1, "table": 0.1, "embedding": 0.0125}.get(kind, 0.0)
            assert (group["weight_decay"], group["betas"], group["eps"]) == (decay, (0.8, 0.95), 1e-6), name


def test_schedule_is_linear_then_cosine() -> None:
    config = OptimizerConfig(warmup_steps=4, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(config, step, 13) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[8] == pytest.approx(0.55)
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[12] == pytest.approx(0.1)
    assert learning_rate(config, 1000, 13) == pytest.approx(0.1)
    assert learning_rate(OptimizerConfig(warmup_steps=0), 0, 1) == OptimizerConfig().learning_rate


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_and_stays_between_its_rates(schedule: str) -> None:
    config = resolve("gss-tiny", None, [f"optimizer.schedule={schedule}", "optimizer.warmup_steps=4"]).optimizer
    rates = [learning_rate(config, step, 400) for step in range(500)]
    assert rates[:4] == pytest.approx([config.learning_rate * share for share in (0.25, 0.5, 0.75, 1.0)])
    assert max(rates) <= config.learning_rate
    assert min(rates[4:]) >= config.final_learning_rate * (1 - 1e-9)
    assert rates[399] < config.learning_rate


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clip_is_over_all_parameters_together(scale: float) -> None:
    model = build_model(small_config().model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * scale / 30
    before = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    norm = clip_gradients(model.parameters(), 1.0)
    after = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert norm == pytest.approx(before.norm().item(), rel=1e-5)
    expected = before if norm < 1 else before / norm
    assert torch.allclose(after, expected, rtol=1e-4)


def test_state_space_parameters_are_real_and_fp32() -> None:
    for family in FAMILIES:
        model = build_model(small_config(family).model)
        for group in parameter_groups(model, OptimizerConfig()):
            assert all(p.dtype == torch.float32 and not p.is_complex() for p in group["params"])
