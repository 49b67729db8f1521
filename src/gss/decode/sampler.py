"""The sampler: draws the next token of every row from its logits, with settings and a seed per row.

It consists of torch operations on tensors of fixed shapes, and never reads values back from a GPU, so a CUDA graph can
contain it. A GPU kernel (`gss.ops.gpu.sample`) or a C function (`gss.ops.cpu`) does the same in one call. Noise comes
from a counter: a row's draw depends only on its seed, its position and its logits, not on other rows or the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from gss.ops import cpu, fast
from gss.sampling import OPTIONS, Sampling

# As many candidates are enough for most rows; on a CPU, sorting a whole vocabulary takes milliseconds.
_CANDIDATES = 256
# The lowest temperature that float32 can divide by; below it, every token but the likeliest has weight 0 anyway.
_COLDEST = 1e-30
# The largest vocabulary of the GPU kernel.
_LARGEST_FUSED = 32_768
# The options that the GPU kernel and the C function support, in the order of their rows of numbers.
_FUSED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
assert tuple(OPTIONS)[: len(_FUSED)] == _FUSED, "a new option of gss.sampling comes last"
_EFFECTS = {name: option.metadata["effect"] for name, option in OPTIONS.items() if option.metadata["effect"]}

GREEDY = Sampling(temperature=0)
NONE = -2
"""In place of a token: there is none."""


class Settings(NamedTuple):
    sampling: Sampling = GREEDY
    seed: int = 0
    logprobs: int | None = None
    """How many alternatives to score beside each token; None: no scores."""


class Draw(NamedTuple):
    """Tokens [..., B], −1 where the logits are not finite, and their scores if some row asks for them.

    After a draft of which only part was kept, the last tokens are `NONE`.
    """

    tokens: Tensor
    scores: tuple[Tensor, ...] | None = None
    """Log-probabilities [..., B] of the tokens, and the likeliest tokens' with those tokens, [..., B, top] each."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Draw":
        """The draw with a function applied to every tensor."""
        return Draw(function(self.tokens), self.scores and tuple(map(function, self.scores)))

    @staticmethod
    def join(draws: Sequence["Draw"], function: Callable[[list[Tensor]], Tensor]) -> "Draw":
        """Several draws as one; `function` joins the tensors of one kind."""
        scores = zip(*(draw.scores for draw in draws if draw.scores), strict=True)
        return Draw(function([draw.tokens for draw in draws]), tuple(function(list(part)) for part in scores) or None)


class Work(NamedTuple):
    """What the rows together need, known to the host: this chooses the operations, and so the captured graph.

    There are few different values, because the number of alternatives, `top`, is a power of two.
    """

    greedy: bool
    effects: tuple[str, ...]
    """The options with an effect of their own (`gss.sampling`) that some row sets."""
    narrowed: bool
    penalised: bool
    fused: bool
    """Whether the GPU kernel and the C function support every option that is set."""
    top: int | None

    @property
    def argmax(self) -> bool:
        """Whether the likeliest token of each row is all that is needed."""
        return self.greedy and not self.penalised and self.top is None


