"""The decoder gives the model's own logits and states, whatever its block, batch and positions."""

import random

import pytest
import torch

import gss
from gss import decode
from gss.decode import Decoder
from tests.comparing import assert_equal, relative_error
from tests.conftest import ALL_FAMILIES, SLIDING, small_config


def model_of(family: str) -> gss.LanguageModel:
    return gss.build_model(small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {})).double()


@torch.no_grad()
@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("family", [*ALL_FAMILIES, SLIDING])
def test_blocks_are_steps(family: str, block: int) -> None:
    model = model_of(family)
    tokens = torch.randint(0, 61, (2, 100))
    _, state = model(tokens[:, :20])
    decoder = Decoder(model, state, block)
    logits = torch.stack([decoder.step(tokens[:, i]) for i in range(20, 100)], dim=1)
    expected, expected_state = model(tokens)
    assert relative_error(logits, expected[:, 20:]) < 1e-11
    assert torch.equal(decoder.state().position, expected_state.position)


@torch.no_grad()
@pytest.mark.parametrize("family", [*ALL_FAMILIES, SLIDING])
def test_the_state_can_be_taken_at_any_time(family: str) -> None:
    model = model_of(family)
    tokens = torch.randint(0, 61, (1, 60))
    decoder = Decoder(model, model.initial_state(1), block=8)
    for i in range(30):
        decoder.step(tokens[:, i])
        if i in (0, 6, 7, 20, 29):
            logits, _ = model(tokens[:, i + 1 :], decoder.state())
            assert relative_error(logits, model(tokens)[0][:, i + 1 :]) < 1e-11


@torch.no_grad()
@pytest.mark.parametrize("family", [*ALL_FAMILIES, SLIDING])
def test_rows_at_different_positions(family: str) -> None:
    model = model_of(family)
    tokens = torch.randint(0, 61, (3, 60))
    read = [11, 3, 24]
    state = gss.ModelState.join([model(tokens[i : i + 1, :n])[1] for i, n in enumerate(read)])
    untouched = state.map(torch.clone)
    decoder = Decoder(model, state, block=4)
    rows = torch.stack([tokens[i, n : n + 30] for i, n in enumerate(read)])
    logits = torch.stack([decoder.step(rows[:, i]) for i in range(30)], dim=1)
    for i, n in enumerate(read):
        assert relative_error(logits[i : i + 1], model(tokens[i : i + 1, : n + 30])[0][:, n:]) < 1e-11
    after, _ = model(rows[:, :2], decoder.state())
    alone = torch.cat(
        [model(torch.cat([tokens[i, : n + 30], rows[i, :2]])[None])[0][:, -2:] for i, n in enumerate(read)]
    )
    assert relative_error(after, alone) < 1e-11
    assert_equal(state, untouched)


@torch.no_grad()
@pytest.mark.parametrize("family", [*ALL_FAMILIES, SLIDING])
def test_rows_join_and_leave(family: str) -> None:
    """Every row gets the logits that it would get alone, whoever comes and goes beside it."""
    model = model_of(family)
    draw = random.Random(1)
    tokens = torch.randint(0, 61, (12, 60))
    whole = [model(row[None])[0][0] for row in tokens]
    first = draw.randint(1, 20)
    state = model(tokens[:1, :first])[1]
    untouched = state.map(torch.clone)
    decoder = Decoder(model, state, block=8)
    running, waiting = [(0, first)], list(range(1, 12))
    for _ in range(90):
        if waiting and draw.random() < 0.3:
            coming = [waiting.pop() for _ in range(min(len(waiting), draw.randint(1, 3)))]
            starts = [draw.randint(1, 20) for _ in coming]
            decoder.join(
                gss.ModelState.join([model(tokens[[row], :n])[1] for row, n in zip(coming, starts, strict=True)])
            )
            running += list(zip(coming, starts, strict=True))
        if running and draw.random() < 0.2:
            order = draw.sample(range(len(running)), draw.randint(0, len(running)))
            decoder.keep(order)
            running = [running[place] for place in order]
        if any(read >= 60 for _, read in running):
            order = [place for place, (_, read) in enumerate(running) if read < 60]
            decoder.keep(order)
            running = [running[place] for place in order]
        if not running:
            continue
        logits = decoder.step(torch.stack([tokens[row, read] for row, read in running]))
        for place, (row, read) in enumerate(running):
            assert relative_error(logits[place], whole[row][read]) < 1e-11
        running = [(row, read + 1) for row, read in running]
        if draw.random() < 0.1:
            assert decoder.state().position.tolist() == [read for _, read in running]
            after, _ = model(tokens[[row for row, _ in running], :3], decoder.state())
            alone = [model(torch.cat([tokens[row, :read], tokens[row, :3]])[None])[0][0, -3:] for row, read in running]
            assert relative_error(after, torch.stack(alone)) < 1e-11
    assert not waiting
    assert all(torch.equal(tensor, untouched.named()[name]) for name, tensor in state.named().items())


