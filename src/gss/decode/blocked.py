"""Decoders: they continue quickly from a state, one token of each row at a time.

A decoder gives exactly the model's own results: the same state in, the same logits and state out. It is faster because
parameters are prepared once, caches are written in place, and state spaces access their states once per block of
tokens. Each layer supplies its own plan; the decoder handles rows, blocks and the sampler. `Decoder` runs on any device
in any precision; `gss.decode.cuda.GraphDecoder` does the same as a CUDA graph. `decoder` picks the fastest that fits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gss.decode.lookup import Lookup
from gss.decode.sampler import Draw, Sampler, Settings, Work
from gss.model import LanguageModel
from gss.nn.decode_plans import replaced
from gss.nn.decoding import Block, DecodePlan
from gss.nn.quantized import packed_twin
from gss.nn.state import ModelState
from gss.ops import cpu, fast
from gss.ops.products import MOST_ROWS

BLOCK = 64
"""Tokens between two foldings of a block into the state; any number is exact."""

# The number of parameters from which a step on a CPU is bound by reading them, so that our products are faster.
_MANY_PARAMETERS = 1 << 22


class BlockedDecoder:
    """The common part of both decoders: rows that come and go, each somewhere in a block of tokens.

    A row has a next token to read; without a sampler of its own it continues greedily.
    """

    stride = 1
    """How many tokens of each row `generate` produces most cheaply."""
    speculate: bool | None = False
    """Whether rows that join draft tokens by lookup and verify several at once, if possible; None: if it pays."""
    _tokens: Tensor
    _sampler: Sampler

    def __init__(self, model: LanguageModel, block: int) -> None:
        self._model, self._block = model, Block(block)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the next token of each row, [B]."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(self, count: int, tokens: Tensor | None = None) -> Draw:
        """The `count` tokens of each row that follow its next token (which `tokens` [B] replaces, if given).

        The last of them has been drawn but not read. All tensors of the `Draw` are [count, B, …].
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        self._settle()
        if tokens is not None:
            self._set_tokens(tokens)
        work, parts = self._sampler.work, []
        while count:
            parts.append(self._advance(count, work))
            count -= len(parts[-1].tokens)
        return parts[0] if len(parts) == 1 else Draw.join(parts, torch.cat)

    def advance(self) -> Draw:
        """At least one further token of each row, and more if they cost little."""
        return self.generate(self.stride)

    def state(self) -> ModelState:
        """The state after the tokens read so far."""
        raise NotImplementedError

    @torch.no_grad()
    def join(
        self,
        state: ModelState,
        sampler: Sampler | None = None,
        tokens: Tensor | None = None,
        read: Sequence[Sequence[int]] = (),
    ) -> None:
        """Append the rows of a state, each at its own position, with their next tokens.

        `read` are the tokens that they have read, in which drafts are looked up.
        """
        self._model.check_state(state, state.batch)
        device = state.position.device
        sampler = sampler or Sampler(self._model.config.vocab_size, device, [Settings()] * state.batch)
        if tokens is None:
            tokens = torch.zeros(state.batch, dtype=torch.int64, device=device)
        self._settle()
        self._block.join(state.batch)
        self._put(state, sampler, tokens, read)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order, each once; there may be none until others join.

        Rows that stay in place cost nothing: to remove row i, put the last one in its place.
        """
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait for steps in progress, if the host does not know yet how many tokens they read."""

    def _set_tokens(self, tokens: Tensor) -> None:
        raise NotImplementedError

    def _put(self, state: ModelState, sampler: Sampler, tokens: Tensor, read: Sequence[Sequence[int]]) -> None:
        """Place the rows that have just joined the block."""
        raise NotImplementedError

    def _advance(self, count: int, work: Work) -> Draw:
        """Take some of `count` steps and return what the sampler drew."""
        raise NotImplementedError

    def _fold(self) -> None:
        """Fold a full block into every layer's state."""
        raise NotImplementedError

    def _count(self, steps: int) -> None:
        """Count `steps` tokens as read by every row; at the end of a block, begin the next."""
        self._block.read += steps
        if self._block.read == self._block.size:
            self._fold()
            self._block.begin()