class Sampler:
    """The settings of a batch's rows as tensors; places may be empty.

    >>> sampler = Sampler(model.config.vocab_size, device, [Settings(Sampling(top_p=0.9), seed=3)], [prompt])
    >>> sampler.draw(logits, position).tokens      # [B, V], [B] → [B]
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        rows: Sequence[Settings],
        read: Sequence[Sequence[int]] = (),
        capacity: int = 0,
    ) -> None:
        """`read`: the tokens that each row has read, for the repetition penalty."""
        capacity = max(capacity, len(rows))
        self.rows = list(rows)
        self._numbers = torch.ones(len(OPTIONS), capacity, dtype=torch.float64)  # a row for each option, in order
        self._seed = torch.zeros(capacity, dtype=torch.int64)
        self._seen = torch.zeros(capacity, vocab_size, dtype=torch.bool)
        for row, (sampling, seed, _) in enumerate(rows):
            values = {**asdict(sampling), "top_k": min(sampling.top_k or vocab_size, vocab_size)}
            values["top_p"] = sampling.top_p or 1
            self._numbers[:, row] = torch.tensor([value or 0 for value in values.values()], dtype=torch.float64)
            self._seed[row] = (seed + 2**63) % 2**64 - 2**63
            if sampling.repetition_penalty != 1 and read:
                self._seen[row, list(read[row])] = True
        self._numbers, self._seed, self._seen = (t.to(device) for t in self.tensors())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tensors that a draw reads or changes."""
        return self._numbers, self._seed, self._seen

    @property
    def work(self) -> Work:
        """What the present rows need."""
        samplings = [row.sampling for row in self.rows]
        scored = [row.logprobs for row in self.rows if row.logprobs is not None]
        effects = tuple(name for name in _EFFECTS if any(getattr(s, name) != OPTIONS[name].default for s in samplings))
        return Work(
            all(sampling.temperature == 0 for sampling in samplings),
            effects,
            any(sampling.top_k or sampling.top_p for sampling in samplings),
            any(sampling.repetition_penalty != 1 for sampling in samplings),
            all(name in _FUSED for name in effects),
            max((0 if not most else 1 << (most - 1).bit_length() for most in scored), default=None),
        )

    def put(self, other: "Sampler", rows: Sequence[int], places: Sequence[int]) -> None:
        """Copy rows of another sampler to these places."""
        self._numbers[:, places] = other._numbers[:, rows]
        self._seed[places], self._seen[places] = other._seed[rows], other._seen[rows]

    @staticmethod
    def join(parts: Sequence[tuple["Sampler", Sequence[int]]]) -> "Sampler":
        """The rows of several samplers, in order."""
        first = parts[0][0]
        settings = [sampler.rows[row] for sampler, rows in parts for row in rows]
        whole = Sampler(first._seen.shape[1], first._seed.device, settings)
        start = 0
        for sampler, rows in parts:
            whole.put(sampler, list(rows), list(range(start, start + len(rows))))
            start += len(rows)
        return whole

    @torch.no_grad()
    def draw(self, logits: Tensor, position: Tensor, work: Work | None = None) -> Draw:
        """The next token of each row, for logits [B, V] after `position` [B] tokens; it counts as seen from then on."""
        work = work or self.work
        if work.argmax:
            return Draw(_likeliest(logits))
        logits = logits.float()
        tokens = self._draw_at_once(logits, position, work.penalised) if work.fused else None
        if tokens is None:
            tokens = self._draw_by_steps(logits, position, work)
        return Draw(tokens, None if work.top is None else score(logits, tokens.clamp(min=0), work.top))

    def _draw_at_once(self, logits: Tensor, position: Tensor, penalised: bool) -> Tensor | None:
        """By the C function or the GPU kernel, if there is one."""
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if logits.device.type == "cpu" and (draw := cpu.function("gss_draw", "lllpppppp")) is not None:
            logits = logits.clone() if penalised or not logits.is_contiguous() else logits  # a penalty writes to them
            position, seen = position.contiguous(), self._seen if penalised else None
            tensors = (logits, self._numbers, self._seed, position, seen, tokens)
            draw(*logits.shape, self._numbers.shape[1], *map(cpu.pointer, tensors))
            return tokens
        if fast.usable(logits.device) and logits.shape[1] <= _LARGEST_FUSED:
            from gss.ops.gpu import sample

            sample.draw(logits, *self.tensors(), position, tokens, penalised)
            return tokens
        return None

    def _draw_by_steps(self, logits: Tensor, position: Tensor, work: Work) -> Tensor:
        """By PyTorch, which supports every option."""
        numbers = dict(zip(OPTIONS, self._numbers[:, : len(logits), None], strict=True))
        seen, temperature, penalty = self._seen[: len(logits)], numbers["temperature"], numbers["repetition_penalty"]
        if work.penalised:
            factor = torch.where(logits > 0, 1 / penalty, penalty).float()
            logits = torch.where(seen, logits * factor, logits)
        peak, tokens = logits.max(-1, keepdim=True)
        if not work.greedy:
            weight = ((logits - peak) / temperature.clamp(min=_COLDEST).float()).exp()  # 1 for the likeliest
            for name in work.effects:
                weight = _EFFECTS[name](weight, numbers[name])
            if work.narrowed:
                weight = _narrowed(weight, numbers["top_k"], numbers["top_p"])
            reached = weight.cumsum(-1, dtype=torch.float64)
            target = uniform(self._seed[: len(logits)], position).unsqueeze(1) * reached[:, -1:]
            drawn = torch.searchsorted(reached, target, right=True).clamp(max=logits.shape[1] - 1)
            tokens = torch.where(temperature == 0, tokens, drawn)
        if work.penalised:
            seen.scatter_(1, tokens, True)
        return torch.where(peak.isfinite(), tokens, -1).squeeze(1)


def _likeliest(logits: Tensor) -> Tensor:
    """The likeliest token of each row of logits [B, V], −1 where they are not finite."""
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    if plain and (largest := cpu.function("gss_largest", "lp")) is not None:
        return torch.tensor([largest(len(row), row.data_ptr()) for row in logits], dtype=torch.int64)
    peak, tokens = logits.max(-1)
    return torch.where(peak.isfinite(), tokens, -1)


def score(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens [B] under logits [B, V], and of the `top` likeliest with their tokens, [B, top]."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(min(top, logits.shape[-1]))
    return logits.gather(1, tokens.unsqueeze(1)).sub(total).squeeze(1), best.values - total, best.indices


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Numbers in [0, 1) of float64 for seeds and counters, int64 each: a hash with all bits of both, SplitMix64's."""
    return ((_mixed(_mixed(seed - 0x61C8864680B583EB) + counter) >> 12) & (1 << 52) - 1) * 2.0**-52


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & (1 << 33) - 1)


def _narrowed(weight: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights [B, V], 0 outside each row's `top_k` likeliest, and outside the fewest of those that reach `top_p`."""
    size = weight.shape[1]
    free = (top_k >= size) & (top_p >= 1)
    total = weight.sum(-1, keepdim=True, dtype=torch.float64)
    for count in (_CANDIDATES, size) if weight.device.type == "cpu" and size > _CANDIDATES else (size,):
        ordered, order = weight.topk(count) if count < size else weight.sort(-1, descending=True)
        ordered = torch.where(torch.arange(count, device=weight.device) < top_k, ordered, 0)
        reached = ordered.cumsum(-1, dtype=torch.float64)
        cut_by_k = top_k <= count
        bound = top_p * torch.where(cut_by_k, reached[:, -1:], total)
        # On a CPU, where reading a value costs nothing: were the candidates enough for every row?
        if count == size or bool((free | cut_by_k | ((top_k >= size) & (reached[:, -1:] >= bound))).all()):
            break
    kept = torch.where(reached - ordered < bound, ordered, 0)
    return torch.where(free, weight, torch.zeros_like(weight).scatter(1, order, kept))
