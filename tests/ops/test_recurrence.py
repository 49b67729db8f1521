"""Carried states, final states and steps against the plain recurrence."""

import pytest
import torch

from gss.ops import reference
from gss.ops.state_space import carried_output, convolve, final_state, kernel, step, transition
from tests.comparing import relative_error


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 31])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_piece_after_a_state(batch: int, length: int, groups: int) -> None:
    channels, modes = 4, 5
    signal = torch.randn(batch, length, channels, dtype=torch.float64, requires_grad=True)
    before = torch.randn(batch, channels, modes, dtype=torch.complex128, requires_grad=True)
    readout = torch.randn(channels, modes, dtype=torch.complex128, requires_grad=True)
    decay, frequency = torch.rand(2, groups, modes, dtype=torch.float64)
    log_a = torch.complex(-decay, 6 * frequency).requires_grad_()
    inputs = (signal, before, readout, log_a)

    output = convolve(signal, kernel(readout, log_a, length)) + carried_output(before, readout, log_a, length)
    after = final_state(signal, log_a, before)
    expected, expected_after = reference.recur(signal, readout, log_a.exp(), torch.ones(()), before)
    assert relative_error(output, expected) < 1e-12
    assert relative_error(after, expected_after) < 1e-12

    gradients = torch.randn_like(expected), torch.randn_like(expected_after)
    mine = torch.autograd.grad((output, after), inputs, gradients)
    plain = torch.autograd.grad((expected, expected_after), inputs, gradients)
    for ours, theirs in zip(mine, plain, strict=True):
        assert relative_error(ours, theirs) < 1e-11


@pytest.mark.parametrize("groups", [1, 4])
def test_steps(groups: int) -> None:
    signal = torch.randn(3, 20, 4, dtype=torch.float64)
    readout = torch.randn(4, 5, dtype=torch.complex128)
    log_a = torch.complex(-torch.rand(groups, 5), torch.randn(groups, 5)).to(torch.complex128)
    state = torch.zeros(3, 4, 5, dtype=torch.complex128)
    outputs = []
    for k in range(20):
        output, state = step(signal[:, k], state, readout, transition(log_a, torch.complex128))
        outputs.append(output)
    expected, expected_state = reference.recur(signal, readout, log_a.exp(), torch.ones(()))
    assert relative_error(torch.stack(outputs, 1), expected) < 1e-13
    assert relative_error(state, expected_state) < 1e-13
