"""The chunked loss is the plain cross-entropy, and never holds more than its share of logits."""

import pytest
import torch
import torch.nn.functional as F

from gss.loss import next_token_loss
from tests.comparing import assert_close

VOCABULARY, WIDTH = 37, 8


def _case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(3, 11, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (3, 11))
    mask = torch.rand(3, 11) < 0.7
    return weight, hidden, targets, mask


def _plain(weight: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.T
    losses = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none")
    return losses[mask.reshape(-1)].sum()


@pytest.mark.parametrize("rows", [1, 4, 5, 33, 100])
def test_equals_plain_cross_entropy_with_gradients(rows: int) -> None:
    weight, hidden, targets, mask = _case()
    loss = next_token_loss(lambda x: x @ weight.T, weight, hidden, targets, mask, rows * VOCABULARY)
    assert loss.dtype == torch.float64
    assert_close(loss, _plain(weight, hidden, targets, mask), (weight, hidden), 1e-13, 1e-12)


def test_a_head_that_is_not_trained() -> None:
    weight, hidden, targets, mask = _case(2)
    frozen = weight.detach()
    loss = next_token_loss(lambda x: x @ frozen.T, frozen, hidden, targets, mask, 4 * VOCABULARY)
    assert_close(loss, _plain(frozen, hidden, targets, mask), [hidden], 1e-13, 1e-12)


def test_the_same_without_gradients() -> None:
    weight, hidden, targets, mask = _case(1)
    with torch.no_grad():
        loss = next_token_loss(lambda x: x @ weight.T, weight, hidden, targets, mask, 4 * VOCABULARY)
    assert not loss.requires_grad
    assert torch.allclose(loss, _plain(weight, hidden, targets, mask), rtol=1e-13, atol=0)


@pytest.mark.parametrize("gradients", [True, False])
def test_never_more_logits_than_asked_for(gradients: bool) -> None:
    weight, hidden, targets, mask = _case()
    sizes = []

    def head(x: torch.Tensor) -> torch.Tensor:
        logits = x @ weight.T
        sizes.append(logits.numel())
        return logits

    with torch.set_grad_enabled(gradients):
        next_token_loss(head, weight, hidden, targets, mask, 6 * VOCABULARY)
    assert max(sizes) == 6 * VOCABULARY
    assert sum(sizes) == 33 * VOCABULARY  # nothing is computed twice


def test_no_logits_for_what_does_not_count_where_few_do() -> None:
    weight, hidden, targets, _ = _case()
    mask = torch.zeros(3, 11, dtype=torch.bool)
    mask[0, 3] = mask[2, 10] = True
    sizes = []

    def head(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x @ weight.T

    loss = next_token_loss(head, weight, hidden, targets, mask)
    assert sizes == [2]
    assert_close(loss, _plain(weight, hidden, targets, mask), (weight, hidden), 1e-13, 1e-12)


def test_nothing_counted_is_zero_with_zero_gradients() -> None:
    weight, hidden, targets, mask = _case()
    loss = next_token_loss(lambda x: x @ weight.T, weight, hidden, targets, torch.zeros_like(mask))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0


def test_uncounted_targets_may_be_anything() -> None:
    weight, hidden, targets, mask = _case()
    other = torch.where(mask, targets, 10**9)
    losses = [next_token_loss(lambda x: x @ weight.T, weight, hidden, ids, mask) for ids in (targets, other)]
    assert losses[0] == losses[1]


def test_bf16_autocast_keeps_the_loss_in_float32() -> None:
    weight, hidden, targets, mask = _case()
    weight, hidden = (t.detach().float().requires_grad_() for t in (weight, hidden))
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(lambda x: F.linear(x, weight), weight, hidden, targets, mask, 4 * VOCABULARY)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert torch.allclose(loss, _plain(weight, hidden, targets, mask), rtol=0.02)
    half = weight.bfloat16()
    assert next_token_loss(lambda x: x @ half.T, half, hidden.bfloat16(), targets, mask).dtype == torch.float32


def test_a_head_whose_gradient_needs_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the gradient takes the place of the logits: a soft-capped head must not be trained on it."""
    pytest.importorskip("triton")
    monkeypatch.setattr("gss.ops.fast.usable", lambda device: True)
    weight, hidden, targets, mask = _case()
    weight, hidden = (t.detach().float().requires_grad_() for t in (weight, hidden))
    loss = next_token_loss(lambda x: x @ weight.T, weight, hidden, targets, mask)
    assert_close(loss, _plain(weight, hidden, targets, mask), (weight, hidden), 1e-5, 1e-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        next_token_loss(lambda x: torch.tanh(x @ weight.T), weight, hidden, targets, mask)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight, hidden, targets, mask = _case()
    with pytest.raises(ValueError, match="must have the activations' shape"):
        next_token_loss(lambda x: x @ weight.T, weight, hidden, targets[:, 1:], mask)
