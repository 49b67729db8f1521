"""Reading one token after another, fast: what generation and serving run on.

Exactly the model's own answers (the same state in, the same logits and state out), with parameters prepared once,
caches written in place, and state spaces that touch their states once in a block of tokens.
"""

import torch
from torch import Tensor

from gss.model import LanguageModel
from gss.nn.state import ModelState

BLOCK = 64
"""Tokens between two foldings of a block into the state; any number is exact."""


class Decoder:
    """A model that goes on from a state, a token of each row at a time; no gradients.

    >>> logits, state = gss.generate.read(model, prompt)
    >>> decoder = Decoder(model, state)
    >>> logits = decoder.step(logits.argmax(-1))         # [B] → [B, V]
    >>> state = decoder.state()                          # at any time: a value to keep, branch or join
    """

    @torch.no_grad()
    def __init__(self, model: LanguageModel, state: ModelState, block: int = BLOCK) -> None:
        if block < 1:
            raise ValueError(f"a block has at least 1 token, not {block}")
        model.check_state(state, state.batch)
        self._model = model
        self._position = state.position
        layers = zip(model.sequence_layers(), state.layers, strict=True)
        self._steppers = [layer.stepper(held, block) for layer, held in layers]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the next token of each row, [B]."""
        x = self._model.embed(tokens.unsqueeze(1), self._position.unsqueeze(1))
        for stepper in self._steppers:
            x = stepper.step(x)
        self._position = self._position + 1
        return self._model.logits(self._model.norm(x[:, 0]))

    @torch.no_grad()
    def state(self) -> ModelState:
        """The state after what has been read."""
        return ModelState(self._position, tuple(stepper.state() for stepper in self._steppers))
