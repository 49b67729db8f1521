"""Speculation with the decoding kernels: the tokens and the state that there are without it, whatever the drafts."""

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gss
from gss.decode import GREEDY, Engine, Request, Sampling
from gss.decode.lookup import Lookup
from gss.decode.sampler import NONE, Sampler, Settings
from tests.ops.test_gpu_decode import DEVICES, KEYED, check_states, model_of, started

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SAMPLED = Sampling(temperature=0.9, top_p=0.95)
# Drafts of 7 that end early with the block, 11 tokens, or the chunk, 8.
CHUNKS: dict[str, object] = {"pattern": ("gss", "attention"), "depth": 2, "attention.chunk": 8}
ROTARY: dict[str, object] = {"positions": "rotary", "attention.qk_norm": True, "attention.head_width": 6}
CASES: dict[str, tuple[Sampling, dict[str, object]]] = {
    "greedy": (GREEDY, {"depth": 2}),
    "sampled": (SAMPLED, {"depth": 1, "norm": "rmsnorm", "bias": False, "positions": "sinusoidal"}),
    "hybrid, greedy": (GREEDY, CHUNKS),
    "hybrid, sampled": (SAMPLED, {**CHUNKS, **ROTARY, "norm": "rmsnorm", "feedforward": "gated"}),
}
BLOCK = 11
# How many tokens of each draft are right: all, as far as a block goes; none; some.
RIGHT = (7, 7, 7, 0, 3, 0, 1, 7, 5)


