"""FFT convolution against the definition, at lengths that no FFT likes too."""

import pytest
import torch

from gss.ops import reference
from gss.ops.state_space import convolve, fft_length
from tests.comparing import relative_error


@pytest.mark.parametrize("length", [1, 2, 3, 7, 17, 64, 97, 127, 331])
@pytest.mark.parametrize("batch", [1, 3])
def test_matches_reference(batch: int, length: int) -> None:
    signal = torch.randn(batch, length, 5, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(5, length, dtype=torch.float64, requires_grad=True)
    actual, expected = convolve(signal, kernel), reference.convolve(signal, kernel)
    assert relative_error(actual, expected) < 1e-12
    gradient = torch.randn_like(expected)
    mine = torch.autograd.grad(actual, (signal, kernel), gradient)
    for ours, plain in zip(mine, torch.autograd.grad(expected, (signal, kernel), gradient), strict=True):
        assert relative_error(ours, plain) < 1e-12


def test_is_causal_to_rounding() -> None:
    signal, kernel = torch.randn(1, 100, 3), torch.randn(3, 100)
    changed = signal.clone()
    changed[:, 60:] = torch.randn(1, 40, 3)
    assert (convolve(signal, kernel) - convolve(changed, kernel))[:, :60].abs().max() < 1e-5


def test_gradients_in_float32_at_a_long_prime_length() -> None:
    signal, kernel = torch.randn(2, 9973, 3), torch.randn(3, 9973) / 100
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = signal.to(dtype).requires_grad_(), kernel.to(dtype).requires_grad_()
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
