"""The engine: sequences join and leave a running batch, and each gets what it would get alone."""

import random
import threading
import time
from collections.abc import Sequence

import pytest
import torch

import gss
from gss.data import load_tokenizer
from gss.generate import Continuation, Sampling, generate, prompt_scores
from gss.serve.engine import EngineThread, RefusedError
from tests.comparing import stream
from tests.conftest import ALL_FAMILIES, small_config
from tests.serve.serving import GREEDY, SMALL, Asked, alone, engine_of, lively, lively_model


def submit(engine: EngineThread, *asked: Asked) -> None:
    engine.submit([each.job for each in asked])


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_sequences_join_and_leave(family: str) -> None:
    """Random arrivals, lengths and prompts on few rows: what each gets is what it gets alone."""
    sizes = {"attention.chunk": 8} if family == "gss-hybrid" else {}
    model = lively(gss.build_model(small_config(family, vocab_size=257, **sizes), seed=0))
    draw = random.Random(0)
    with engine_of(model, rows=4, piece=16, interval=0) as engine:
        asked = []
        for _ in range(16):
            prompt = [draw.randrange(256) for _ in range(draw.randint(1, 60))]
            asked.append(Asked(prompt, draw.randint(1, 40), ignore_eos=True))
            submit(engine, asked[-1])
            time.sleep(draw.choice([0, 0, 0.01]))
        for each in asked:
            each.wait()
            expected = list(stream(model, each.job.prompt, max_tokens=each.job.max_tokens, sampling=GREEDY))
            assert each.tokens() == expected
            assert each.finish() == "length"
        assert engine.outstanding == engine.core.running == 0


def test_sampling_is_generates(model: gss.LanguageModel) -> None:
    """Seeds give what `gss generate` gives, whatever runs beside; rows of several kinds of sampling side by side."""
    tokenizer = load_tokenizer("bytes")
    kinds = [
        Sampling(),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(top_k=5),
        Sampling(temperature=0, repetition_penalty=1.3),
        Sampling(temperature=0.9, min_p=0.05, repetition_penalty=1.1),
        GREEDY,
    ]
    with engine_of(model) as engine:
        asked = [Asked("prompt", 30, sampling=kind, seed=seed, logprobs=None) for kind in kinds for seed in (1, 2, 1)]
        submit(engine, *asked)
        for each in asked:
            expected = generate(
                model, tokenizer, "prompt", max_tokens=30, sampling=each.job.sampling, seed=each.job.seed
            )
            assert each.wait().text() == expected


def test_scores(model: gss.LanguageModel) -> None:
    """Log-probabilities are the model's own, of the prompt's tokens too."""
    with engine_of(model, piece=16) as engine:
        prompt = [256, *b"some prompt that is longer than a piece"]
        asked = Asked(prompt, 12, logprobs=3, score_prompt=True, ignore_eos=True)
        submit(engine, asked)
        asked.wait()
    tokens = asked.tokens()
    with torch.no_grad():
        logs = model(torch.tensor([prompt + tokens]))[0][0].log_softmax(-1)
    of_prompt = prompt_scores(engine.tokenizer, prompt, asked.pieces[0].prompt_scores)
    scores = [*of_prompt, *(score for piece in asked.pieces for score in piece.scores)]
    assert [score.token for score in scores] == prompt + tokens
    assert scores[0].logprob is None
    for position, score in enumerate(scores[1:]):
        assert score.logprob == pytest.approx(logs[position, score.token].item(), abs=1e-4)
        best = logs[position].topk(3)
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert [score.offset for score in scores[1 : len(prompt)]] == list(range(len(prompt) - 1))


def test_nothing_to_produce(model: gss.LanguageModel) -> None:
    with engine_of(model) as engine:
        asked = Asked("only to be read", 0)
        submit(engine, asked)
        assert asked.wait().finish() == "length"
        assert asked.tokens() == []


def test_the_end_of_a_document_ends_a_row(model: gss.LanguageModel) -> None:
    expected = list(stream(model, [256, *b"Hello"], max_tokens=400, sampling=GREEDY))
    first = expected.index(expected[9])
    with engine_of(model) as engine:
        asked, past = Asked("Hello", 30, eos_id=expected[9]), Asked("Hello", 30, ignore_eos=True)
        submit(engine, asked, past)
        assert asked.wait().tokens() == expected[:first]
        assert asked.finish() == "stop"
        assert past.wait().tokens() == expected[:30]


