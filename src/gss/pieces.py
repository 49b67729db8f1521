"""Exact gradients through sequences of any length, in the memory of one piece.

A sequence is first read piece by piece without a graph, keeping only the states between pieces. Then the pieces run
again with gradients, the last one first. Each passes the gradient with respect to its initial state to the piece before
it, as the gradient of that piece's final state. Unlike in truncated back-propagation, nothing is cut off. It costs a
second forward pass of every piece but the last, without the head: about a third more work.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gss.loss import next_token_loss
from gss.model import LanguageModel
from gss.nn.context import Context
from gss.nn.state import ModelState, state_dtype

_Gradients = dict[str, Tensor]
"""With respect to a state's tensors, by their names in `ModelState.named`."""


class Rows(NamedTuple):
    """What is learned from, [B, L] each."""

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    """Which targets count."""
    starts: Tensor | None = None
    """The first tokens of packed documents, which are read in one piece."""
    context: Context | None = None
    """The ranks among which each piece is divided; all of them have these same rows."""

    def split(self, length: int) -> list["Rows"]:
        """The rows cut into pieces of `length` tokens; the last may be shorter."""
        if self.starts is not None:
            return [self]
        cuts = zip(*(each.split(length, dim=1) for each in self[:3]), strict=True)
        return [Rows(*cut)._replace(context=self.context) for cut in cuts]


class LossModule(nn.Module):
    """Tokens and targets in, the summed loss out: one module, so that DDP sees the whole of forward and loss."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Rows, state: ModelState | None, keep: bool) -> tuple[Tensor, ModelState | None]:
        """The summed loss of the counted targets, and the state after the tokens if it is to be kept."""
        hidden, after = self.model.hidden(rows.tokens, state, keep, rows.starts, rows.context)
        targets, mask = (rows.context.own(each) if rows.context else each for each in (rows.targets, rows.mask))
        head, weight = self.model.logits, self.model.embedding.weight
        return next_token_loss(head, weight, hidden, targets, mask, scale=self.model.head_scale), after


def backward(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    piece_tokens: int,
    state: ModelState | None = None,
    keep_state: bool = False,
    count: Tensor | float | None = None,
    starts: Tensor | None = None,
    context: Context | None = None,
) -> tuple[Tensor, ModelState | None]:
    """The next-token loss of tokens [B, L] and, added to every parameter's `grad`, its gradients: in the memory of
    `piece_tokens` tokens of each row and of the L ÷ `piece_tokens` states between pieces.

    mask          [B, L], which targets count (None: all)
    state         the state that the rows continue from; its tensors get gradients too, where they require them
    keep_state    whether to return the state after the tokens, detached; otherwise None is returned
    count         what the summed loss is divided by (None: the number of targets that count)
    starts        [B, L], the first tokens of documents in packed rows, which are read in one piece, without a state
    context       the ranks among which each piece is divided. All of them give the same rows; the loss and the
                  gradients are then each rank's part, which add up to the whole

    Any size of pieces gives the same but for rounding, and for what dropout draws. Autocast is the caller's, around
    this call. In a model with attention to everything the states grow with what has been read, and all of them with
    the square of L ÷ `piece_tokens`: there is little to be gained.

    >>> model = gss.build_model(gss.preset("gss-tiny"))
    >>> loss, _ = pieces.backward(model, tokens[:, :-1], tokens[:, 1:], piece_tokens=8)
    >>> torch.optim.AdamW(model.parameters()).step()
    """
    if piece_tokens < 1:
        raise ValueError(f"piece_tokens must be at least 1, not {piece_tokens!r}")
    model.check_tokens(tokens, wait=False)
    mask = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    if targets.shape != tokens.shape or mask.shape != tokens.shape:
        raise ValueError(
            f"targets {list(targets.shape)} and mask {list(mask.shape)} must have the tokens' shape, "
            f"{list(tokens.shape)}"
        )
    if count is None:
        count = mask.sum().clamp(min=1).to(state_dtype(model.embedding.weight.dtype))
    pieces = Rows(tokens, targets, mask, starts, context).split(piece_tokens)
    loss, after = accumulate(LossModule(model), model, pieces, state, keep_state, 1 / count)
    return loss / count, after


def accumulate(
    module: nn.Module,
    model: LanguageModel,
    pieces: list[Rows],
    state: ModelState | None,
    keep_state: bool,
    scale: Tensor | float,
    around: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
) -> tuple[Tensor, ModelState | None]:
    """Back-propagate `scale` times the summed loss of rows in pieces; returns that sum and the state after them.

    `module` is the model's `LossModule`, or what a strategy of several processes made of it. Forward and backward of
    every piece run in `around`, which is told whether they are the last.
    """
    several = len(pieces) > 1
    device = model.embedding.weight.device
    seed = int(torch.randint(2**62, ())) if several else None
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=several):
        before = [state, *_states_before(model, pieces, state, seed)]
        losses: list[Tensor] = []
        received: _Gradients = {}
        for i in reversed(range(len(pieces))):
            came_from, last = before.pop(), i == len(pieces) - 1
            if i and came_from is not None:  # the start of a graph, whose tensors receive gradients
                came_from = came_from.map(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
            with around(i == 0):
                _draw_as(seed, i)
                loss, left = _back(module, pieces[i], came_from, keep_state or not last, scale, received)
            losses.append(loss)
            if last:
                after = left and left.map(_own)
            if i and came_from is not None:
                received = {name: leaf.grad for name, leaf in came_from.named().items() if leaf.grad is not None}
    return torch.stack(losses).sum(), after


def _back(
    module: nn.Module,
    piece: Rows,
    state: ModelState | None,
    keep_state: bool,
    scale: Tensor | float,
    received: _Gradients,
) -> tuple[Tensor, ModelState | None]:
    """Forward and backward of one piece; `received` are the gradients with respect to the state that it leaves."""
    loss, after = module(piece, state, keep_state)
    torch.clear_autocast_cache()
    left = after.named() if after is not None else {}
    outputs = {name: left[name] for name in received if left[name].requires_grad}
    gradients = [torch.as_tensor(scale, dtype=loss.dtype, device=loss.device), *(received[name] for name in outputs)]
    with torch.autocast(loss.device.type, enabled=False):
        torch.autograd.backward([loss, *outputs.values()], gradients)
    return loss.detach(), after and after.detach()


@torch.no_grad()
def _states_before(
    model: LanguageModel, pieces: list[Rows], state: ModelState | None, seed: int | None
) -> list[ModelState]:
    """The states that all pieces but the first continue from."""
    states: list[ModelState] = []
    for i, piece in enumerate(pieces[:-1]):
        _draw_as(seed, i)
        _, state = model.hidden(piece.tokens, state, context=piece.context)
        assert state is not None
        state = state.map(_own)
        states.append(state)
        # Autocast would reuse the casts of weights that were made here, which have no gradient.
        torch.clear_autocast_cache()
    return states


def _draw_as(seed: int | None, piece: int) -> None:
    """Both runs of a piece draw the same random numbers (dropout's)."""
    if seed is not None:
        torch.manual_seed(seed + piece)


def _own(tensor: Tensor) -> Tensor:
    """The values alone: without the graph, and without the rest of a piece's memory that they may be a view of."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
