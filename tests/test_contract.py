"""The one contract: a sequence run whole, in pieces, or a token at a time gives one answer, gradients included."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gss
from gss.choices import ACTIVATIONS, WITH_DROPOUT
from gss.nn.attention import TransformerBlock
from gss.nn.dense import FeedForward
from tests.comparing import assert_equal, relative_error, run, run_prefixes
from tests.conftest import ALL_FAMILIES, FAMILIES, SLIDING, WINDOW_FAMILIES, small_config

LONG = (*FAMILIES, SLIDING)  # the others in shorter tests
EVERY = (*ALL_FAMILIES, SLIDING)
LENGTHS = (1, 2, 17, 511, 512, 513, 1021)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{worst} differs by {errors[worst]:.1e}"


def random_sizes(total: int, most: int, generator: random.Random) -> list[int]:
    sizes = []
    while total:
        sizes.append(generator.randint(1, min(total, most)))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("family", "batch"), [*((f, 3) for f in LONG), *((f, 1) for f in FAMILIES if f != "gss2")])
def test_whole_pieces_steps(family: str, batch: int, dtype: torch.dtype) -> None:
    model = gss.build_model(small_config(family)).to(dtype)
    lengths = LENGTHS if batch > 1 else LENGTHS[:-1]  # the longest, which takes longest, once
    tokens = torch.randint(0, 61, (batch, lengths[-1]))
    ends = [length for length in lengths if length not in (511, 512)]  # 513 steps have their gradients in them
    stepped = dict(zip(ends, run_prefixes(model, tokens, [1] * lengths[-1], ends), strict=True))
    for length in lengths:
        whole = run(model, tokens[:, :length], [length])
        pieces = run(model, tokens[:, :length], random_sizes(length, 400, random.Random(length)))
        steps = stepped.get(length) or {"logits": stepped[lengths[-1]]["logits"][:, :length]}
        assert_same(pieces, whole, TOLERANCE[dtype])
        assert_same(steps, {name: whole[name] for name in steps}, TOLERANCE[dtype])


@pytest.mark.parametrize("family", EVERY)
def test_a_layer_keeps_no_state_that_nobody_asked_for(family: str) -> None:
    model = gss.build_model(small_config(family))
    for layer in model.sequence_layers():
        for length in (1, 2):
            assert not layer(torch.randn(2, length, model.config.width), keep_state=False)[1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", LONG)
def test_whole_and_pieces_at_16384(family: str, dtype: torch.dtype) -> None:
    """Logits and gradients; the pieces end in a hundred single steps."""
    shallow = {"depth": 1, "attention.heads": 1} if family == "transformer" else {}  # all pairs of positions take long
    model = gss.build_model(small_config(family, **shallow)).to(dtype)
    tokens = torch.randint(0, 61, (1, 16_384))
    sizes = [*random_sizes(16_284, 6000, random.Random(0)), *[1] * 100]
    assert_same(run(model, tokens, sizes), run(model, tokens, [16_384]), TOLERANCE[dtype])


@torch.no_grad()
def test_steps_at_16384() -> None:
    """The hybrid, since it has both kinds of layer; the others, with gradients, are in the soak below."""
    model = gss.build_model(small_config("gss-hybrid"))
    tokens = torch.randint(0, 61, (1, 16_384))
    state, logits = None, []
    for token in tokens.split(1, dim=1):
        output, state = model(token, state)
        logits.append(output)
    assert relative_error(torch.cat(logits, dim=1), model(tokens)[0]) <= TOLERANCE[torch.float32]


@pytest.mark.soak
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", LONG)
def test_gradients_through_16384_steps(family: str, dtype: torch.dtype) -> None:
    # The graph keeps every step's whole cache: a key and a value of one number each are what fits in memory.
    narrow = {"depth": 1, "attention.heads": 1, "attention.head_width": 1} if family == "transformer" else {}
    model = gss.build_model(small_config(family, **narrow)).to(dtype)
    tokens = torch.randint(0, 61, (1, 16_384))
    assert_same(run(model, tokens, [1] * 16_384), run(model, tokens, [16_384]), TOLERANCE[dtype])


# The options that the presets leave alone take the same code paths with other numbers in them.
OPTIONS = [
    {"state_space.discretization": "bilinear"},
    {"state_space.imaginary": "plain"},
    {"state_space.step_range": [0.01, 0.1]},
    {"activation": "relu2", "norm": "rmsnorm", "bias": False},
    {"activation": "swish", "attention.head_width": 6},
    {"attention.chunk": 7, "attention.sliding": None, "positions": "sinusoidal"},
    {"attention.sliding": 5, "attention.chunk": None, "positions": "rotary", "feedforward": "gated"},
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(EVERY),
    options=st.sampled_from(OPTIONS),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    batch=st.integers(1, 3),
)
def test_any_pieces(family: str, options: dict[str, object], sizes: list[int], batch: int) -> None:
    torch.manual_seed(0)
    model = gss.build_model(small_config(family, **options)).double()
    tokens = torch.randint(0, 61, (batch, sum(sizes)))
    assert_same(run(model, tokens, sizes), run(model, tokens, [sum(sizes)]), 1e-10)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    model = gss.build_model(small_config("gss-hybrid", activation=activation)).double()
    tokens = torch.randint(0, 61, (2, 24))
    assert_same(run(model, tokens, [1, 9, 14]), run(model, tokens, [24]), 1e-10)


@pytest.mark.parametrize("family", EVERY)
def test_initial_state_is_no_state(family: str) -> None:
    model = gss.build_model(small_config(family)).double()
    tokens = torch.randint(0, 61, (2, 30))
    logits, state = model(tokens, model.initial_state(2))
    expected, expected_state = model(tokens)
    assert relative_error(logits, expected) < 1e-12
    assert torch.equal(state.position, expected_state.position)


@pytest.mark.parametrize("family", EVERY)
def test_gradient_reaches_what_made_the_state(family: str) -> None:
    model = gss.build_model(small_config(family)).double()
    tokens = torch.randint(0, 61, (1, 20))
    _, state = model(tokens[:, :10])
    loss = model(tokens[:, 10:], state)[0].square().sum()
    kept = [t for layer in state.layers for t in layer.values() if t.requires_grad]
    assert all(g.norm() > 0 for g in torch.autograd.grad(loss, kept))
    detached = state.detach()
    assert not any(t.requires_grad for layer in detached.layers for t in layer.values())


@pytest.mark.parametrize("family", EVERY)
def test_a_state_is_a_value(family: str) -> None:
    """Going on from a state leaves it as it was, so two continuations can share it."""
    model = gss.build_model(small_config(family)).double()
    tokens = torch.randint(0, 61, (1, 20))
    _, state = model(tokens[:, :10])
    copies = state.map(torch.clone)
    first, _ = model(tokens[:, 10:], state)
    model(tokens[:, 10:11], state)
    assert torch.equal(model(tokens[:, 10:], state)[0], first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert_equal(state, copies)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", EVERY)
@torch.no_grad()
def test_a_state_holds_on_to_no_more_memory_than_it_says(family: str, batch: int) -> None:
    """A cache of states counts what they say, and a view would keep all of a long piece."""
    model = gss.build_model(small_config(family))
    tokens = torch.randint(0, 61, (batch, 60))
    state = None
    for piece in tokens.split(30, dim=1):
        _, state = model(piece, state)
        for layer in state.layers:
            held = {name: tensor.untyped_storage().nbytes() for name, tensor in layer.items()}
            assert held == {name: tensor.nbytes for name, tensor in layer.items()}


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("family", EVERY)
def test_rows_at_different_positions(family: str, length: int) -> None:
    """Sequences read to different points, joined: each goes on as if alone. Then one is reset, one branched."""
    model = gss.build_model(small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {})).double()
    tokens = torch.randint(0, 61, (3, 60))
    read = [11, 3, 24]
    state = gss.ModelState.join([model(tokens[i : i + 1, :n])[1] for i, n in enumerate(read)])
    piece = torch.stack([tokens[i, n : n + length] for i, n in enumerate(read)])
    logits, state = model(piece, state)
    for i, n in enumerate(read):
        alone = model(tokens[i : i + 1, : n + length])[0][:, n:]
        assert relative_error(logits[i : i + 1], alone) < 1e-11

    reset = state.where(torch.tensor([True, False, False]), model.initial_state(3))
    if model.bounded_state:
        assert_equal(reset.select([0]), model.initial_state(1))
    logits, _ = model(piece, reset)
    assert relative_error(logits[:1], model(piece[:1])[0]) < 1e-11
    whole = torch.cat([tokens[1:2, : read[1] + length], piece[1:2]], dim=1)
    assert relative_error(logits[1:2], model(whole)[0][:, -length:]) < 1e-11

    branched, _ = model(piece[[2, 2]], state.select([2, 2]))
    assert relative_error(branched[0], branched[1]) < 1e-12


@pytest.mark.parametrize("family", EVERY)
def test_packed_documents_are_read_alone(family: str) -> None:
    model = gss.build_model(small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {})).double()
    tokens = torch.randint(0, 61, (2, 60))
    cuts = [[0, 1, 5, 30, 60], [0, 33, 40, 60]]
    starts = torch.zeros(2, 60, dtype=torch.bool)
    for row, cut in enumerate(cuts):
        starts[row, cut[1:-1]] = True  # a row's first token starts a document, marked or not
    packed, state = model.hidden(tokens, keep_state=False, starts=starts)
    assert state is None
    changed = torch.cat([tokens[:, :33].flip(1), tokens[:, 33:]], dim=1)  # the first document of the second row
    assert torch.equal(model.hidden(changed, keep_state=False, starts=starts)[0][1, 33:], packed[1, 33:])
    alone = [
        torch.cat([model.hidden(tokens[row : row + 1, a:b])[0] for a, b in itertools.pairwise(cut)], dim=1)
        for row, cut in enumerate(cuts)
    ]
    assert relative_error(packed, torch.cat(alone)) < 1e-12


@pytest.mark.parametrize("family", [f for f in EVERY if WITH_DROPOUT.issuperset(small_config(f).kinds)])
def test_dropout_in_every_layer_and_only_in_training(family: str) -> None:
    model = gss.build_model(small_config(family, dropout=0.5))
    x = torch.randn(1, 20, model.config.width)
    for layer in model.sequence_layers():
        for part in [part for part in layer.modules() if isinstance(part, FeedForward)]:
            assert not torch.equal(part(x), part(x))
            part.dropout.p = 0.0  # what mixes the tokens has its own
        assert not torch.equal(layer(x)[0], layer(x)[0])
        layer.eval()
        assert torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("family", ["transformer", "slide", SLIDING])  # the others' autocast knows no meta device
def test_a_forward_pass_does_not_wait_for_the_device(family: str) -> None:
    """On the meta device there is nothing to read: whoever asks for a value fails."""
    with torch.device("meta"):
        model = gss.build_model(small_config(family))
        logits, state = model(torch.zeros(2, 12, dtype=torch.int64))
    assert logits.shape == (2, 12, 61)
    assert state.batch == 2


@pytest.mark.parametrize("family", ["gss", "gss2", "dss", *WINDOW_FAMILIES])
def test_state_precision_under_autocast(family: str) -> None:
    # Beside GSS2 layers there is attention, whose cache has the precision of what it holds.
    model = gss.build_model(small_config(family, **{"pattern": ("gss2",)} if family == "gss2" else {}))
    tokens = torch.randint(0, 61, (2, 30))
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(tokens)
        pieces, again = model(tokens[:, :13])
        rest, _ = model(tokens[:, 13:], again)
    assert logits.dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for layer in state.layers for t in layer.values() if t.is_floating_point())
    assert relative_error(logits, model(tokens)[0]) < 0.05
    assert relative_error(torch.cat([pieces, rest], dim=1), logits) < 0.02
    assert model.bounded_state
    assert state.nbytes == model.initial_state(2).nbytes


@torch.no_grad()
@pytest.mark.parametrize("family", EVERY)
def test_a_model_in_bfloat16_sums_up_in_float32(family: str) -> None:
    """Its states, but for the keys and values that attention only keeps."""
    model = gss.build_model(small_config(family))
    tokens = torch.randint(0, 61, (2, 30))
    expected = model(tokens)[0]
    model.bfloat16()
    _, state = model(tokens[:, :13])
    rest, state = model(tokens[:, 13:], state)
    assert relative_error(rest, expected[:, 13:]) < 0.05
    for layer, held in zip(model.layers, state.layers, strict=True):
        kept = {"keys", "values"} if isinstance(layer, TransformerBlock) else set()
        assert all(held[name].dtype == torch.float32 for name in held.keys() - kept - {"length"})
