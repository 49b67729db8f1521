"""Generation: greedy equals teacher forcing, sampling does what its options say, text comes in whole characters."""

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

import gss
import gss.decode.sampler
from gss import decode
from gss.data import load_tokenizer
from gss.decode.sampler import Sampler, Settings
from gss.generate import Sampling, StopStrings, TextPieces, generate, read, stream_texts
from gss.io.states import load_state, save_state
from gss.ops import cpu, fast
from tests.comparing import stream
from tests.conftest import ALL_FAMILIES, small_config
from tests.serve.serving import lively_model

GREEDY = Sampling(temperature=0)


def side_by_side(
    model: gss.LanguageModel, prompts: list[list[int]], seeds: list[int] | None = None, **options: Any
) -> list[list[int]]:
    """The continuations of prompts that are in one batch."""
    places = seeds or [0] * len(prompts)
    requests = [decode.Request(prompt=p, seed=s, **options) for p, s in zip(prompts, places, strict=True)]
    rows: dict[decode.Request, list[int]] = {request: [] for request in requests}
    for output in decode.stream(model, requests):
        rows[output.request] += output.tokens
    return list(rows.values())


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_is_the_argmax_of_teacher_forcing(family: str) -> None:
    model = gss.build_model(small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {}))
    prompt = torch.randint(0, 61, (23,)).tolist()
    produced = list(stream(model, prompt, max_tokens=30, sampling=GREEDY))
    logits = model(torch.tensor([prompt + produced]))[0][0]
    assert produced == logits[22:-1].argmax(-1).tolist()


def test_reading_in_pieces_is_reading_whole() -> None:
    model = gss.build_model(small_config("gss-hybrid")).double()
    tokens = torch.randint(0, 61, (2, 50))
    pieces, whole = read(model, tokens, piece=7)[0], model(tokens)[0][:, -1]
    assert torch.allclose(pieces, whole, atol=1e-12)


def test_goes_on_from_a_state() -> None:
    model = gss.build_model(small_config("gss"))
    context, question = torch.randint(0, 61, (40,)).tolist(), [5, 6]
    _, state = read(model, torch.tensor([context]))
    after = list(stream(model, question, max_tokens=10, sampling=GREEDY, state=state))
    assert after == list(stream(model, context + question, max_tokens=10, sampling=GREEDY))
    questions = [question, [7, 8, 9], [3]]
    rows = side_by_side(model, questions, max_tokens=10, sampling=GREEDY, state=state)
    assert rows == [list(stream(model, context + asked, max_tokens=10, sampling=GREEDY)) for asked in questions]
    with pytest.raises(ValueError, match="the state has 3 sequences, the input 1"):
        side_by_side(model, questions, max_tokens=10, state=state.select([0, 0, 0]))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_ragged_batches_give_what_each_prompt_gives_alone(family: str) -> None:
    model = gss.build_model(small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {}))
    draw = random.Random(0)
    for _ in range(12):
        prompts = [[draw.randrange(61) for _ in range(draw.randint(1, 20))] for _ in range(draw.randint(2, 5))]
        rows = side_by_side(model, prompts, max_tokens=8, sampling=GREEDY)
        assert rows == [list(stream(model, prompt, max_tokens=8, sampling=GREEDY)) for prompt in prompts]


def test_sampled_rows_draw_from_their_own_seeds() -> None:
    model = gss.build_model(small_config("gss"))
    prompts = [[1, 2, 3], [4], [4]]
    rows = side_by_side(model, prompts, seeds=[5, 6, 7], max_tokens=20)
    assert rows == [list(stream(model, p, max_tokens=20, seed=s)) for p, s in zip(prompts, [5, 6, 7], strict=True)]
    eos = rows[0][3]
    ended = side_by_side(model, prompts, seeds=[5, 6, 7], max_tokens=20, eos_id=eos)
    assert ended[0] == rows[0][: rows[0].index(eos)]


