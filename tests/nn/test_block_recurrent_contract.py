"""Transformers on windows: whole, pieces and single tokens give one answer.

The lighter general tests of the contract run on these families too (tests/test_contract.py), documents included; here
are lengths around windows of 8, and the heavier cases at a size that suits models that run window by window.
"""

import random

import pytest
import torch

import gss
from gss.accounting import account
from tests.comparing import relative_error
from tests.conftest import WINDOW_FAMILIES, small_config
from tests.test_contract import TOLERANCE, assert_same, random_sizes, run

WINDOW = 8
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 61, 64)


def state_after(model: gss.LanguageModel, tokens: torch.Tensor, sizes: list[int]) -> dict[str, torch.Tensor]:
    state = None
    for piece in tokens.split(sizes, dim=1):
        _, state = model(piece, state)
    assert state is not None
    return {f"{i}.{name}": tensor for i, layer in enumerate(state.layers) for name, tensor in layer.items()}


def together(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All gradients as one vector: in float32 that of a scale alone may be what large terms leave of each other."""
    gradients = [tensor.flatten() for name, tensor in results.items() if name != "logits"]
    return {"logits": results["logits"], "gradients": torch.cat(gradients)}


def ways(length: int) -> dict[str, list[int]]:
    multiples = [WINDOW * n for n in (1, 3, 2)]
    left = length - sum(multiples)
    windows = [*multiples, left] if left > 0 else [*[WINDOW] * (length // WINDOW), length % WINDOW]
    return {
        "windows": [size for size in windows if size],
        "any sizes": random_sizes(length, 20, random.Random(length)),
        "tokens": [1] * length,
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_whole_pieces_steps(family: str, dtype: torch.dtype) -> None:
    """Logits, gradients of every parameter, and the state at the end."""
    model = gss.build_model(small_config(family)).to(dtype)
    for length in LENGTHS:
        tokens = torch.randint(0, 61, (2, length))
        whole, state = run(model, tokens, [length]), state_after(model, tokens, [length])
        for sizes in ways(length).values():
            pieces = run(model, tokens, sizes)
            if dtype == torch.float64:
                assert_same(pieces, whole, 1e-10)
            assert_same(together(pieces), together(whole), TOLERANCE[dtype])
            assert_same(state_after(model, tokens, sizes), state, TOLERANCE[dtype])


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_many_windows(family: str) -> None:
    model = gss.build_model(small_config(family)).double()
    tokens = torch.randint(0, 61, (1, 1021))
    sizes = [WINDOW * 40, *random_sizes(650, 200, random.Random(0)), *[1] * 51]
    assert_same(run(model, tokens, sizes), run(model, tokens, [1021]), 1e-10)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_odd_windows(family: str, window: int) -> None:
    model = gss.build_model(small_config(family, **{"attention.window": window})).double()
    tokens = torch.randint(0, 61, (2, 23))
    for sizes in ([1] * 23, [4, 1, 1, 10, 7], [5, 10, 8]):
        assert_same(run(model, tokens, sizes), run(model, tokens, [23]), 1e-10)


@pytest.mark.parametrize("family", ["rec-fixed-skip", "feedback-lstm-single"])
def test_the_recurrent_state_goes_beyond_every_window(family: str) -> None:
    """A token two stacks of windows back is seen by the recurrent model, and not by `slide` of the same depth."""
    tokens = torch.randint(0, 61, (1, 60))
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 61
    for name, reaches in ((family, True), ("slide", False)):
        model = gss.build_model(small_config(name)).double()
        difference = (model(tokens)[0] - model(changed)[0]).abs().amax(-1)[0]
        assert (difference[3 + 2 * WINDOW + 1 :].max() > 0) == reaches


@pytest.mark.parametrize("family", ["rec-fixed-skip", "feedback-fixed-skip"])
def test_gradients_reach_the_learned_start(family: str) -> None:
    model = gss.build_model(small_config(family)).double()
    tokens = torch.randint(0, 61, (2, 20))
    cell = next(layer.cell for layer in model.layers if hasattr(layer, "cell"))
    from_none = torch.autograd.grad(model(tokens)[0].square().sum(), cell.initial)[0]
    from_value = torch.autograd.grad(model(tokens, model.initial_state(2))[0].square().sum(), cell.initial)[0]
    assert from_none.norm() > 0
    assert relative_error(from_value, from_none) < 1e-12


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_a_short_piece_has_a_gradient_for_every_parameter(family: str) -> None:
    """Data-parallel training waits for all of them, also where no window ends."""
    model = gss.build_model(small_config(family))
    model(torch.randint(0, 61, (2, 5)), keep_state=False)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mixing_is_counted_by_what_is_seen() -> None:
    """Sums over tokens, written out, for one block of each kind at a length of three and a half windows."""
    length, width, window, vectors = 28, 16, WINDOW, 5
    slide = sum(min(i, window) for i in range(length)) / length
    xl = sum(i % window + (window if i >= window else 0) for i in range(length)) / length
    assert account(small_config("slide", depth=1), length).flops["mixing"] == pytest.approx(4 * width * slide, abs=1)
    assert account(small_config("xl", depth=1), length).flops["mixing"] == pytest.approx(4 * width * xl, abs=1)
    config = small_config("rec-fixed-skip", depth=1, pattern=["recurrent"])
    counted = account(config, length).flops
    reading, updating = 2 * width * width, (2 + 2) * width * width  # K, V; Q, Q2, 2E → E
    cell = vectors * (4 * 2 * reading + 3 * 2 * updating) / length  # four windows begin, three end
    update_attention = 3 * 4 * width * vectors * (vectors + 2 * window) / length
    tokens = 2 * width * (4 * width + 2 * width + 2 * 24) + 2 * 61 * width  # Q K V Q2, 2E → E, FFN, head
    mixing = 4 * width * (slide + vectors) + update_attention
    assert sum(counted.values()) == pytest.approx(tokens + cell + mixing, abs=1)
