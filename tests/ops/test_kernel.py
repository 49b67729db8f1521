"""Kernels against the reference, and the accuracy that long inputs need."""

import math

import pytest
import torch
from torch import Tensor

from gss.ops import reference
from gss.ops.state_space import discretize, eigenvalues, kernel
from tests.comparing import relative_error


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
@pytest.mark.parametrize("imaginary", ["exp", "plain"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("length", [1, 2, 97])
def test_matches_reference(method: str, imaginary: str, per_channel: bool, length: int) -> None:
    log_decay, frequency = torch.randn(2, 6).requires_grad_()
    readout = torch.randn(4, 6, dtype=torch.complex128, requires_grad=True)
    log_step = torch.empty(4).uniform_(-5, -1).requires_grad_() if per_channel else None
    inputs = [t for t in (log_decay, frequency, readout, log_step) if t is not None]
    inputs = [t.retain_grad() or t for t in inputs]

    step = 1.0 if log_step is None else log_step.double().exp().unsqueeze(-1)
    plain = reference.eigenvalues(log_decay, frequency, imaginary)
    expected = reference.kernel(readout, plain, length, method, step)
    log_a, drive = discretize(eigenvalues(log_decay, frequency, imaginary), log_step, method)
    actual = kernel(readout * drive, log_a, length)

    assert relative_error(actual, expected) < 1e-12
    gradient = torch.randn_like(expected)
    mine = torch.autograd.grad(actual, inputs, gradient)
    for actual_gradient, expected_gradient in zip(mine, torch.autograd.grad(expected, inputs, gradient), strict=True):
        assert relative_error(actual_gradient, expected_gradient) < 1e-6  # the parameters themselves are float32


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

    transition, exact_drive = reference.discretize(reference.eigenvalues(log_decay, frequency), 1.0, method)
    exact_weights = weights.to(torch.complex128) * exact_drive
    error = largest = 0.0
    for start in range(0, length, 4096):
        exact = (exact_weights @ transition.unsqueeze(-1) ** torch.arange(start, start + 4096)).real
        error = max(error, (actual[:, start : start + 4096] - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    assert error / largest < 1e-5