def test_cancelled_jobs_leave_the_others_alone(model: gss.LanguageModel) -> None:
    with engine_of(model, rows=3, interval=0) as engine:
        kept, gone, waiting = Asked("kept", 300, ignore_eos=True), Asked("gone", 4000), Asked("third", 10)
        long = Asked([1] * 50_000, 10)
        submit(engine, kept, gone, long, waiting)
        gone.wait(lambda: len(gone.tokens()) > 5)
        engine.cancel([gone.job, long.job])
        waiting.wait()
        heard = len(gone.pieces)
        expected = list(stream(model, kept.job.prompt, max_tokens=300, sampling=GREEDY))
        assert kept.wait().tokens() == expected
        assert len(gone.pieces) == heard
        assert not long.pieces
        assert engine.outstanding == 0


def test_late_jobs_fail(model: gss.LanguageModel) -> None:
    with engine_of(model, rows=1) as engine:
        running = Asked("x", 10**6, ignore_eos=True, deadline=time.monotonic() + 0.3)
        waiting = Asked("y", 10, deadline=time.monotonic() + 0.2)
        submit(engine, running, waiting)
        assert waiting.wait().pieces[-1].failure == "timeout"
        assert running.wait().pieces[-1].failure == "timeout"
        after = Asked("z", 5)
        submit(engine, after)
        assert after.wait().tokens() == alone(model, "z", 5)


def test_the_queue_is_bounded_and_in_order(model: gss.LanguageModel) -> None:
    with engine_of(model, rows=1, queue=2) as engine:
        order: list[str] = []
        first, second, third = (Asked(name, 200, ignore_eos=True, streaming=False) for name in "abc")
        for each, name in ((first, "a"), (second, "b"), (third, "c")):
            take = each.job.sink
            each.job.sink = lambda piece, name=name, take=take: (order.append(name), take(piece))
        submit(engine, first, second, third)
        with pytest.raises(RefusedError, match="full"):
            submit(engine, Asked("d", 1))
        third.wait()
        assert order == ["a", "b", "c"]
        submit(engine, Asked("d", 1).wait(lambda: True))


def test_draining(model: gss.LanguageModel) -> None:
    with engine_of(model) as engine:
        asked = Asked("x", 200, ignore_eos=True)
        submit(engine, asked)
        assert not engine.drain(0)
        with pytest.raises(RefusedError, match="stopping"):
            submit(engine, Asked("y"))
        assert engine.drain(30)
        assert asked.over
        assert len(asked.tokens()) == 200
    assert not engine.alive


def test_long_prompts_do_not_stall_streams() -> None:
    """While a long prompt is read, a stream goes on at a token a piece or faster; and a short one need not wait."""
    model = lively_model(**SMALL)
    with engine_of(model, piece=256, interval=0) as engine:
        running = Asked("running", 10**5, ignore_eos=True)
        submit(engine, running)
        running.wait(lambda: len(running.tokens()) > 3)
        long = Asked([65] * 60_000, 1, ignore_eos=True)
        before = len(running.tokens())
        submit(engine, long)
        short = Asked("short", 5)
        submit(engine, short)
        short.wait()
        assert not long.pieces
        long.wait()
        pieces = 60_000 // 256
        assert len(running.tokens()) - before >= pieces
        engine.cancel([running.job])