def test_rows_that_end_with_their_first_token_leave_the_others_alone() -> None:
    model = gss.build_model(small_config("gss"))
    lengths = {0: 1, 1: 6, 2: 1, 3: 6}
    requests = [decode.Request(prompt=[seed, 2, 3], max_tokens=most, seed=seed) for seed, most in lengths.items()]
    rows: dict[int, list[int]] = {seed: [] for seed in lengths}
    for output in decode.stream(model, requests):
        rows[output.request.seed] += output.tokens
    assert rows == {s: list(stream(model, [s, 2, 3], max_tokens=most, seed=s)) for s, most in lengths.items()}


def test_a_state_is_kept_in_a_file_and_branched(tmp_path) -> None:
    model = gss.build_model(small_config("gss-hybrid"))
    context = torch.randint(0, 61, (1, 40))
    _, state = read(model, context)
    save_state(state, tmp_path / "new" / "context.safetensors")
    kept = load_state(tmp_path / "new" / "context.safetensors")
    questions = [[5, 6], [7, 8]]
    answers = side_by_side(model, questions, max_tokens=10, sampling=GREEDY, state=kept)
    for question, answer in zip(questions, answers, strict=True):
        assert answer == list(stream(model, context[0].tolist() + question, max_tokens=10, sampling=GREEDY))
    (tmp_path / "other").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="does not hold a model's state"):
        load_state(tmp_path / "other")