class Scripted:
    """In place of the look-up, as operations that a graph can hold: the tokens to come, so many of them right."""

    def __init__(self, decoder: Any, coming: Sequence[int]) -> None:
        self.draft, device = decoder._room.draft[0], decoder._room.stream.device
        self.coming = torch.tensor([7, *coming, *[NONE] * 40], device=device)
        self.right, self.turn = torch.tensor(RIGHT, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        self.start = self.draft._row.position.clone()
        self.draft.look_up = self

    def __call__(self) -> None:
        column = torch.arange(8, device=self.turn.device)
        token = self.coming[self.draft._row.position - self.start + column]
        self.draft.given.copy_(torch.where(column > self.right[self.turn], (token + 1) % 61, token))
        self.turn.copy_((self.turn + 1) % len(RIGHT))


def speculating(  # type: ignore[no-untyped-def]
    model: gss.LanguageModel, state: gss.ModelState, settings: Settings, speculate: bool | None = True
):
    """A decoder with one row that speculates, whose next token is 7."""
    import gss.decode.cuda

    decoder = gss.decode.cuda.GraphDecoder(model, state, BLOCK)
    decoder.keep([])
    decoder.speculate = speculate
    device = state.position.device
    decoder.join(state, Sampler(61, device, [settings]), torch.tensor([7], device=device), [[1, 2, 3]])
    return decoder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_and_states(case: str, device: str) -> None:
    sampling, sizes = CASES[case]
    model = model_of(device, **sizes).eval()
    with torch.no_grad():
        for layer in model.layers:  # enough for the likeliest token not to be the one just read
            layer.output.weight *= 16
    _, state = started(model, 1)
    settings = Settings(sampling, 5, None if sampling == GREEDY else 2)
    count = 18 if len(model.layers) > 1 else 28  # the interpreter is slow
    expected = speculating(model, state, settings).generate(count + 10)
    tokens = expected.tokens[:, 0].tolist()
    decoder = speculating(model, state, settings)
    Scripted(decoder, tokens)
    drawn, right = 0, itertools.cycle(RIGHT)
    while drawn < count:
        found = decoder.advance()
        places = found.tokens[:, 0] != NONE
        kept = found.tokens[:, 0][places].tolist()
        assert kept == tokens[drawn : drawn + len(kept)]
        for score, other in zip(found.scores or (), expected.scores or (), strict=True):
            assert torch.allclose(score[places, 0], other[drawn : drawn + len(kept), 0], atol=1e-3)
        left = BLOCK - drawn % BLOCK
        for each in places.view(-1, 8).sum(1).tolist():
            fitting = min(1 + next(right), left)
            assert each == fitting or (each < fitting and "hybrid" in case)  # a chunk's end cuts a draft, too
            left, drawn = left - each, drawn + each
        after, length = decoder.state(), torch.tensor([[7, *tokens[: drawn - 1]]], device=device)
        with torch.no_grad():
            _, read = model(length, state)
        assert torch.equal(after.position, read.position)
        check_states(after, read, 2e-2 if "hybrid" in case else 5e-5)  # 1e-5 in the interpreter
        assert all(tensor.isfinite().all() for layer in after.layers for tensor in layer.values())
    # One by one from there.
    assert decoder.generate(3).tokens[:, 0].tolist() == tokens[drawn : drawn + 3]


def looked_up(read: Sequence[int]) -> list[int]:
    """The longest draft of the look-up on the host."""
    lookup = Lookup(read)
    for _ in range(2):
        lookup.learn(1, 1)
    return lookup.draft(7)


@pytest.mark.parametrize("device", DEVICES)
def test_by_default_it_speculates_where_the_likeliest_token_is_taken(device: str) -> None:
    model = model_of(device, depth=1)
    for sampling, speculate, expected in (
        (GREEDY, None, True),
        (GREEDY, False, False),
        (Sampling(temperature=0.8), None, False),
        (Sampling(temperature=0.8), True, True),
        (Sampling(temperature=0, repetition_penalty=1.2), None, False),
    ):
        decoder = speculating(model, model.initial_state(1), Settings(sampling), speculate)
        assert decoder._drafting == expected, (sampling, speculate)


@pytest.mark.parametrize("device", DEVICES)
def test_the_drafts_are_those_of_lookup(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In histories of all lengths, which repeat themselves, and one that has outgrown its room."""
    from gss.ops.gpu import decode_launch

    monkeypatch.setattr(decode_launch, "HISTORY", 100)
    model = model_of(device, depth=1)
    draft = speculating(model, model.initial_state(1), Settings())._room.draft[0]
    found = 0
    for length in (1, 2, 3, 4, 5, 7, 12, 30, 60, 99):
        read = torch.randint(0, 3, (length,)).to(device)
        draft._row.tokens.copy_(read[-1:])
        draft.remember(read)
        draft.look_up()
        expected = looked_up(read.tolist())
        assert draft.given.tolist() == [int(read[-1]), *expected, *[NONE] * (7 - len(expected))]
        found += bool(expected)
    assert 3 <= found < 10
    for _ in range(9):
        more = torch.randint(0, 3, (20,), device=device)
        draft.note(more)
        read = torch.cat([read, more])
    draft.look_up()
    assert draft.given.tolist()[1:] == looked_up(read.tolist()[-100:])
    assert int(draft._length) < 200


def test_drafts_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's tokens and scores; with a penalty on repetition, one by one."""
    import gss.decode.cuda

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(device, depth=1).eval()
    with torch.no_grad():
        model.embedding.weight[5:] *= 0.01  # few tokens, which repeat themselves
    drafts, read = [], gss.decode.cuda.GraphDecoder._read_drafts
    monkeypatch.setattr(
        gss.decode.cuda.GraphDecoder, "_read_drafts", lambda self, work: drafts.append(work) or read(self, work)
    )
    monkeypatch.setattr("gss.decode.engine.decoder", lambda model, state: gss.decode.cuda.GraphDecoder(model, state))
    for options in ({"sampling": GREEDY, "logprobs": 1}, {"sampling": Sampling(repetition_penalty=1.3), "seed": 3}):
        outputs = []
        for speculate in (False, True):
            engine = Engine(model, speculate=speculate)
            request = Request(prompt=[3, 1, 4, 1, 5, 9] * 2, max_tokens=16, **options)
            engine.submit(request)
            outputs.append([output for output in engine.run() if output.tokens])
        (plain, scores), (tokens, found) = (
            ([t for o in each for t in o.tokens], [s[0] for o in each for s in o.scores]) for each in outputs
        )
        assert tokens == plain
        assert found == pytest.approx(scores, abs=1e-3)
        assert len(tokens) == 16
    assert drafts
    assert not any(work.penalised for work in drafts)


def test_rows_that_come_while_a_draft_is_read() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(device, depth=1).eval()
    _, state = started(model, 1)
    tokens = speculating(model, state, Settings()).generate(20).tokens[:, 0].tolist()
    decoder = speculating(model, state, Settings())
    Scripted(decoder, tokens)
    drawn = decoder.advance().tokens[:, 0].tolist()  # a whole draft, what the block has room for, and nothing more
    assert drawn == [*tokens[:11], *[NONE] * 21]
    decoder.join(state)
    assert not decoder._drafting
    assert decoder.generate(1).tokens[:, 0].tolist() == tokens[11:12]
    assert decoder.state().position.tolist() == [18, 7]
    decoder.keep([0])
    assert decoder.advance().tokens[:, 0].tolist() == tokens[12:20]
    with torch.no_grad():
        _, read = model(torch.tensor([[7, *tokens[:19]]], device=device), state)
    check_states(decoder.state(), read, 2e-2)


def test_models_that_cannot() -> None:
    """A matrix state and a sliding window are not taken back: such models read one by one."""
    model = model_of("cuda" if torch.cuda.is_available() else "cpu", **KEYED)
    decoder = speculating(model, model.initial_state(1), Settings())
    assert not decoder._drafting
    assert (decoder.advance().tokens >= 0).all()
