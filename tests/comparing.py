"""How close tensors, gradients and states are; running a model in pieces; token ids that continue a prompt."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gss import decode
from gss.model import LanguageModel
from gss.nn.state import ModelState


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; NaN compares as infinitely far."""
    assert actual.shape == expected.shape
    actual, expected = (
        torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (actual.detach(), expected.detach())
    )
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    return float("inf") if torch.isnan(error) else error.item()


def assert_close(actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], error: float, gradients: float) -> None:
    """Two results, then the gradients of a random function of them with respect to the same inputs."""
    assert relative_error(actual, expected) < error
    weights = torch.randn_like(expected)
    found = torch.autograd.grad(actual, inputs, weights)
    for ours, plain in zip(found, torch.autograd.grad(expected, inputs, weights), strict=True):
        assert relative_error(ours, plain) < gradients


def assert_equal(state: ModelState, expected: ModelState) -> None:
    """Every number of two states."""
    for layer, other in zip(state.layers, expected.layers, strict=True):
        assert layer.keys() == other.keys()
        assert all(torch.equal(layer[name], other[name]) for name in layer)


def run(model: LanguageModel, tokens: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    """Logits, and the gradient of a fixed random function of them for every parameter, from pieces of these sizes."""
    (result,) = run_prefixes(model, tokens, sizes, [len(sizes)])
    return result


def run_prefixes(
    model: LanguageModel, tokens: Tensor, sizes: list[int], counts: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """What `run` gives for the first pieces alone, for each of these counts of them; the pieces are read once."""
    state, logits = None, []
    for piece in tokens.split(sizes, dim=1):
        output, state = model(piece, state)
        logits.append(output)
    parameters = dict(model.named_parameters())
    for count in counts:
        whole = torch.cat(logits[:count], dim=1)
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss = (whole * weights.to(whole)).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=count != counts[-1])
        yield {"logits": whole.detach(), **dict(zip(parameters, gradients, strict=True))}


def stream(
    model: LanguageModel, prompt: Sequence[int], precision: str = "auto", speculate: bool = True, **options: Any
) -> Iterator[int]:
    """Token ids that continue a prompt; options are those of `gss.decode.Request`."""
    for output in decode.stream(model, [decode.Request(prompt=prompt, **options)], precision, speculate):
        yield from output.tokens
