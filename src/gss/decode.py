"""Reading one token after another, fast: what generation and serving run on.

Exactly the model's own answers (the same state in, the same logits and state out), with parameters prepared once,
caches written in place, and state spaces that touch their states once in a block of tokens. Sequences may join and
leave between steps, at the cost of what they themselves hold. `decoder` picks the fastest that fits: on a GPU, in
reduced precision, a GSS model, pure or hybrid, runs as one CUDA graph.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gss.model import LanguageModel
from gss.nn.state import ModelState
from gss.ops import fast
from gss.ops.few_rows import MOST_ROWS, FewRows

if TYPE_CHECKING:
    from gss.graph_decode import GraphDecoder

BLOCK = 64
"""Tokens between two foldings of a block into the state; any number is exact."""

# Parameters from which a step is bound by reading them, so that `FewRows` pays for itself.
_MANY_PARAMETERS = 1 << 22


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
        on_cpu = model.embedding.weight.device.type == "cpu"
        self._memory_bound = on_cpu and sum(p.numel() for p in model.parameters()) > _MANY_PARAMETERS

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the next token of each row, [B]."""
        few = self._memory_bound and len(tokens) <= MOST_ROWS and not torch.is_autocast_enabled("cpu")
        with FewRows() if few else nullcontext():
            x = self._model.embed(tokens.unsqueeze(1), self._position.unsqueeze(1))
            for stepper in self._steppers:
                x = stepper.step(x)
            self._position = self._position + 1
            return self._model.logits(self._model.norm(x[:, 0]))

    @torch.no_grad()
    def state(self) -> ModelState:
        """The state after what has been read."""
        return ModelState(self._position, tuple(stepper.state() for stepper in self._steppers))

    @torch.no_grad()
    def join(self, state: ModelState) -> None:
        """Add the sequences of a state after those that are there, each at its own position."""
        self._model.check_state(state, state.batch)
        self._position = torch.cat([self._position, state.position])
        for stepper, held in zip(self._steppers, state.layers, strict=True):
            stepper.join(held)

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order (none is fine, until others join).

        Rows that stay where they are cost nothing: to take row i out, put the last one in its place.
        """
        self._position = self._position[list(rows)]
        for stepper in self._steppers:
            stepper.keep(rows)


def decoder(model: LanguageModel, state: ModelState, block: int = BLOCK) -> "Decoder | GraphDecoder":
    """The fastest decoder that goes on from a state with the model's own answers, to the precision asked for.

    A `GraphDecoder` where GPU kernels can run, the model is of parts that they have and bfloat16 is asked for, by
    autocast around this call or by the model's parameters; else a `Decoder`.
    """
    if fast.usable(model.embedding.weight.device):
        from gss import graph_decode

        if graph_decode.reduced_precision(model) and graph_decode.supports(model, block):
            return graph_decode.GraphDecoder(model, state, block)
    return Decoder(model, state, block)
