"""The engine: requests share one batch on one model, and come and go between steps.

A request's prompt is read in pieces (`prefill`). Then its continuations join the batch, and every `step` draws the next
tokens of each on the device. A continuation does not depend on the rest of the batch (except for rounding, in
bfloat16). On a GPU, a step produces several tokens, and the host looks at them while the device computes the next.

    engine = Engine(model)
    engine.submit(Request(prompt=[1, 2, 3], max_tokens=100))
    for output in engine.run():
        print(output.tokens, output.finish)

Independent of text, threads and HTTP.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from gss.decode.blocked import BLOCK, BlockedDecoder, decoder
from gss.decode.prefill import PartialPrompt, Prefill, PrefixCache, score_lists
from gss.decode.request import Finish, Output, Request, Score
from gss.decode.sampler import NONE, Draw, Sampler, Settings
from gss.model import LanguageModel
from gss.nn.decoding import without_gaps
from gss.nn.state import ModelState
from gss.precision import resolved, running


class _Row:
    """One continuation that is being generated."""

    def __init__(self, request: Request, index: int) -> None:
        self.request, self.index = request, index
        self.left = request.max_tokens
        self.finish: Finish | None = None
        self.gone = False

    def accept(self, tokens: list[int], scores: list[Score]) -> Output:
        """The output for the next tokens, up to the end of the continuation."""
        if -1 in tokens:
            raise ValueError("the model's logits are not finite: its weights or checkpoint are broken")
        tokens = tokens[: self.left]
        if self.request.eos_id in tokens:
            tokens = tokens[: tokens.index(self.request.eos_id)]
            self.finish = "stop"
        self.left -= len(tokens)
        if not self.left and not self.finish:
            self.finish = "length"
        return Output(self.request, self.index, tokens, scores[: len(tokens)], self.finish)


class _Fetched:
    """A draw for some rows, on its way to the host."""

    def __init__(self, rows: Sequence[_Row], draw: Draw) -> None:
        self.rows = list(rows)
        self._ready = None
        self._draw = draw
        if draw.tokens.is_cuda:
            self._draw = draw.map(lambda part: torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, True))
            self._ready = torch.cuda.Event()
            self._ready.record()

    def outputs(self) -> Iterator[tuple[_Row, Output]]:
        """Wait for the tokens, and return the outputs of rows that have not left."""
        if self._ready is not None:
            self._ready.synchronize()
        tokens = self._draw.tokens.T.tolist()
        scores = [part.movedim(0, 1).tolist() for part in self._draw.scores or ()]
        for place, row in enumerate(self.rows):
            if not row.gone:
                own: list[Score] = []
                if (wanted := row.request.logprobs) is not None:
                    given = zip(tokens[place], score_lists(*(part[place] for part in scores)), strict=True)
                    own = [(log, top[:wanted]) for token, (log, top) in given if token != NONE]
                yield row, row.accept([token for token in tokens[place] if token != NONE], own)


class Engine:
    """Continues prompts on a model; see the module.

    rows          most continuations in the batch: with a bounded state, memory is known from the start
    piece         tokens of prompts that are read per round of `prefill`; by default 4,096, on a GPU 65,536
    cache_bytes   memory for cached states of prompts, from which later prompts with the same prefix start
    precision     auto, fp32 or bf16 (autocast); auto: bf16 on a GPU, else fp32
    speculate     whether a row that is alone drafts by lookup, which does not change what is drawn. Default: if it
                  pays, that is on a CPU, and on a GPU at temperature 0
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        rows: int = 64,
        piece: int | None = None,
        cache_bytes: int = 0,
        precision: str = "auto",
        speculate: bool | None = None,
    ) -> None:
        self._device = model.device
        if piece is None:
            piece = 65_536 if self._device.type == "cuda" else 4096
        if rows < 1 or piece < 1:
            raise ValueError(f"rows and piece must be at least 1, not {rows} and {piece}")
        self.model, self.max_rows, self.precision = model, rows, resolved(precision, model)
        self.cache = PrefixCache(cache_bytes)
        self.prompts = Prefill(model, self.cache, piece)
        self.speculate = speculate
        self._waiting: deque[Request] = deque()
        self._running: list[_Row] = []
        self._in_flight: _Fetched | None = None
        self.decoder = self._empty_decoder()

    @property
    def waiting(self) -> int:
        """Requests whose prompts are not being read yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Continuations in the batch."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Queue a request; requests are begun in order."""
        tokens = torch.from_numpy(np.asarray(request.prompt, dtype=np.int64)).unsqueeze(0)
        if not tokens.numel():
            raise ValueError("there is nothing to read: give at least one token")
        if request.n < 1 or request.max_tokens < 0:
            raise ValueError(
                f"give n of at least 1 and max_tokens of at least 0, not {request.n} and {request.max_tokens}"
            )
        self.model.check_tokens(tokens)
        if request.state is not None:
            self.model.check_state(request.state, 1)
        self._waiting.append(request)

    def cancel(self, unwanted: Callable[[Request], bool], index: int | None = None) -> None:
        """Drop requests, or one continuation of each; they have no further outputs."""
        if index is None:
            self._waiting = deque(request for request in self._waiting if not unwanted(request))
            self.prompts.drop(unwanted)
        self._leave(row for row in self._running if unwanted(row.request) and index in (None, row.index))

    def admit(self) -> int:
        """Begin the prompts of waiting requests while there are rows for them; returns how many are being read."""
        taken = len(self._running) + sum(request.n for request in self.prompts.requests())
        # A request for more rows than there are runs alone.
        while self._waiting and (taken + self._waiting[0].n <= self.max_rows or not taken):
            taken += self._waiting[0].n
            self.prompts.add(self._waiting.popleft())
        return len(self.prompts)

    @torch.no_grad()
    def prefill(self) -> list[Output]:
        """Read a piece of the admitted prompts; returns the first tokens of those that are done."""
        with running(self.model, self.precision):
            read = self.prompts.round()
            # States that grow differ in length: joined, each would be as long as the longest.
            together = [read] if self.prompts.bounded else [[prompt] for prompt in read]
            outputs = [output for prompts in together for output in self._begin(prompts)]
        if self._device.type == "cuda" and self._in_flight is None and not len(self.prompts):
            self._in_flight = self._begin_step()  # the device continues while the host looks at the first tokens
        return outputs

    @torch.no_grad()
    def step(self) -> list[Output]:
        """The next tokens of every continuation in the batch (on a GPU, those that the step before launched)."""
        fetched = self._begin_step()
        if self._device.type == "cuda":
            fetched, self._in_flight = self._in_flight, fetched
        handed_out = list(fetched.outputs()) if fetched else []
        self._leave(row for row, _ in handed_out if row.finish)
        return [output for _, output in handed_out]

    def run(self) -> Iterator[Output]:
        """All outputs of the requests until the last one has ended."""
        while self.admit() or self._running:
            yield from self.prefill() if len(self.prompts) else self.step()

    def warm_up(self) -> None:
        """Decode two blocks in batches of every size, with a row that joins late, so that no later request waits for
        kernels to be compiled."""
        prompts, self.prompts = self.prompts, Prefill(self.model, PrefixCache(0), self.prompts.piece)
        size = 0
        while size < self.max_rows:
            size = min(max(1, 2 * size), self.max_rows)
            for place in range(size):
                self.submit(Request(prompt=[0] * 16, max_tokens=2 * BLOCK + 2 * self.decoder.stride, seed=place))
                if place == size - 2:
                    self.admit()
                    self.prefill()
                    self.step()
            for _ in self.run():
                pass
        self.prompts = prompts

    def reset(self) -> None:
        """Forget every request, after an error."""
        self._waiting.clear()
        self.prompts.drop(lambda request: True)
        self._running, self._in_flight = [], None
        self.decoder = self._empty_decoder()

    def _begin(self, read: list[PartialPrompt]) -> Iterator[Output]:
        """Put the continuations of prompts that have been read into the batch, each with its first token drawn."""
        rows: list[_Row] = []
        states, logits = [], []
        for prompt in read:
            request = prompt.request
            assert prompt.state is not None
            assert prompt.logits is not None
            if request.score_prompt:
                yield Output(request, 0, [], [], prompt_scores=prompt.scores)
            for index in range(request.n):
                if request.max_tokens:
                    rows.append(_Row(request, index))
                    states.append(prompt.state)
                    logits.append(prompt.logits)
                else:
                    yield Output(request, index, [], [], "length")
        if not rows:
            return
        state = ModelState.join(states) if len(states) > 1 else states[0]
        settings = [Settings(r.request.sampling, r.request.seed + r.index, r.request.logprobs) for r in rows]
        prompts = [row.request.prompt for row in rows]
        sampler = Sampler(self.model.config.vocab_size, self._device, settings, prompts)
        draw = sampler.draw(torch.cat(logits), state.position)
        for _, output in _Fetched(rows, draw.map(lambda part: part.unsqueeze(0))).outputs():
            yield output
        going = [place for place, row in enumerate(rows) if not row.finish]
        if len(going) < len(rows):
            state, sampler, draw = state.select(going), Sampler.join([(sampler, going)]), Draw(draw.tokens[going])
        if going:
            self.decoder.join(state, sampler, draw.tokens, [rows[place].request.prompt for place in going])
            self._running += [rows[place] for place in going]

    def _begin_step(self) -> _Fetched | None:
        """Start the decoder on more tokens, unless the tokens in progress are enough."""
        under_way = self.decoder.stride if self._in_flight else 0
        if not any(row.left > under_way for row in self._running):
            return None
        with running(self.model, self.precision):
            return _Fetched(self._running, self.decoder.advance())

    def _leave(self, leaving: Iterable[_Row]) -> None:
        gone = list(leaving)
        if not gone:
            return
        for row in gone:
            row.gone = True
        order = without_gaps([row.gone for row in self._running])
        self.decoder.keep(order)
        self._running = [self._running[place] for place in order]
        if not order:
            self._in_flight = None

    def _empty_decoder(self) -> BlockedDecoder:
        with running(self.model, self.precision):
            empty = decoder(self.model, self.model.initial_state(1))
        empty.keep([])
        empty.speculate = self.speculate
        return empty


def stream(
    model: LanguageModel, requests: Sequence[Request], precision: str = "auto", speculate: bool | None = None
) -> Iterator[Output]:
    """The outputs of some requests in one batch, as they are produced."""
    if not requests:
        raise ValueError("there are no prompts: give at least one")
    engine = Engine(model, rows=sum(request.n for request in requests), precision=precision, speculate=speculate)
    for request in requests:
        engine.submit(request)
    return engine.run()