class Decoder(BlockedDecoder):
    """A model that continues from a state, on any device and in any precision; no gradients.

    >>> logits, state = gss.decode.read(model, prompt)
    >>> decoder = Decoder(model, state)
    >>> logits = decoder.step(logits.argmax(-1))         # [B] → [B, V]
    >>> state = decoder.state()                          # at any time: a value to keep, branch or join
    """

    @torch.no_grad()
    def __init__(self, model: LanguageModel, state: ModelState, block: int = BLOCK) -> None:
        super().__init__(model, block)
        device = model.device
        model.check_state(state, state.batch)
        # Packed bfloat16 weights would make it a quantized model, whose activations are float32.
        plain = device.type == "cpu" and model.norm.weight.dtype != torch.bfloat16
        if plain and sum(p.numel() for p in model.parameters()) > _MANY_PARAMETERS:
            model = replaced(model, {module: twin for module in model.modules() if (twin := packed_twin(module))})
        self._model = model
        self._block.join(state.batch)
        self._position = state.position
        self._plans: list[DecodePlan] = [
            layer.decode_plan(held, self._block) or DecodePlan(layer, held)
            for layer, held in zip(model.sequence_layers(), state.layers, strict=True)
        ]
        self._sampler = Sampler(model.config.vocab_size, device, [Settings()] * state.batch)
        self._tokens = torch.zeros(state.batch, dtype=torch.int64, device=device)
        self._lookups = [Lookup() for _ in range(state.batch)]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        logits = self._read(tokens.unsqueeze(1))[:, 0]
        self._position = self._position + 1
        self._count(1)
        return logits

    @torch.no_grad()
    def advance(self) -> Draw:
        # With the C functions, reading several tokens of a row costs little more than reading one.
        if self.speculate is False or self._tokens.device.type != "cpu" or cpu.library() is None:
            return self.generate(1)
        if self._block.rows == 1:
            most = min(MOST_ROWS, *(plan.ahead() for plan in self._plans)) - 1
            if draft := self._lookups[0].draft(most):
                return self._verify(self._lookups[0], draft)
        drawn = self.generate(1)
        for lookup, token in zip(self._lookups, drawn.tokens[0].tolist(), strict=True):
            lookup.extend([token])
        return drawn

    def _verify(self, lookup: Lookup, draft: list[int]) -> Draw:
        """Read the next token and a draft of those after it; keep the drafted tokens that the sampler draws as well,
        and the next one that it draws.
        """
        logits = self._read(torch.cat([self._tokens, torch.tensor(draft, dtype=torch.int64)]).unsqueeze(0))
        work, draws, drawn = self._sampler.work, [], []
        for place in range(len(draft) + 1):
            self._position = self._position + 1
            draws.append(self._sampler.draw(logits[:, place], self._position, work))
            drawn.append(int(draws[-1].tokens))
            if drawn[place:] != draft[place : place + 1]:
                break
        for plan in self._plans:
            plan.rewind(len(draft) + 1 - len(drawn))
        self._count(len(drawn))
        self._tokens = draws[-1].tokens.clamp(min=0)
        lookup.extend(drawn)
        lookup.learn(len(draft), len(drawn) - 1)
        return Draw.join([draw.map(lambda part: part.unsqueeze(0)) for draw in draws], torch.cat)

    def _read(self, tokens: Tensor) -> Tensor:
        """Logits [B, L, V] after each of the next tokens [B, L]; does not move the cursors of decoder and block."""
        position = self._position.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        x = self._model.embed(tokens, position)
        for plan in self._plans:
            x = plan.step(x)
        return self._model.logits(self._model.norm(x))

    @torch.no_grad()
    def state(self) -> ModelState:
        return ModelState(self._position, tuple(plan.state() for plan in self._plans))

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        self._block.keep(rows)
        self._position, self._tokens = self._position[list(rows)], self._tokens[list(rows)]
        self._sampler = Sampler.join([(self._sampler, rows)])
        self._lookups = [self._lookups[row] for row in rows]
        for plan in self._plans:
            plan.keep(rows)

    def _set_tokens(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def _put(self, state: ModelState, sampler: Sampler, tokens: Tensor, read: Sequence[Sequence[int]]) -> None:
        before = read if self.speculate is not False and read else [()] * len(tokens)
        self._lookups += [Lookup([*row, token]) for row, token in zip(before, tokens.tolist(), strict=True)]
        self._position = torch.cat([self._position, state.position])
        self._sampler = Sampler.join([(self._sampler, range(len(self._tokens))), (sampler, range(len(tokens)))])
        self._tokens = torch.cat([self._tokens, tokens])
        for plan, held in zip(self._plans, state.layers, strict=True):
            plan.join(held)

    def _advance(self, count: int, work: Work) -> Draw:
        drawn = self._sampler.draw(self.step(self._tokens), self._position, work)
        self._tokens = drawn.tokens.clamp(min=0)
        return drawn.map(lambda part: part.unsqueeze(0))

    def _fold(self) -> None:
        for plan in self._plans:
            plan.fold()


def decoder(model: LanguageModel, state: ModelState) -> BlockedDecoder:
    """The fastest decoder that continues from a state with the model's own results, up to the precision in use.

    A `GraphDecoder` if GPU kernels can run, every layer has a plan for them and the precision is bfloat16, by autocast
    around this call or by the model's parameters; else a `Decoder`.
    """
    if fast.usable(model.device):
        from gss.decode import cuda

        if cuda.reduced_precision(model) and (plans := cuda.plans(model, BLOCK)):
            return cuda.GraphDecoder(model, state, BLOCK, plans)
    return Decoder(model, state)
