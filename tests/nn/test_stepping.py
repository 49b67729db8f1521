"""Steppers under autocast: what a state space carries keeps its own precision."""

import pytest
import torch

import gss
from gss.nn.stepping import StateSpaceStepper
from tests.conftest import small_config


@torch.no_grad()
@pytest.mark.parametrize("step_range", [None, (1e-3, 1e-1)])
def test_a_state_space_is_not_cast(step_range: tuple[float, float] | None) -> None:
    model = gss.build_model(small_config("gss", **{"state_space.step_range": step_range}))
    space = model.layers[0].state_space
    inputs = torch.randn(20, 2, 1, space.channels)
    outputs, states = [], []
    for enabled in (False, True):
        stepper = StateSpaceStepper(space, model.initial_state(2).layers[0]["modes"], block=8)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs.append([stepper.step(u) for u in inputs[:10]])
            stepper.join(stepper.modes()[:1])
            stepper.keep([0, 2])
            outputs[-1] += [stepper.step(u) for u in inputs[10:]]
            states.append(stepper.modes())
    assert all(torch.equal(plain, cast) for plain, cast in zip(*outputs, strict=True))
    assert torch.equal(*states)
