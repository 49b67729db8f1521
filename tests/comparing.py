"""How close two tensors are, in one place."""

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; NaN compares as infinitely far."""
    assert actual.shape == expected.shape
    actual, expected = (
        torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (actual.detach(), expected.detach())
    )
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    return float("inf") if torch.isnan(error) else error.item()
