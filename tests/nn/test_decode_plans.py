"""Plans under autocast: what a state space carries keeps its own precision."""

import pytest
import torch

import gss
from gss.nn.decode_plans import BlockedStateSpace
from gss.nn.decoding import Block
from tests.conftest import small_config


@torch.no_grad()
@pytest.mark.parametrize("step_range", [None, (1e-3, 1e-1)])
def test_a_state_space_is_not_cast(step_range: tuple[float, float] | None) -> None:
    model = gss.build_model(small_config("gss", **{"state_space.step_range": step_range}))
    space = model.layers[0].state_space
    inputs = torch.randn(20, 2, 1, space.channels)
    outputs, states = [], []
    for enabled in (False, True):
        block = Block(8)
        block.join(2)
        blocked = BlockedStateSpace(space, model.initial_state(2).layers[0]["modes"], block)

        def step(u: torch.Tensor, block: Block = block, blocked: BlockedStateSpace = blocked) -> torch.Tensor:
            y, _ = blocked(u)
            block.read += 1
            if block.read == block.size:
                blocked.fold()
                block.begin()
            return y

        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs.append([step(u) for u in inputs[:10]])
            modes = blocked.modes()[:1]
            block.join(1)
            blocked.join(modes)
            block.keep([0, 2])
            blocked.keep([0, 2])
            outputs[-1] += [step(u) for u in inputs[10:]]
            states.append(blocked.modes())
    assert all(torch.equal(plain, cast) for plain, cast in zip(*outputs, strict=True))
    assert torch.equal(*states)