def test_a_failure_is_told_and_overcome(model: gss.LanguageModel) -> None:
    with engine_of(model) as engine:
        asked = Asked("x", 10**5, ignore_eos=True, streaming=False)
        submit(engine, asked)
        decoder = engine.core.decoder
        read = decoder._read
        decoder._read = lambda tokens: read(tokens) * float("nan")
        assert asked.wait().pieces[-1].failure == "internal"
        after = Asked("x", 5)
        submit(engine, after)
        assert after.wait().tokens() == alone(model, "x", 5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_that_cannot_be_overcome_leaves_nobody_waiting(model: gss.LanguageModel) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with engine_of(model) as engine:
        engine.core.step = engine.core.reset = broken
        asked = Asked("x", 10)
        submit(engine, asked)
        assert asked.wait(seconds=10).pieces[-1].failure == "internal"
        engine._thread.join(10)
        assert not engine.alive
        with pytest.raises(RefusedError, match="stopping"):
            submit(engine, Asked("x", 10))


def test_stopping_tells_those_who_wait(model: gss.LanguageModel) -> None:
    with engine_of(model) as engine:
        asked = Asked("x", 10**5, ignore_eos=True)
        submit(engine, asked)
        asked.wait(lambda: bool(asked.pieces))
    assert asked.wait(seconds=10).pieces[-1].failure == "stopping"


def test_a_scored_prompt_is_not_decoded_in_the_engines_thread(
    model: gss.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, that takes seconds for a long one, in which nothing else would run."""
    decoded = []
    with engine_of(model) as engine:
        decode = engine.tokenizer.decode
        monkeypatch.setattr(engine.tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
        asked = Asked([65] * 500, 0, logprobs=0, score_prompt=True)
        submit(engine, asked)
        asked.wait()
    assert len(asked.pieces[0].prompt_scores) == 500
    assert sum(decoded) < 100


def test_many_threads_submit_at_once(model: gss.LanguageModel) -> None:
    with engine_of(model, rows=8, queue=1000) as engine:
        asked = [Asked(f"prompt {i % 7}", 12) for i in range(96)]
        threads = [
            threading.Thread(target=lambda part=asked[i::8]: [submit(engine, each) for each in part]) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        expected = [alone(model, f"prompt {i}", 12) for i in range(7)]
        for number, each in enumerate(asked):
            assert each.wait().tokens() == expected[number % 7]


# ---- rows: text


def row_of(text: str | bytes, stop: Sequence[str] = ()) -> tuple[list[str], Continuation]:
    """Give a row the bytes of a text one by one; the pieces that may be shown after each, and the row."""
    content = text.encode() if isinstance(text, str) else text
    row = Continuation(load_tokenizer("bytes"), [256], stop)
    pieces = []
    for left, byte in zip(range(len(content) - 1, -1, -1), content, strict=True):
        row.accept([byte], [], None if left else "length")
        piece = row.take()
        pieces.append(piece.text if piece else "")
        if row.finish:
            break
    return pieces, row


def test_characters_are_sent_whole() -> None:
    text = "naïve — 🙂 漢字!"
    pieces, row = row_of(text)
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert row.finish == "length"
    broken, _ = row_of(b"a\xf0\x9fb\xff")
    assert "".join(broken) == "a\ufffdb\ufffd"


def test_stop_strings_over_several_tokens() -> None:
    pieces, row = row_of("one two END three", stop=["END", "never"])
    assert "".join(pieces) == "one two "
    assert row.finish == "stop"
    assert "".join(row_of("one ENough", stop=["END"])[0]) == "one ENough"
    assert "".join(row_of("ends with EN", stop=["END"])[0]) == "ends with EN"
    assert "".join(row_of("a — b", stop=["— "])[0]) == "a "
    pieces, row = row_of(b"ab\xe2\x80", stop=["\ufffd"])  # whole only once nothing can follow
    assert ("".join(pieces), row.finish) == ("ab", "stop")
    shown = []
    for piece in row_of("xENxENDx", stop=["END"])[0]:
        shown.append(piece)
        assert "END".startswith("".join(shown)[3:] or "E") or "".join(shown) == "xENx"
    assert "".join(shown) == "xENx"


def test_scores_come_with_their_text() -> None:
    row = Continuation(load_tokenizer("bytes"), [256], ["#"])
    came = []
    for byte in "a—b#".encode():
        row.accept([byte], [(-0.5, ())])
        piece = row.take()
        came.append((piece.text, [(s.token, s.offset) for s in piece.scores]) if piece else None)
    dash = "—".encode()
    assert came == [("a", [(97, 0)]), None, None, ("—", [(byte, 1) for byte in dash]), ("b", [(98, 2)]), ("", [])]
    assert row.finish == "stop"