@torch.no_grad()
@pytest.mark.parametrize("family", [*ALL_FAMILIES, SLIDING])
def test_float32(family: str) -> None:
    model = gss.build_model(small_config(family))
    tokens = torch.randint(0, 61, (1, 1500))
    decoder = Decoder(model, model.initial_state(1))
    logits = torch.stack([decoder.step(tokens[:, i]) for i in range(1500)], dim=1)
    assert relative_error(logits, model(tokens)[0]) < 1e-5


def test_bad_input() -> None:
    model = gss.build_model(small_config("gss"))
    with pytest.raises(ValueError, match="at least 1"):
        Decoder(model, model.initial_state(1), block=0)
    other = gss.build_model(small_config("gss", depth=3))
    with pytest.raises(ValueError, match="another model's"):
        Decoder(model, other.initial_state(1))
    for wrong in ({"n": 0, "max_tokens": 1}, {"max_tokens": -1}):
        with pytest.raises(ValueError, match="give n of at least 1 and max_tokens of at least 0"):
            decode.stream(model, [decode.Request(prompt=[1], **wrong), decode.Request(prompt=[1], max_tokens=1)])


@torch.no_grad()
@pytest.mark.parametrize("family", ["transformer", "llama"])
def test_a_long_row_does_not_make_short_ones_long(family: str) -> None:
    """A cache takes memory in proportion to its own row's length, and rows that outgrow theirs stay what they are."""
    model = gss.build_model(small_config(family)).eval()
    ids = torch.randint(61, (1, 700), generator=torch.Generator().manual_seed(0))
    lengths = [3, 60, 5, 600, 62]
    states = [decode.read(model, ids[:, :length])[1] for length in lengths]
    decoder = Decoder(model, states[0])
    for state in states[1:]:
        decoder.join(state)
    held = sum(row.tensor.nbytes for plan in decoder._plans for cache in plan._caches.values() for row in cache.buffers)
    per_token = 2 * len(model.layers) * model.config.width * 4
    assert held <= per_token * (1024 + 4 * 64)
    for step in range(80):
        logits = decoder.step(torch.cat([ids[:, length + step] for length in lengths]))
        if step == 40:
            decoder.keep([0, 4, 2, 3])
            lengths = [lengths[row] for row in (0, 4, 2, 3)]
    for row, length in enumerate(lengths):
        assert torch.allclose(logits[row], model(ids[:, : length + 80])[0][0, -1], atol=1e-4)
    alone = decoder.state().select([1])
    assert torch.allclose(model(ids[:, 142:150], alone)[0], model(ids[:, :150])[0][:, 142:], atol=1e-4)
    decoder.keep([0, 1, 2])
    assert max(room for plan in decoder._plans for room in plan._caches) <= 256
    decoder.keep([])
    assert decoder.state().batch == 0


def test_warming_up_leaves_nothing_behind() -> None:
    """Batches of 1, 2 and 3 rows run, and requests then get what they get from an engine that is new."""
    model = gss.build_model(small_config("gss")).eval()
    engines = [decode.Engine(model, rows=3, cache_bytes=1 << 20) for _ in range(2)]
    sizes, advance = set(), engines[0].decoder.advance
    engines[0].decoder.advance = lambda: sizes.add(engines[0].running) or advance()  # type: ignore[method-assign]
    engines[0].warm_up()
    assert sizes == {1, 2, 3}
    assert engines[0].running == engines[0].waiting == engines[0].cache.nbytes == engines[0].prompts.prompt_tokens == 0
    answers = []
    for engine in engines:
        for seed in range(4):
            engine.submit(decode.Request(prompt=[1, 2, 3], max_tokens=70, seed=seed))
        answers.append([(output.request.seed, output.tokens) for output in engine.run()])
    assert answers[0] == answers[1]
