"""The decoding kernels against the plain decoder: on the CPU in Triton's interpreter, on a CUDA device as a graph."""

import importlib.util
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import gss
from gss.decode import GREEDY, Decoder, Engine, Request, Sampling, decoder
from gss.decode.sampler import Sampler, Settings
from gss.ops import fast
from tests.comparing import relative_error
from tests.conftest import ALL_FAMILIES, small_config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device")),
    pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU]),
]
# Chunks that end while a test reads.
HYBRID: dict[str, object] = {"pattern": ("gss", "attention", "gss"), "depth": 3, "attention.chunk": 8}
# Windows that are full while a test reads, and norms and rotations of queries and keys.
KEYED: dict[str, object] = {
    "pattern": ("gss2", "attention"), "depth": 2, "attention.chunk": None, "attention.sliding": 7,
    "attention.qk_norm": True, "attention.head_width": 6, "positions": "rotary", "feedforward": "gated",
    "norm": "rmsnorm", "bias": False, "activation": "swish",
    "matrix_state": {"heads": 3, "value_width": 10}, "state_space.modes": 5,
}  # fmt: skip
# Sizes that no tile divides, and every choice that the kernels know: (batch, block, config).
CASES = {
    "one": (1, 3, {}),
    "one, rms, no bias, positions": (1, 4, {"norm": "rmsnorm", "bias": False, "positions": "sinusoidal"}),
    "one, relu": (1, 1, {"activation": "relu", "depth": 1}),
    "three": (3, 3, {"activation": "swish"}),
    "seventeen, rms, no bias": (17, 3, {"norm": "rmsnorm", "bias": False, "activation": "relu2"}),
    "seventy, positions": (70, 2, {"positions": "sinusoidal", "depth": 1}),
    "two, fewer slices than usual": (2, 2, {"gate_width": 512, "depth": 1}),
    "twenty, fewer slices than usual": (20, 2, {"gate_width": 256, "depth": 1}),
    "one, hybrid": (1, 3, HYBRID),
    "one, hybrid, wide heads, positions": (
        1,
        4,
        {**HYBRID, "attention.head_width": 20, "attention.heads": 3, "positions": "sinusoidal", "activation": "swish"},
    ),
    "two, hybrid, wide": (2, 3, {**HYBRID, "attention.head_width": 160, "feedforward_width": 300}),
    "three, hybrid, rms, no bias": (3, 3, {**HYBRID, "norm": "rmsnorm", "bias": False, "activation": "relu"}),
    "one, gss2 and hybrid": (1, 3, KEYED),
    "three, gss2 and hybrid": (3, 4, {**KEYED, "attention.qk_norm": False}),
    "two, gss2, relu2": (
        2,
        3,
        {
            **KEYED,
            "pattern": ("gss2",),
            "depth": 1,
            "bias": True,
            "zero_outputs": False,
            "matrix_state": {"heads": 3, "value_width": 10, "feature_map": "relu2"},
        },
    ),
    "three, attention last": (3, 4, {**HYBRID, "pattern": ("gss", "attention"), "depth": 2}),
}


@pytest.fixture(scope="module")
def cuda() -> ModuleType:
    import gss.decode.cuda

    return gss.decode.cuda


def model_of(device: str = "cpu", **overrides: object) -> gss.LanguageModel:
    """A small model with weights that bfloat16 has, so that what differs is the kernels' doing."""
    sizes = {"width": 22, "gate_width": 37, "channels": 19, "vocab_size": 61}
    model = gss.build_model(small_config("gss", **{**sizes, **overrides}))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.bfloat16().float()
        elif parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(device)


def started(model: gss.LanguageModel, batch: int) -> tuple[torch.Tensor, gss.ModelState]:
    """Tokens to go on with, and a state with rows at different positions."""
    device = model.embedding.weight.device
    tokens = torch.randint(0, 61, (batch, 16), device=device)
    with torch.no_grad():
        _, state = model(tokens[:, :6])
    position = state.position + torch.arange(batch, device=device)
    return tokens[:, 6:], gss.ModelState(position, state.layers)


