"""Gradients through pieces are those of the whole, in the memory of one."""

import pytest
import torch
from torch import Tensor

import gss
from experiments.memory import peak_bytes
from gss import pieces
from gss.model import LanguageModel
from tests.comparing import relative_error
from tests.conftest import ALL_FAMILIES, SLIDING, small_config

LENGTH = 29  # between three and four windows or chunks


def _model(family: str, **overrides: object) -> LanguageModel:
    chunks = {"attention.chunk": 8} if family == "gss-hybrid" else {}
    return gss.build_model(small_config(family, **chunks, **overrides)).double()


def _given(model: LanguageModel) -> tuple[Tensor, Tensor, Tensor, gss.ModelState]:
    """Tokens, targets, a mask and a carried state of two rows, each at its own position."""
    tokens = torch.randint(0, 61, (2, LENGTH + 1))
    states = [model(torch.randint(0, 61, (1, read)))[1] for read in (11, 26)]
    state = gss.ModelState.join([state for state in states if state is not None])
    leaf = state.map(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
    return tokens[:, :-1], tokens[:, 1:], torch.rand(2, LENGTH) < 0.8, leaf


def _gradients(model: LanguageModel, state: gss.ModelState | None) -> dict[str, Tensor]:
    """Of every parameter and of the state, taken away from them."""
    named = {**dict(model.named_parameters()), **(state.named() if state else {})}
    found = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
    for tensor in named.values():
        tensor.grad = None
    return found


def _whole(
    model: LanguageModel, tokens: Tensor, targets: Tensor, mask: Tensor, state: gss.ModelState | None
) -> tuple[Tensor, dict[str, Tensor], gss.ModelState]:
    logits, after = model(tokens, state)
    loss = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    with torch.autocast("cpu", enabled=False):
        loss.backward()
    assert after is not None
    return loss, _gradients(model, state), after


@pytest.mark.parametrize(("carried", "sizes"), [(False, (8, 50)), (True, (1, 9, 28))], ids=["new", "carried"])
@pytest.mark.parametrize("family", [*ALL_FAMILIES, SLIDING])
def test_pieces_give_the_loss_and_gradients_of_the_whole(family: str, carried: bool, sizes: tuple[int, ...]) -> None:
    model = _model(family)
    tokens, targets, mask, state = _given(model)
    before = state if carried else None
    loss, gradients, after = _whole(model, tokens, targets, mask, before)
    assert gradients.keys() >= dict(model.named_parameters()).keys()
    following = model(tokens, after)[0]
    for size in sizes:
        given = {"piece_tokens": size, "state": before, "keep_state": True}
        found, left = pieces.backward(model, tokens, targets, mask, **given)
        assert relative_error(found, loss) <= 1e-10
        mine = _gradients(model, before)
        assert mine.keys() == gradients.keys()
        errors = {name: relative_error(mine[name], gradients[name]) for name in gradients}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= 1e-10, f"{worst} differs by {errors[worst]:.1e} in pieces of {size}"
        assert left is not None
        assert not any(tensor.requires_grad for tensor in left.named().values())
        assert relative_error(model(tokens, left)[0], following) <= 1e-10


def test_parameters_that_are_not_trained_stay_out_of_it() -> None:
    """A state that nothing trained went into needs no gradient."""
    model = _model("gss-hybrid")
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    tokens, targets, mask, _ = _given(model)
    _, gradients, _ = _whole(model, tokens, targets, mask, None)
    pieces.backward(model, tokens, targets, mask, piece_tokens=10)
    mine = _gradients(model, None)
    assert mine.keys() == gradients.keys()
    assert all(relative_error(mine[name], gradients[name]) <= 1e-10 for name in gradients)


def test_both_runs_of_a_piece_drop_the_same_activations() -> None:
    """Then the gradient is the slope of the loss that the same seed gives, along any direction."""
    model = _model("rec-fixed-skip", dropout=0.3)
    tokens, targets, mask, _ = _given(model)
    dropped: list[Tensor] = []
    dropout = model.get_submodule("layers.0.block.feedforward.dropout")
    hook = dropout.register_forward_hook(lambda _, __, output: dropped.append(output == 0))
    pieces.backward(model, tokens, targets, mask, piece_tokens=9)
    hook.remove()
    _gradients(model, None)
    first, second, third, _, *again = dropped  # three are run for their states, then all from the last one on
    assert all(torch.equal(*pair) for pair in zip((first, second, third), reversed(again), strict=True))
    assert not torch.equal(first, second)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return pieces.backward(model, tokens, targets, mask, piece_tokens=9)[0].item()

    base = loss(0)
    gradients = _gradients(model, None)
    direction = {name: torch.randn_like(gradient) for name, gradient in gradients.items()}
    slope = sum((gradients[name] * direction[name]).sum().item() for name in gradients)
    moved = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += step * direction[name]
        moved.append(loss(0))
    assert (moved[0] - moved[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)
    assert loss(1) != pytest.approx(base, rel=1e-3)
    again = {pieces.backward(model, tokens, targets, piece_tokens=9)[0].item() for _ in range(2)}
    assert len(again) == 2  # each call draws anew


@pytest.mark.parametrize("family", ["gss-hybrid", "gss2", SLIDING])
def test_autocast_has_gradients_of_every_weight(family: str) -> None:
    """Casts of weights made without a graph must not be used with one: the error is that of rounding alone."""
    model = _model(family).float()
    tokens, targets, mask, _ = _given(model)
    expected, exact, _ = _whole(model, tokens, targets, mask, None)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded, _ = _whole(model, tokens, targets, mask, None)
        found, _ = pieces.backward(model, tokens, targets, mask, piece_tokens=10)
    assert relative_error(found, expected) < 0.01
    mine = _gradients(model, None)
    assert mine.keys() == exact.keys()
    for name, gradient in exact.items():
        assert relative_error(mine[name], gradient) < 3 * (relative_error(rounded[name], gradient) + 0.02), name


def test_what_does_not_fit_together_is_refused() -> None:
    model = _model("gss")
    tokens, targets, mask, _ = _given(model)
    with pytest.raises(ValueError, match="piece_tokens must be at least 1, not 0"):
        pieces.backward(model, tokens, targets, mask, piece_tokens=0)
    with pytest.raises(ValueError, match=r"targets \[2, 28\] and mask .* must have the tokens' shape"):
        pieces.backward(model, tokens, targets[:, 1:], mask, piece_tokens=8)


def _learn(length: int, piece_tokens: int) -> object:
    """A function that back-propagates through one sequence, after a sixteenth of it has been."""
    torch.manual_seed(0)
    model = gss.build_model(small_config("gss2"))  # parts of whose states are views of a piece's activations
    tokens = torch.randint(0, 61, (1, length + 1))

    def run(length: int = length) -> None:
        loss, _ = pieces.backward(model, tokens[:, :length], tokens[:, 1 : length + 1], piece_tokens=piece_tokens)
        assert torch.isfinite(loss)

    run(length // 16)
    return run


def test_memory_does_not_grow_with_the_sequence() -> None:
    """Beyond 32 states of 3 kB, and the allocator's noise. Read whole, the sequence takes about 200 MB more."""
    assert peak_bytes(_learn, 1 << 15, 1024) < 6 * 2**20
