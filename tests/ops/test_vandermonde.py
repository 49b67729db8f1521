"""The two Vandermonde products against their definitions, outputs and gradients."""

import pytest
import torch

from gss.ops.vandermonde import evaluate, exponential_by_parts, powers, project
from tests.comparing import assert_close, relative_error

LENGTHS = (1, 2, 3, 17, 64, 101, 1021)
SHAPES = [(1, 1), (1, 7), (5, 1), (5, 3)]  # groups, rows


def draw(groups: int, rows: int, modes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.randn(groups, rows, modes, dtype=torch.complex128, requires_grad=True)
    decay, frequency = torch.rand(2, groups, modes, dtype=torch.float64)
    return weights, torch.complex(-decay / 20, 6 * frequency).requires_grad_()


def vandermonde(log_a: torch.Tensor, length: int) -> torch.Tensor:
    return torch.exp(log_a.unsqueeze(-1) * torch.arange(length))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("groups", "rows"), SHAPES)
def test_evaluate(groups: int, rows: int, length: int) -> None:
    weights, log_a = draw(groups, rows)
    expected = (weights @ vandermonde(log_a, length)).real
    assert_close(evaluate(weights, log_a, length), expected, (weights, log_a), 1e-12, 1e-11)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("groups", "rows"), SHAPES)
def test_project(groups: int, rows: int, length: int) -> None:
    _, log_a = draw(groups, rows)
    values = torch.randn(groups, rows, length, dtype=torch.float64, requires_grad=True)
    expected = values.to(torch.complex128) @ vandermonde(log_a, length).transpose(-1, -2)
    actual = project(values, log_a)
    assert relative_error(actual, expected) < 1e-12
    gradient = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, (values, log_a), gradient)
    for mine, plain in zip(torch.autograd.grad(actual, (values, log_a), gradient), expected_gradients, strict=True):
        if length == 1:  # a^0 does not depend on a
            assert (mine - plain).abs().max() < 1e-12
        else:
            assert relative_error(mine, plain) < 1e-11


def test_groups_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, log_a = draw(5, 3)
    whole = evaluate(weights, log_a, 101), project(torch.ones(5, 3, 101, dtype=torch.float64), log_a)
    monkeypatch.setattr("gss.ops.vandermonde._TABLE_BUDGET", 1)
    parts = evaluate(weights, log_a, 101), project(torch.ones(5, 3, 101, dtype=torch.float64), log_a)
    for one, many in zip(parts, whole, strict=True):
        assert relative_error(one, many) < 1e-14


def test_powers_keep_their_phase_in_float32() -> None:
    log_a = torch.complex(torch.full((1, 4), -1e-6), torch.tensor([[0.1, 3.0, 20.0, 5e3]])).to(torch.complex128)
    count = 70_001
    assert (powers(log_a, count, torch.float32) - vandermonde(log_a, count)).abs().max() < 1e-6


def test_exponentials_by_parts() -> None:
    """Values and gradients of `torch.exp`, also where they are next to nothing."""
    z = torch.complex(-torch.logspace(-6, 3, 40, dtype=torch.float64), torch.linspace(-1e5, 1e5, 40).double())
    found = []
    for function in (exponential_by_parts, torch.exp):
        leaf = z.clone().requires_grad_()
        value = function(leaf)
        found.append(torch.stack([value.detach(), *torch.autograd.grad(value.real.sum() + 2 * value.imag.sum(), leaf)]))
    assert torch.allclose(*found, rtol=1e-13, atol=0)
