"""States of prompts are kept and shared: a beginning that several prompts have is read once."""

import numpy as np
import torch

import gss
from gss.decode import Engine, Request
from gss.decode.prefill import Entry, PrefixCache
from gss.serve.engine import EngineThread
from tests.comparing import stream
from tests.serve.serving import GREEDY, Asked, engine_of


def entry(model: gss.LanguageModel) -> Entry:
    return Entry(model.initial_state(1), torch.zeros(1, 257))


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int64)


def test_the_longest_beginning_is_found(model: gss.LanguageModel) -> None:
    cache = PrefixCache(1 << 20)
    entries = {length: entry(model) for length in (1, 3, 5)}
    for length, each in entries.items():
        cache.put(ids(*range(length)), each)
    assert cache.longest(ids(0, 1, 2, 3)) == (3, entries[3])
    assert cache.longest(ids(0, 1, 2, 3, 4)) == (5, entries[5])
    assert cache.longest(ids(0, 9)) == (1, entries[1])
    assert cache.longest(ids(9, 1, 2)) == (0, None)


def test_the_least_recently_used_goes_first(model: gss.LanguageModel) -> None:
    size = entry(model).nbytes
    cache = PrefixCache(2 * size)
    for token in (1, 2):
        cache.put(ids(token), entry(model))
    cache.longest(ids(1, 5))
    cache.put(ids(3), entry(model))
    assert cache.nbytes == 2 * size
    cache.put(ids(4), Entry(model.initial_state(1), torch.zeros(1, size)))  # larger than all that may be kept
    assert [cache.longest(ids(token))[0] for token in (1, 2, 3, 4)] == [1, 0, 1, 0]
    PrefixCache(0).put(ids(1), entry(model))


def ask(engine: EngineThread, *prompts: list[int]) -> list[Asked]:
    asked = [Asked(prompt, 8, ignore_eos=True) for prompt in prompts]
    for each in asked:
        engine.submit([each.job])
    return [each.wait() for each in asked]


def check(model: gss.LanguageModel, asked: list[Asked]) -> None:
    for each in asked:
        assert each.tokens() == list(stream(model, each.job.prompt, max_tokens=8, sampling=GREEDY))


def test_a_shared_prompt_is_read_once(model: gss.LanguageModel) -> None:
    long = [i % 251 for i in range(1000)]
    with engine_of(model, piece=64) as engine:
        read = engine.core.prompts
        check(model, ask(engine, long))
        assert (read.tokens_read, read.tokens_reused) == (1000, 0)
        check(model, ask(engine, long))  # all of it
        assert (read.tokens_read, read.tokens_reused) == (1000, 1000)
        check(model, ask(engine, [*long, 7, 8, 9]))  # and more
        assert (read.tokens_read, read.tokens_reused) == (1003, 2000)
        check(model, ask(engine, [*long[:900], 7, 8, 9]))  # part of it: to the last piece that both have
        assert (read.tokens_read, read.tokens_reused) == (1010, 2896)


def test_prompts_that_come_together_share_too(model: gss.LanguageModel) -> None:
    """Twelve requests with one long beginning, all at once: it is read once, the rest by each."""
    shared = [i % 241 for i in range(4096)]
    prompts = [[*shared, *range(number, number + 10)] for number in range(12)]
    with engine_of(model, piece=256) as engine:
        check(model, ask(engine, *prompts))
        assert engine.core.prompts.tokens_read == 4096 + 12 * 10
        assert engine.metrics.prompt_tokens.value == 12 * 4106


def test_sharing_survives_the_leaders_end(model: gss.LanguageModel) -> None:
    shared = [i % 241 for i in range(200)]
    leader, follower = (Request(prompt=prompt, max_tokens=8, sampling=GREEDY) for prompt in (shared, [*shared, 1]))
    engine = Engine(model, piece=16, cache_bytes=1 << 20)
    for request in (leader, follower):
        engine.submit(request)
        engine.admit()
        engine.prefill()
    engine.cancel(lambda request: request is leader)
    tokens: list[int] = []
    for _ in range(100):
        if engine.admit() or engine.running:
            outputs = engine.prefill() if len(engine.prompts) else engine.step()
            tokens += [token for output in outputs for token in output.tokens]
    assert tokens == list(stream(model, follower.prompt, max_tokens=8, sampling=GREEDY))


def test_scores_and_states_are_not_the_caches(model: gss.LanguageModel) -> None:
    """A prompt that is scored is read whole; after a state, the same tokens lead elsewhere."""
    prompt = [5, 6, 7]
    _, state = model(torch.arange(40).unsqueeze(0))
    engine = Engine(model, piece=2, cache_bytes=1 << 20)
    alone = [list(stream(model, prompt, max_tokens=8, sampling=GREEDY, state=each)) for each in (None, state)]
    assert alone[0] != alone[1]
    for which in (1, 0, 1, 0):
        asked = {"prompt": prompt, "max_tokens": 8, "sampling": GREEDY, "state": (None, state)[which]}
        engine.submit(Request(**asked))
        assert [token for output in engine.run() for token in output.tokens] == alone[which]
        engine.submit(Request(**asked, logprobs=1, score_prompt=True))
        scores, *rest = engine.run()
        assert len(scores.prompt_scores or ()) == len(prompt)
        assert [token for output in rest for token in output.tokens] == alone[which]


def test_without_a_cache(model: gss.LanguageModel) -> None:
    with engine_of(model, piece=16, cache_bytes=0) as engine:
        check(model, ask(engine, list(range(40)), list(range(40)), list(range(50))))
        assert engine.core.prompts.tokens_reused == 0
        assert len(engine.core.cache) == 0


def test_memory_stays_within_bounds(model: gss.LanguageModel) -> None:
    size = entry(model).nbytes
    with engine_of(model, piece=16, cache_bytes=5 * size) as engine:
        for number in range(8):
            check(model, ask(engine, [number] * 100))
            assert engine.core.cache.nbytes <= 5 * size
