"""Padded batches, read as if every row were alone.

Our models have no attention mask: a row consists of its real tokens. If no state is kept, rows are shifted to the left
and read together; since models are causal, padding after a row's end has no effect on it. If a state is kept, rows with
the same extent are read together and their states joined, since a state must end at the row's last real token. Knows
nothing of `transformers`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gss.model import LanguageModel
from gss.nn.state import ModelState


def extents(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The start and number of real tokens in each row [B, L]; refuses masks with holes."""
    real = mask != 0
    count = real.sum(1)
    first = real.long().argmax(1)
    column = torch.arange(mask.shape[1], device=mask.device)
    expected = (column >= first.unsqueeze(1)) & (column < (first + count).unsqueeze(1))
    if not torch.equal(real, expected):
        raise ValueError(
            "the attention mask has holes: a row's real tokens must stand together, with padding before or after them"
        )
    return first, count


def read_padded(
    model: LanguageModel, tokens: Tensor, mask: Tensor, state: ModelState | None, keep_state: bool
) -> tuple[Tensor, ModelState | None]:
    """The activations [B, L, E] of real tokens in place (those of padding mean nothing), and the state after them."""
    first, count = extents(mask)
    if state is None and not keep_state:
        column = torch.arange(tokens.shape[1], device=tokens.device)
        to_left, back = ((column + way * first.unsqueeze(1)) % tokens.shape[1] for way in (1, -1))
        hidden, _ = model.hidden(tokens.gather(1, to_left), keep_state=False)
        return hidden.gather(1, back.unsqueeze(-1).expand_as(hidden)), None
    if bool((count == tokens.shape[1]).all()):
        return model.hidden(tokens, state, keep_state)
    return _grouped(model, tokens, first, count, state)


def _grouped(
    model: LanguageModel, tokens: Tensor, first: Tensor, count: Tensor, state: ModelState | None
) -> tuple[Tensor, ModelState]:
    groups: dict[tuple[int, int], list[int]] = {}
    for row, extent in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
        groups.setdefault(extent, []).append(row)
    before = model.initial_state(tokens.shape[0]) if state is None else state
    parts, states, order = [], [], []
    for (start, size), rows in groups.items():
        after = before.select(rows)
        if size:
            # Without a state the rows are read in parallel, without the cost of carrying one.
            hidden, read = model.hidden(tokens[rows, start : start + size], None if state is None else after)
            assert read is not None
            after = read
        else:  # nothing of these rows in this piece
            hidden = model.embedding.weight.new_zeros(len(rows), 0, model.config.width)
        parts.append(F.pad(hidden, (0, 0, start, tokens.shape[1] - start - size)))
        states.append(after)
        order += rows
    back = torch.argsort(torch.tensor(order, device=tokens.device))
    return torch.cat(parts)[back], ModelState.join(states).select(back)