def check_states(found: gss.ModelState, expected: gss.ModelState, bound: float) -> None:
    """Every layer's state, and nothing of a cache beyond what its row has read."""
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert layer.keys() == other.keys()
        if "keys" not in layer:
            errors = {name: relative_error(layer[name], other[name]) for name in layer}
            assert max(errors.values()) <= bound, errors
            continue
        assert torch.equal(layer["length"], other["length"])
        for row, length in enumerate(layer["length"].tolist()):
            filled = (length - 1) % layer["keys"].shape[1] + 1
            for name in ("keys", "values"):
                assert relative_error(layer[name][row, :filled], other[name][row, :filled]) <= bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_steps_and_states(cuda: ModuleType, case: str, device: str) -> None:
    batch, block, overrides = CASES[case]
    # One sequence: float32 but for the weights. Several: activations in bfloat16, as under autocast.
    compare_decoders(
        cuda, model_of(device, **overrides), batch, block, 2e-6 if batch == 1 and "hybrid" not in case else 2e-2
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_by_its_own_kernels_or_not_at_all(cuda: ModuleType, family: str, device: str) -> None:
    model = gss.build_model(small_config(family)).to(device)
    if all(layer.gpu_plan(3) for layer in model.sequence_layers()):
        for batch in (1, 2):  # one row and several take different kernels
            compare_decoders(cuda, model, batch, 3, 2e-2)
    else:
        with pytest.raises(ValueError, match="without GPU kernels"):
            cuda.GraphDecoder(model, model.initial_state(1))


def compare_decoders(cuda: ModuleType, model: gss.LanguageModel, batch: int, block: int, bound: float) -> None:
    """Steps and states of the kernels' decoder and of the plain one."""
    device = model.embedding.weight.device.type
    tokens, state = started(model, batch)
    untouched = state.map(torch.clone)
    fast_steps, plain = cuda.GraphDecoder(model, state, block), Decoder(model, state, block)
    count = 10 if device == "cuda" else 5 if batch < 64 else 3
    logits, expected = (
        torch.stack([steps.step(tokens[:, i]) for i in range(count)], dim=1) for steps in (fast_steps, plain)
    )
    assert relative_error(logits, expected) < bound
    after, plain_after = fast_steps.state(), plain.state()
    assert torch.equal(after.position, plain_after.position)
    check_states(after, plain_after, bound)
    check_states(state, untouched, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_attention_in_slices(cuda: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence: slices of the chunk that are full, partly full and empty, until the next chunk has begun."""
    from gss.ops.gpu.decode_launch import Tile, Tiles

    chunk = 7
    model = model_of(device, **{**HYBRID, "attention.chunk": chunk})
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    tiles = replace(Tiles.for_batch(1, capability), attend=Tile(rows=2))
    assert tiles.attention_slices(chunk, 1) == (2, -(-chunk // 2))
    monkeypatch.setattr(Tiles, "for_batch", lambda batch, capability: tiles)
    tokens, _ = started(model, 1)
    state = model.initial_state(1)
    decoders = cuda.GraphDecoder(model, state, block=3), Decoder(model, state, block=3)
    logits, expected = (torch.stack([steps.step(tokens[:, i % 10]) for i in range(chunk + 2)]) for steps in decoders)
    assert relative_error(logits, expected) < 5e-3
    check_states(decoders[0].state(), decoders[1].state(), 5e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_is_the_likeliest_of_each_step(cuda: ModuleType, batch: int, device: str) -> None:
    model = model_of(device, depth=1)
    tokens, state = started(model, batch)
    count = 7 if device == "cpu" else 40
    decoders = [cuda.GraphDecoder(model, state, block=3) for _ in range(2)]
    chosen = torch.cat([decoders[0].generate(n, tokens[:, i]).tokens for i, n in enumerate((1, count))]).T
    stepped = [decoders[1].step(tokens[:, 0]).argmax(-1)]
    token = tokens[:, 1]
    for _ in range(count):
        token = decoders[1].step(token).argmax(-1)
        stepped.append(token)
    assert torch.equal(chosen, torch.stack(stepped, dim=1))
    for layer, other in zip(decoders[0].state().layers, decoders[1].state().layers, strict=True):
        assert torch.equal(layer["modes"], other["modes"])


@pytest.mark.parametrize("device", DEVICES)
def test_the_sampling_kernel(device: str) -> None:
    """The tokens that plain operations draw, of every kind of sampling; −1 where logits are not finite."""
    from gss.ops.gpu import sample

    narrow = Sampling(temperature=1.3, top_k=50, top_p=0.5, min_p=0.01)
    kinds = [Sampling(), Sampling(temperature=0.7, top_p=0.9), Sampling(top_k=5), GREEDY, narrow]
    kinds += [Sampling(temperature=0.9, min_p=0.05, repetition_penalty=1.3), Sampling(temperature=1e-308)]
    rows = [Settings(kind, seed * 2**40 - 5) for seed in range(2) for kind in kinds]
    samplers = [Sampler(300, torch.device(device), rows, [range(90)] * len(rows)) for _ in range(2)]
    for position in torch.arange(4 * len(rows), device=device).view(4, -1):
        logits = 2 * torch.randn(len(rows), 300, device=device)
        tokens = torch.empty_like(position)
        sample.draw(logits, *samplers[0].tensors(), position, tokens, penalised=True)
        with fast.disabled():
            assert torch.equal(tokens, samplers[1].draw(logits, position).tokens)
        assert torch.equal(samplers[0].tensors()[2], samplers[1].tensors()[2])
    logits[0, 3], logits[1, 4] = float("nan"), float("inf")
    sample.draw(logits, *samplers[0].tensors(), position, tokens, penalised=False)
    assert (tokens[:2] == -1).all()
    assert (tokens[2:] >= 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_graph_draws_as_its_logits_say(cuda: ModuleType, device: str) -> None:
    """Rows with settings of their own, in the graph of several steps and in single ones, across the end of a block."""
    model = model_of(device, depth=1)
    _, state = started(model, 3)
    rows = [Settings(Sampling(top_p=0.9), 5, 2), Settings(Sampling(repetition_penalty=1.5), 6), Settings(GREEDY, 7)]
    decoders = [cuda.GraphDecoder(model, state.select([0]), block=8) for _ in range(2)]
    for each in decoders:
        each.keep([])
        each.join(state, Sampler(61, state.position.device, rows), torch.tensor([1, 2, 3], device=device))
        each.keep([2, 0, 1])
    drawn = torch.cat([decoders[0].generate(9).tokens for _ in range(2 if device == "cuda" else 1)])
    sampler = Sampler(61, state.position.device, [rows[2], rows[0], rows[1]])
    tokens = torch.tensor([3, 1, 2], device=device)
    for step in drawn:
        logits = decoders[1].step(tokens)
        tokens, scores = sampler.draw(logits, decoders[1].state().position)
        assert torch.equal(step, tokens)
        assert torch.allclose(scores[0], logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-5)


def test_a_token_outside_the_vocabulary_shows(cuda: ModuleType) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(device, depth=1)
    steps = cuda.GraphDecoder(model, model.initial_state(1))
    assert torch.isnan(steps.step(torch.tensor([61], device=device))).all()


def test_what_the_kernels_lack_is_refused(cuda: ModuleType) -> None:
    per_channel = gss.build_model(small_config("gss", **{"state_space.step_range": (1e-3, 1e-1)}))
    everything = gss.build_model(small_config("gss-hybrid", **{"attention.chunk": None}))
    broad = gss.build_model(small_config("gss-hybrid", **{"attention.head_width": 4096}))
    transformer = gss.build_model(small_config("transformer"))
    doubles = gss.build_model(small_config("gss")).double()
    for model in (per_channel, everything, broad, transformer, doubles):
        assert not cuda.plans(model, 64)
        with pytest.raises(ValueError, match="without GPU kernels"):
            cuda.GraphDecoder(model, model.initial_state(1))
    model = model_of()
    assert cuda.plans(model, 64)
    with pytest.raises(ValueError, match="at least 1"):
        cuda.GraphDecoder(model, model.initial_state(1), block=0)
    with pytest.raises(ValueError, match="at least 1"):
        cuda.GraphDecoder(model, model.initial_state(1)).generate(0)


def test_the_plain_decoder_elsewhere() -> None:
    model = model_of()
    assert isinstance(decoder(model, model.initial_state(2)), Decoder)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(decoder(model, model.initial_state(2)), Decoder)


@pytest.mark.gpu
@ON_GPU
def test_the_fastest_that_fits(cuda: ModuleType) -> None:
    model = model_of("cuda")
    state = model.initial_state(2)
    assert isinstance(decoder(model, state), Decoder)  # float32 is asked for
    with torch.autocast("cuda", torch.bfloat16):
        assert isinstance(decoder(model, state), cuda.GraphDecoder)
        with fast.disabled():
            assert isinstance(decoder(model, state), Decoder)
    assert isinstance(decoder(model.bfloat16(), state), cuda.GraphDecoder)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [{"depth": 1}, HYBRID], ids=["gss", "hybrid"])
def test_sequences_join_and_leave(cuda: ModuleType, sizes: dict[str, object], device: str) -> None:
    model = model_of(device, **sizes)
    tokens, state = started(model, 6)
    decoders = [kind(model, state.select([0]), 4) for kind in (cuda.GraphDecoder, Decoder)]
    rows = [0]
    # Before each step: rows that stay, by their places, and rows that come.
    changes = (([0], []), ([0], [1, 2]), ([2, 1], []), ([0, 1], [3, 4, 5]), ([4], []), ([], [2, 0]), ([1, 0], []))
    for place, (kept, come) in enumerate(changes):
        for steps in decoders:
            steps.keep(kept)
            if come:
                steps.join(state.select(come))
        rows = [rows[i] for i in kept] + come
        actual, expected = (steps.step(tokens[rows, place]) for steps in decoders)
        assert relative_error(actual, expected) < 2e-2
        after, plain_after = (steps.state() for steps in decoders)
        assert torch.equal(after.position, plain_after.position)
        check_states(after, plain_after, 2e-2)


def test_buffers_of_every_size_are_warmed_up(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server compiles and captures nothing while it answers; they are kept."""
    model, block = model_of("cuda" if torch.cuda.is_available() else "cpu", depth=1).eval(), 4
    folds, fold = set(), cuda.GraphDecoder._fold_layers
    monkeypatch.setattr("gss.decode.engine.BLOCK", block)
    monkeypatch.setattr(cuda, "UNROLL", 2)
    monkeypatch.setattr(cuda.GraphDecoder, "stride", 2)
    monkeypatch.setattr("gss.decode.engine.decoder", lambda model, state: cuda.GraphDecoder(model, state, block))
    monkeypatch.setattr(
        cuda.GraphDecoder,
        "_fold_layers",
        lambda self, late: folds.add((self._room.stream.batch, late)) or fold(self, late),
    )
    engine = Engine(model, rows=3, speculate=False)
    engine.warm_up()
    assert isinstance(engine.decoder, cuda.GraphDecoder)
    rooms = dict(engine.decoder._rooms)
    assert rooms.keys() == {1, 2, 4}
    assert folds >= {(1, False), (2, True), (2, False), (4, True), (4, False)}
    engine.submit(Request(prompt=[5], max_tokens=3, n=3))
    assert sum(len(output.tokens) for output in engine.run()) == 9
    assert engine.decoder._rooms == rooms


@pytest.mark.parametrize("constant", [0.0, 1.0])
@pytest.mark.parametrize("device", DEVICES)
def test_folds_do_not_drift(device: str, constant: float) -> None:
    """300 blocks with slow modes: 5e-7 and 8e-7 where the state is float32, and more with every further block."""
    import triton

    from gss.nn.gpu_plans import GSSPlan
    from gss.ops.gpu import decode_mixers

    layer = model_of(device, depth=1, **{"state_space.modes": 16, "channels": 4}).layers[0]
    with torch.no_grad():
        layer.state_space.log_decay.uniform_(-20, -14)
        layer.state_space.frequency.uniform_(-3, 0) if not constant else layer.state_space.frequency.fill_(-16)
        plan, inputs = GSSPlan(layer, 16), torch.full((16, 4), constant, device=device)
        state = torch.randn(2, 4, 16, dtype=torch.float64, device=device)
        added = torch.exp(plan.log_a.unsqueeze(-1) * torch.arange(300 * 16, device=device)).sum(-1)  # [1, N]
        expected = torch.exp(300 * 16 * plan.log_a) * torch.complex(*state) + constant * added
        for _ in range(300):
            decode_mixers.fold_block[(1,)](
                state, inputs, inputs, plan.power, plan.into, plan.planes, plan.out_of, torch.empty_like(inputs),
                4, 4, 16, 16, False, W_PAD=16, ROWS=16, MODES=16,
                PRECISION="ieee" if triton.knobs.runtime.interpret else "tf32x3",
            )  # fmt: skip
    assert relative_error(torch.complex(*state), expected) < 3e-7
