"""Speculation by lookup: the same draws and states with it and without, in fewer steps."""

import itertools

import pytest
import torch

import gss
from gss.decode import Decoder, Engine, Request, Sampling
from gss.decode.lookup import Lookup
from gss.ops import cpu
from tests.comparing import relative_error
from tests.conftest import small_config

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C compiler")
PATTERN = [3, 1, 4, 1, 5, 9, 2, 6]


def test_drafts() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 6, 1, 2])
    assert lookup.draft(7) == []
    lookup.extend([3])
    assert lookup.draft(7) == [4, 5]
    assert lookup.draft(1) == [4]
    lookup.learn(2, 2)  # all were kept: longer ones from here on
    assert lookup.draft(7) == [4, 5, 6, 1, 2]
    lookup.learn(5, 0)
    assert lookup.draft(7) == [4]
    lookup.extend([9, 1, 2, 3])
    assert lookup.draft(7) == [9]  # what followed last
    assert Lookup().draft(7) == Lookup([1]).draft(7) == []


def _outputs(
    model: gss.LanguageModel, speculate: bool, precision: str = "auto", **request: object
) -> tuple[list[int], list[object], int]:
    """Tokens and scores of a continuation, and in how many steps they came."""
    engine = Engine(model, speculate=speculate, precision=precision)
    engine.submit(Request(prompt=PATTERN * 4, max_tokens=100, **request))  # type: ignore[arg-type]
    outputs = list(engine.run())
    joined = itertools.chain.from_iterable
    return [*joined(o.tokens for o in outputs)], [*joined(o.scores for o in outputs)], len(outputs)


@pytest.mark.parametrize("family", ["gss", "gss-hybrid", "llama", "slide"])
def test_the_same_tokens(family: str) -> None:
    model = gss.build_model(small_config(family), seed=1).eval()
    for sampling in (Sampling(temperature=0), Sampling(top_p=0.5, repetition_penalty=1.2)):
        plain, _, steps = _outputs(model, False, sampling=sampling, seed=7)
        assert steps == len(plain) == 100
        assert _outputs(model, True, sampling=sampling, seed=7)[0] == plain


@pytest.mark.parametrize("preset", ["gss-hybrid-tiny", "gss2-tiny", "llama-tiny"])
def test_the_same_tokens_in_bfloat16(preset: str) -> None:
    model = gss.build_model(gss.preset(preset, vocab_size=61), seed=1).eval()
    plain, drafted = (_outputs(model, s, precision="bf16", sampling=Sampling(temperature=0))[0] for s in (False, True))
    assert len(plain) == 100
    assert drafted == plain


def test_fewer_steps_and_the_same_scores() -> None:
    model = gss.build_model(small_config("gss"), seed=1).eval()
    plain, expected, _ = _outputs(model, False, sampling=Sampling(temperature=0), logprobs=2)
    tokens, scores, steps = _outputs(model, True, sampling=Sampling(temperature=0), logprobs=2)
    assert tokens == plain
    assert steps < 60
    assert [score[0] for score in scores] == pytest.approx([score[0] for score in expected], abs=1e-5)  # type: ignore[index]


@torch.no_grad()
@pytest.mark.parametrize("family", ["gss", "gss-hybrid", "transformer"])
def test_states_are_rolled_back(family: str) -> None:
    model = gss.build_model(small_config(family), seed=1).eval()
    decoder, plain = (Decoder(model, model.initial_state(1), block=16) for _ in range(2))
    for each in (decoder, plain):
        each.keep([])
    decoder.speculate = True
    for each in (decoder, plain):
        each.join(model.initial_state(1), tokens=torch.tensor([PATTERN[0]]), read=[[*PATTERN, 0]])
    lookup = decoder._lookups[0]
    lookup.draft = lambda most: [60, 60, 60][:most]  # type: ignore[method-assign]  # wrong nearly always
    for _ in range(25):
        for token in decoder.advance().tokens[:, 0]:
            assert plain.generate(1).tokens.item() == token
        further = [model(torch.tensor([PATTERN]), each.state())[0] for each in (decoder, plain)]
        assert relative_error(*further) < 1e-5


@torch.no_grad()
def test_rows_that_come_and_go() -> None:
    model = gss.build_model(small_config("gss"), seed=1).eval()
    requests = [Request(prompt=PATTERN * k, max_tokens=60 * k, sampling=Sampling(temperature=0)) for k in (1, 2, 3)]
    alone = [_alone(model, request) for request in requests]
    engine, found = Engine(model), {request: [] for request in requests}
    for request in requests:
        engine.submit(request)
    for output in engine.run():
        found[output.request] += output.tokens
    assert [found[request] for request in requests] == alone


def _alone(model: gss.LanguageModel, request: Request) -> list[int]:
    engine = Engine(model, speculate=False)
    engine.submit(request)
    return [token for output in engine.run() for token in output.tokens]
