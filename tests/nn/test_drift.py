"""Decoding millions of tokens with modes that are slower still: roundings average out instead of adding up."""

import pytest
import torch

from gss.config import StateSpaceConfig
from gss.nn.decode_plans import BlockedStateSpace
from gss.nn.decoding import Block
from gss.nn.state_space import DiagonalStateSpace
from gss.ops.recurrence import final_state


def slow_modes(count: int) -> torch.Tensor:
    """log Ā of modes that last for 10⁵ to 10⁹ tokens, and turn at all speeds."""
    draw = torch.Generator().manual_seed(0)
    constants = 10 ** torch.empty(count, dtype=torch.float64).uniform_(5, 9, generator=draw)
    return torch.complex(-1 / constants, 10 ** torch.empty_like(constants).uniform_(-7, 0, generator=draw))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of any mode, relative to its size."""
    return float(((found - expected).abs().amax((0, 1)) / expected.abs().amax((0, 1))).max())


def test_a_block_after_another_does_not_drift() -> None:
    """1,500 blocks of 64 tokens: 3e-5 where what carries the state from one to the next is rounded."""
    log_a, draw = slow_modes(64).unsqueeze(0), torch.Generator().manual_seed(1)
    single = torch.zeros(1, 8, 64, dtype=torch.complex64)
    double = single.to(torch.complex128)
    for _ in range(1500):
        block = torch.randn(1, 64, 8, generator=draw)
        single, double = final_state(block, log_a, single), final_state(block.double(), log_a, double)
    assert error(single, double) < 5e-6


@pytest.mark.soak
def test_five_million_tokens() -> None:
    """A decoder's state space in float32 beside the recurrence in float64: states and outputs."""
    modes, tokens, rows = 32, 5_000_000, 8
    draw = torch.Generator().manual_seed(1)
    space = DiagonalStateSpace(1, StateSpaceConfig(modes=modes))
    with torch.no_grad():
        space.log_decay.copy_((-slow_modes(modes).real).log())
        space.frequency.copy_(slow_modes(modes).imag.log())
        readout, log_a = space.discretized()
        taps = space.taps(64).double()
    powers = (log_a[0].unsqueeze(-1) * torch.arange(65)).exp()  # [N, 65]
    expected = torch.zeros(rows, modes, dtype=torch.complex128)
    block = Block(64)
    block.join(rows)
    blocked = BlockedStateSpace(space, torch.zeros(rows, 1, modes, 2), block)
    worst = size = 0.0
    for number in range(-(-tokens // 64)):
        inputs = torch.randn(rows, 64, generator=draw)
        if number % 500 == 0:
            for block.read in range(64):
                found = blocked(inputs[:, block.read].view(rows, 1, 1))[0].flatten()
                carried = ((readout[0] * expected) @ powers[:, block.read + 1]).real
                own = inputs[:, : block.read + 1].double() @ taps[0, : block.read + 1].flip(0)
                worst = max(worst, float((found - carried - own).abs().max()))
                size = max(size, float(carried.abs().max()))
        blocked._inputs.tensor.copy_(inputs.unsqueeze(1))
        block.read = 64
        blocked.fold()
        block.begin()
        expected = powers[:, 64] * expected + inputs.to(torch.complex128) @ powers[:, :64].flip(-1).T
    state = error(torch.view_as_complex(blocked.modes()), expected.unsqueeze(1))
    print(f"after {tokens:,} tokens: state {state:.1e}, output {worst / size:.1e} of float64")
    assert state < 1e-4
    assert worst < 1e-4 * size