def test_seeds_and_the_end_of_a_document() -> None:
    model = gss.build_model(small_config("gss"))
    one, same, other = (list(stream(model, [1], max_tokens=40, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    eos = one[10]
    assert list(stream(model, [1], max_tokens=40, seed=1, eos_id=eos)) == one[: one.index(eos)]


def drawn(sampling: Sampling, logits: list[float], seen: list[int] | None = None) -> set[int]:
    rows = torch.tensor([logits]).expand(2000, -1)
    sampler = Sampler(len(logits), rows.device, [Settings(sampling)] * 2000, [seen or []] * 2000)
    return set(sampler.draw(rows, torch.arange(2000)).tokens.tolist())


def test_sampling_options() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert drawn(Sampling(), logits) == {0, 1, 2, 3}
    assert drawn(GREEDY, logits) == {0}
    assert drawn(Sampling(top_k=2), logits) == {0, 1}
    assert drawn(Sampling(top_p=0.79), logits) == {0, 1}
    assert drawn(Sampling(top_p=0.81), logits) == {0, 1, 2}
    assert drawn(Sampling(min_p=0.25), logits) == {0, 1, 2}
    assert drawn(Sampling(temperature=0.01), logits) == {0}
    assert drawn(Sampling(temperature=0, repetition_penalty=2.0), logits, seen=[0]) == {1}
    assert drawn(Sampling(temperature=0, repetition_penalty=2.0), [3.0, 2.0, 1.0], seen=[0, 1]) == {0}


def test_cold_and_tied() -> None:
    assert drawn(Sampling(temperature=1e-308), [1.0, 5.0, 5.0, 2.0]) == {1, 2}
    assert len(drawn(Sampling(top_k=1), [3.0, 3.0, 0.0])) == 1


def test_temperature_one_draws_as_the_model_says() -> None:
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(4, torch.device("cpu"), [Settings(Sampling(), seed) for seed in range(20_000)])
    draws = sampler.draw(probability.log().expand(20_000, -1), torch.zeros(20_000, dtype=torch.int64)).tokens
    assert torch.allclose(torch.bincount(draws) / 20_000, probability, atol=0.015)


def test_a_draw_is_its_seeds_and_positions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands beside a row, and however few candidates are looked at first; all 64 bits of a seed count."""
    kinds = [
        Sampling(top_p=0.9),
        Sampling(top_k=7, temperature=2.0),
        Sampling(top_p=0.3, top_k=400),
        GREEDY,
        Sampling(),
    ]
    rows = [Settings(kind, seed) for seed in (3, 3 + 2**32, -1) for kind in kinds]
    logits, position = 3 * torch.randn(1, 500).expand(len(rows), -1), torch.full((len(rows),), 12)
    together = Sampler(500, logits.device, rows).draw(logits, position).tokens.tolist()
    for row, settings in enumerate(rows):
        alone = Sampler(500, logits.device, [settings]).draw(logits[:1], position[:1])
        assert alone.tokens.tolist() == [together[row]]
    for candidates in (256, 500):  # by torch's operations, where a CPU has a C function too
        monkeypatch.setattr(gss.decode.sampler, "_CANDIDATES", candidates)
        with fast.disabled():
            assert Sampler(500, logits.device, rows).draw(logits, position).tokens.tolist() == together
    flat = torch.zeros(2, 500)
    for seeds in ((3, 3 + 2**32), (2**63, 0), (-1, 2**32 - 1)):
        pair = Sampler(500, flat.device, [Settings(Sampling(), seed) for seed in seeds])
        draws = torch.stack([pair.draw(flat, torch.tensor([at, at])).tokens for at in range(100)])
        assert (draws[:, 0] == draws[:, 1]).sum() < 5


@pytest.mark.skipif(cpu.library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 8.0])
def test_the_c_function_draws_what_torch_draws(spread: float) -> None:
    kinds = [Sampling(), GREEDY, Sampling(temperature=1e-308), Sampling(repetition_penalty=1.3)]
    kinds += [Sampling(temperature=t, top_k=k) for t, k in ((1.5, 1), (1.0, 40), (0.5, 999))]
    kinds += [Sampling(temperature=t, top_p=p, min_p=m) for t, p, m in ((0.8, 0.95, None), (2.0, 0.999, 0.01))]
    kinds += [Sampling(top_k=300, top_p=0.5, repetition_penalty=0.7), Sampling(temperature=0, repetition_penalty=1.5)]
    rows = [Settings(kind, seed * 2**40 - 5, 3) for seed in range(3) for kind in kinds]
    own, plain = (Sampler(1001, torch.device("cpu"), rows, [range(90)] * len(rows)) for _ in range(2))
    for position in torch.arange(6 * len(rows)).view(6, -1):
        logits = spread * torch.randn(len(rows), 1001)
        logits[:, 70:75] = logits[:, 600:605] = spread  # equal ones, of which any may be left out
        given = logits.clone()
        drawn = own.draw(logits, position)
        with fast.disabled():
            expected = plain.draw(logits, position)
        assert torch.equal(logits, given)
        if spread:
            assert drawn.tokens.tolist() == expected.tokens.tolist()
            assert torch.equal(own.tensors()[2], plain.tensors()[2])
            assert all(torch.equal(*pair) for pair in zip(drawn.scores, expected.scores, strict=True))
        else:
            assert ((drawn.tokens >= 0) & (drawn.tokens < 1001)).all()
    logits[0, 3], logits[1, 4] = float("nan"), float("inf")
    assert (own.draw(logits, position).tokens < 0).tolist() == [True, True, *[False] * (len(rows) - 2)]


def test_text_comes_in_whole_characters() -> None:
    tokenizer = load_tokenizer("bytes")

    def shown(tokens: list[int]) -> list[str]:
        pieces = TextPieces(tokenizer)
        return [piece for piece in (*map(pieces.push, tokens), pieces.rest()) if piece]

    text = "naïve — 🙂!"
    assert shown(tokenizer.encode(text).tolist()) == list(text)
    broken = [0xF0, 0x9F, *b"ab"]
    assert "".join(shown(broken)) == tokenizer.decode(broken)


def test_characters_that_a_tokenizer_json_spells_in_bytes(tmp_path: Path) -> None:
    """One after another, as in Llama's vocabulary; and bytes that are none leave those beside them alone."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "</s>": 257, "a": 258}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    for content in (
        "日本語".encode() * 30,
        "😀é😀".encode(),
        b"\xff".join(["😀".encode()] * 3),
        "é".encode() + b"\xc3",
    ):
        ids = [*content, 258, *content]
        expected = content.decode(errors="replace") + "a" + content.decode(errors="replace")
        one_by_one, together = TextPieces(tokenizer), TextPieces(tokenizer)
        assert tokenizer.decode(ids) == expected
        assert "".join(map(one_by_one.push, ids)) + one_by_one.rest() == expected
        assert together.push(*ids) + together.rest() == expected


def test_texts_side_by_side() -> None:
    """Several prompts and samples, fewer rows than texts, stop strings: every text is what it is alone."""
    model, tokenizer = lively_model(), load_tokenizer("bytes")
    prompts, options = ["the ", "", "a cat sat"], {"max_tokens": 12, "stop": ["e", "\n"]}
    texts, ends, counts = {}, {}, {}
    for piece in stream_texts(model, tokenizer, prompts, n=2, rows=4, seed=5, **options):
        key = piece.prompt, piece.sample
        assert key not in ends
        texts[key] = texts.get(key, "") + piece.text
        counts[key] = counts.get(key, 0) + piece.tokens
        if piece.finish:
            ends[key] = piece.finish
    assert len(texts) == len(ends) == 6
    assert texts[0, 0] != texts[0, 1]  # each continuation has a seed of its own
    for (place, sample), text in texts.items():
        assert text == generate(model, tokenizer, prompts[place], seed=5 + sample, **options)
        assert ends[place, sample] == ("length" if counts[place, sample] == 12 else "stop")
    assert set(ends.values()) == {"length", "stop"}


def test_more_samples_of_a_prompt_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, most = lively_model(), load_tokenizer("bytes"), []
    step = decode.Engine.step
    monkeypatch.setattr(decode.Engine, "step", lambda self: most.append(self.running) or step(self))
    texts: dict[int, str] = {}
    for piece in stream_texts(model, tokenizer, ["the "], n=7, rows=3, seed=5, max_tokens=6):
        texts[piece.sample] = texts.get(piece.sample, "") + piece.text
    assert texts == {i: generate(model, tokenizer, "the ", seed=5 + i, max_tokens=6) for i in range(7)}
    assert max(most) == 3


def test_a_stop_string_ends_one_text_alone() -> None:
    model, tokenizer = gss.build_model(gss.preset("gss-tiny"), seed=0), load_tokenizer("bytes")
    prompts, options = ["one", "another"], {"max_tokens": 40, "seed": 1}
    alone = [generate(model, tokenizer, prompt, **options) for prompt in prompts]
    stop = next(letter for letter in alone[0][:20] if letter not in alone[1])
    texts = ["", ""]
    for piece in stream_texts(model, tokenizer, prompts, stop=[stop], **options):
        texts[piece.prompt] += piece.text
    assert texts == [alone[0][: alone[0].index(stop)], alone[1]]


@pytest.mark.parametrize("together", [True, False])
def test_marks_at_the_end_of_a_prompt_are_not_repeated(together: bool) -> None:
    tokenizer = load_tokenizer("bytes")

    def continued(prompt: bytes, after: bytes) -> str:
        pieces = TextPieces(tokenizer, list(prompt))
        parts = [pieces.push(*after)] if together else [pieces.push(byte) for byte in after]
        return "".join(parts) + pieces.rest()

    mark, euro = "\ufffd".encode(), "€".encode()
    for prompt, after, text in (
        (b"a" + mark, b"b", "b"),
        (b"a" + mark, mark + b"b", "\ufffdb"),
        (3 * mark, b"bc", "bc"),
        (3 * mark, 4 * mark, 4 * "\ufffd"),
        (mark, b"", ""),
        (mark, euro, "€"),
        (b"a" + euro[:1], euro[1:] + b"b", "€b"),  # what the prompt has begun is finished
        (b"a" + euro[:2], b"b", "b"),
        (euro[:1], b"", ""),
    ):
        assert continued(prompt, after) == text, (prompt, after)


def test_stop_strings() -> None:
    def until(marks: list[str], *pieces: str) -> list[str]:
        stop = StopStrings(marks)
        return [shown for shown in (*map(stop.push, pieces), stop.rest()) if shown]

    assert "".join(until(["END"], "ab", "E", "N", "x", "EN", "D", "more")) == "abENx"
    assert "".join(until(["END", "b"], "ab", "END")) == "a"
    assert "".join(until(["END"], "abEN")) == "abEN"
    assert until([], "a", "b") == ["a", "b"]


@given(
    st.text("abc", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.sets(st.integers(1, 11)),
)
def test_stop_strings_do_not_depend_on_how_a_text_is_cut(text: str, marks: list[str], cuts: set[int]) -> None:
    """Speculation gives several tokens at once, and must not change the text."""

    def until(pieces: Iterable[str]) -> str:
        stop = StopStrings(marks)
        return "".join(map(stop.push, pieces)) + stop.rest()

    places = [0, *sorted(cuts), len(text)]
    shown = until(text[start:end] for start, end in itertools.pairwise(places))
    assert shown == until(text)
    assert text.startswith(shown)
    assert not any(mark in shown for mark in marks)


def test_generate() -> None:
    model, tokenizer = gss.build_model(small_config("gss", vocab_size=257)), load_tokenizer("bytes")
    text = generate(model, tokenizer, "def", max_tokens=20, seed=3)
    assert text == generate(model, tokenizer, "def", max_tokens=20, seed=3)
    letter = text[5]
    assert generate(model, tokenizer, "def", max_tokens=20, seed=3, stop=[letter]) == text[: text.index(letter)]
    two = text[5:7]  # one string, not its letters
    assert generate(model, tokenizer, "def", max_tokens=20, seed=3, stop=two) == text[: text.index(two)]


def test_what_a_stop_string_ends_is_the_same_however_many_tokens_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = gss.build_model(small_config("gss", vocab_size=257), seed=1).eval(), load_tokenizer("bytes")
    drawn = [*b"abcab"]

    def run(self: decode.Engine) -> Iterator[decode.Output]:
        (request,) = self._waiting
        for tokens in [drawn] if self.speculate else [[token] for token in drawn]:
            yield decode.Output(request, 0, tokens, [], "length" if self.speculate else None)

    monkeypatch.setattr(decode.Engine, "run", run)
    for stop in (["ca"], ["ab", "abc"], ["cab"]):
        ended = []
        for speculate in (False, True):
            pieces = list(stream_texts(model, tokenizer, ["x"], max_tokens=5, stop=stop, speculate=speculate))
            ended.append(("".join(p.text for p in pieces), sum(p.tokens for p in pieces), pieces[-1].finish))
        assert ended[0] == ended[1]
        assert ended[0][2] == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_bad_sampling(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)


def test_bad_input() -> None:
    model, tokenizer = gss.build_model(small_config("gss", vocab_size=257)), load_tokenizer("bytes")
    with pytest.raises(ValueError, match="max_tokens"):
        generate(model, tokenizer, "a", max_tokens=0)
    with pytest.raises(ValueError, match="n must be at least 1, not 5 and 0"):
        stream_texts(model, tokenizer, ["a"], max_tokens=5, n=0)
    with pytest.raises(ValueError, match="stop string is empty"):
        generate(model, tokenizer, "a", stop=[""])
    with pytest.raises(ValueError, match="nothing to read"):
        list(stream(model, [], max_tokens=3))
    with pytest.raises(ValueError, match="token id 300 is outside the vocabulary of 257"):
        list(stream(model, [1, 300], max_tokens=3))
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        generate(model, tokenizer, "a")
