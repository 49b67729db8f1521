"""The state space against plain definitions: kernels, convolutions, carried states and steps, accuracy at length."""

import math

import pytest
import torch
from torch import Tensor

from gss.ops import reference
from gss.ops.state_space import (
    carried_output,
    convolve,
    discretize,
    eigenvalues,
    fft_length,
    final_state,
    kernel,
    step,
    transition,
)  # fmt: skip
from tests.comparing import assert_close, relative_error


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
@pytest.mark.parametrize("imaginary", ["exp", "plain"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("length", [1, 2, 97])
def test_kernels_match_the_reference(method: str, imaginary: str, per_channel: bool, length: int) -> None:
    log_decay, frequency = torch.randn(2, 6).requires_grad_()
    readout = torch.randn(4, 6, dtype=torch.complex128, requires_grad=True)
    log_step = torch.empty(4).uniform_(-5, -1).requires_grad_() if per_channel else None
    inputs = [t for t in (log_decay, frequency, readout, log_step) if t is not None]
    inputs = [t.retain_grad() or t for t in inputs]

    width = 1.0 if log_step is None else log_step.double().exp().unsqueeze(-1)
    plain = reference.eigenvalues(log_decay, frequency, imaginary)
    expected = reference.kernel(readout, plain, length, method, width)
    log_a, drive = discretize(eigenvalues(log_decay, frequency, imaginary), log_step, method)
    actual = kernel(readout * drive, log_a, length)

    assert_close(actual, expected, inputs, 1e-12, 1e-6)  # the parameters themselves are float32


@pytest.mark.parametrize(("method", "singular"), [("zoh", 0.0), ("bilinear", -2.0)])
@pytest.mark.parametrize("log_step", [None, torch.zeros(4)])
def test_the_limit_where_a_formula_divides_by_zero(method: str, singular: float, log_step: Tensor | None) -> None:
    """λ = 0 under zero-order hold, where B̄ is Δ; λΔ = −2 under the bilinear transform, where Ā is 0."""
    at, beside = (torch.full((3,), value, dtype=torch.complex128) for value in (singular, singular + 1e-7))
    readout = torch.randn(4, 3, dtype=torch.complex128)
    results = []
    for eigenvalue in (at, beside):
        eigenvalue.requires_grad_()
        log_a, drive = discretize(eigenvalue, log_step, method)
        taps = kernel(readout * drive, log_a, 40)
        (gradient,) = torch.autograd.grad(taps[:, :1].sum(), eigenvalue)
        results.append((taps, gradient))
    (taps, gradient), (expected, expected_gradient) = results
    assert relative_error(taps, expected) < 1e-5
    assert relative_error(gradient, expected_gradient) < 1e-5


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_accurate_at_65536_in_float32(method: str) -> None:
    """Slow modes, time constants of 10⁵ to 10⁶ tokens, imaginary parts up to e³: within 1e-5 of float64."""
    modes, channels, length = 256, 8, 65_536
    log_decay = torch.empty(modes).uniform_(math.log(1e-6), math.log(1e-5))
    frequency = torch.empty(modes).uniform_(-3, 3)
    frequency[-1] = 3.0
    weights = torch.randn(channels, modes, dtype=torch.complex64)
    log_a, drive = discretize(eigenvalues(log_decay, frequency, "exp"), None, method)
    actual = kernel((weights * drive).to(torch.complex64), log_a, length)
    assert actual.dtype == torch.float32

    powers, exact_drive = reference.discretize(reference.eigenvalues(log_decay, frequency), 1.0, method)
    exact_weights = weights.to(torch.complex128) * exact_drive
    error = largest = 0.0
    for start in range(0, length, 4096):
        exact = (exact_weights @ powers.unsqueeze(-1) ** torch.arange(start, start + 4096)).real
        error = max(error, (actual[:, start : start + 4096] - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    assert error / largest < 1e-5
    assert (transition(log_a[0] * (length - 1), torch.complex64) - powers ** (length - 1)).abs().max() < 1e-6


@pytest.mark.parametrize("length", [1, 2, 3, 7, 17, 64, 97, 127, 331])
@pytest.mark.parametrize("batch", [1, 3])
def test_convolutions_match_the_reference(batch: int, length: int) -> None:
    signal = torch.randn(batch, length, 5, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(5, length, dtype=torch.float64, requires_grad=True)
    assert_close(convolve(signal, taps), reference.convolve(signal, taps), (signal, taps), 1e-12, 1e-12)


def test_is_causal_to_rounding() -> None:
    signal, taps = torch.randn(1, 100, 3), torch.randn(3, 100)
    changed = signal.clone()
    changed[:, 60:] = torch.randn(1, 40, 3)
    assert (convolve(signal, taps) - convolve(changed, taps))[:, :60].abs().max() < 1e-5


def test_gradients_in_float32_at_a_long_prime_length() -> None:
    signal, taps = torch.randn(2, 9973, 3), torch.randn(3, 9973) / 100
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = signal.to(dtype).requires_grad_(), taps.to(dtype).requires_grad_()
        output = convolve(*inputs)
        results.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    for single, double in zip(*results, strict=True):
        assert relative_error(single, double) < 1e-5


def test_fft_length_is_the_least_smooth_even_size() -> None:
    def smooth(number: int) -> bool:
        for prime in (2, 3, 5):
            while number % prime == 0:
                number //= prime
        return number == 1

    for least in [*range(1, 400), 8191, 65_537, 131_071, 131_073]:
        expected = next(n for n in range(least, 4 * least + 4) if n % 2 == 0 and smooth(n))
        assert fft_length(least) == expected


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
