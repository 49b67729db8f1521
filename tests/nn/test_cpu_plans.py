"""Layers whose decode step is one call of C: the model's own answers, whatever the rows, drafts and fallbacks."""

import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gss
from gss.decode import Decoder, Engine, Request, Sampling
from gss.nn import cpu_plans
from gss.nn.lora import add_lora
from gss.nn.quantized import quantize
from gss.ops import cpu, fast
from gss.ops.cpu.pages import use_large_pages
from tests.comparing import relative_error
from tests.conftest import ALL_FAMILIES, small_config

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C compiler")

# Widths that the C functions take; every kind of layer, norm, activation and reach that they know.
WIDE = {"width": 64, "gate_width": 96, "channels": 32, "feedforward_width": 96, "attention.heads": 2}
FAMILIES = {
    "gss": {},
    "gss-hybrid": {"attention.chunk": 8},
    "transformer": {"attention.chunk": None},
    "llama": {"attention.heads": 1, "activation": "relu2"},
    "gss2": {"matrix_state": {"heads": 2, "value_width": 32, "taps": 3}, "state_space.modes": 8},
    "gss2-one-tap": {
        "matrix_state": {"heads": 1, "value_width": 32, "taps": 1, "feature_map": "relu2"},
        "state_space.modes": 8,
    },
    "slide-all": {"attention.sliding": 1, "activation": "relu", "feedforward": "plain"},
}


def model_of(name: str) -> gss.LanguageModel:
    """A model whose scales and biases are not the ones and zeros that they start at."""
    family = {"gss2-one-tap": "gss2", "slide-all": "llama"}.get(name, name)
    model = gss.build_model(small_config(family, **{**WIDE, **FAMILIES.get(name, {})}), seed=1).eval()
    draw = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", dict.fromkeys([*FAMILIES, *ALL_FAMILIES]))
def test_steps(name: str) -> None:
    """Rows of different lengths, which come and go, and steps by PyTorch between those in C."""
    model = model_of(name)
    exact = model_of(name).double()
    tokens = torch.randint(0, 61, (4, 90), generator=torch.Generator().manual_seed(0))
    whole = exact(tokens)[0]
    states = [model(tokens[[row], :read])[1] for row, read in enumerate((3, 20, 7, 40))]
    decoder = Decoder(model, gss.ModelState.join(states[:2]), block=8)
    assert name not in FAMILIES or all(type(plan).__name__.startswith("Compiled") for plan in decoder._plans)
    running = {0: 3, 1: 20}
    for step in range(40):
        if step == 5:
            decoder.join(gss.ModelState.join(states[2:]))
            running |= {2: 7, 3: 40}
        if step == 25:
            decoder.keep([3, 1])
            running = {3: running[3], 1: running[1]}
        ids = torch.stack([tokens[row, read] for row, read in running.items()])
        if step % 7 == 6:
            with fast.disabled():
                logits = decoder.step(ids)
        else:
            logits = decoder.step(ids)
        for place, (row, read) in enumerate(running.items()):
            assert relative_error(logits[place], whole[row, read]) < 1e-5
        running = {row: read + 1 for row, read in running.items()}
    further = model(tokens[:2, :5], decoder.state())[0]
    for place, (row, read) in enumerate(running.items()):
        alone = exact(torch.cat([tokens[row, :read], tokens[place, :5]]).unsqueeze(0))[0][0, -5:]
        assert relative_error(further[place], alone) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_taken_back(name: str) -> None:
    model = model_of(name)
    exact = model_of(name).double()
    tokens = torch.randint(0, 61, (1, 70), generator=torch.Generator().manual_seed(0))
    expected = exact(tokens)[0][0]
    decoder = Decoder(model, model.initial_state(1), block=16)
    read = 0
    while read < 60:
        for length, kept in ((4, 1), (1, 1), (8, 3), (5, 5)):
            length = min(length, *(plan.ahead() for plan in decoder._plans))
            kept = min(kept, length)
            logits = decoder._read(tokens[:, read : read + length])
            assert relative_error(logits[0, :kept], expected[read : read + kept]) < 1e-5
            for plan in decoder._plans:
                plan.rewind(length - kept)
            decoder._position = decoder._position + kept
            decoder._count(kept)
            read += kept
            if read % 3 == 0:
                decoder.keep([0])
    after = model(tokens[:, :4], decoder.state())[0][0]
    assert relative_error(after, exact(torch.cat([tokens[:, :read], tokens[:, :4]], dim=1))[0][0, -4:]) < 1e-5


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_drafts_in_a_full_window(weights: str | None) -> None:
    """The same tokens with speculation and without, long after the window has been filled."""
    model = model_of("gss2")
    if weights:
        quantize(model, weights)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    found = []
    for speculate in (False, True):
        engine = Engine(model, speculate=speculate)
        engine.submit(Request(prompt=prompt, max_tokens=120, sampling=Sampling(temperature=0)))
        outputs = list(engine.run())
        found.append([token for output in outputs for token in output.tokens])
    assert found[0] == found[1]
    assert len(outputs) < len(found[1])  # some were right


@torch.no_grad()
def test_what_is_left_to_torch() -> None:
    """Products on top of weights, other precisions, vectors of other lengths, norms of queries and keys."""
    lora = model_of("gss")
    add_lora(lora, 2)
    for model in (
        lora,
        model_of("gss").double(),
        gss.build_model(small_config("gss")),
        gss.build_model(small_config("llama", **WIDE, **{"attention.qk_norm": True})),
    ):
        decoder = Decoder(model, model.initial_state(1))
        assert not any(type(plan).__name__.startswith("Compiled") for plan in decoder._plans)
    assert not cpu_plans.usable(model_of("llama").layers[0], "tanh")


@torch.no_grad()
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_what_is_no_number_stays_none(weights: str) -> None:
    model = model_of("gss")
    if weights != "fp32":
        quantize(model, weights)
    model.layers[0].norm.weight[3] = float("nan")
    decoder = Decoder(model, model.initial_state(1))
    assert decoder.generate(1).tokens.item() == -1


@torch.no_grad()
def test_the_largest() -> None:
    largest = cpu.function("gss_largest", "lp")
    assert largest is not None
    for size in (1, 15, 16, 61, 1000):
        x = torch.randn(3, size)
        x[2, size // 2 :] = 9.0  # the first of equals
        for row in x:
            assert largest(size, row.data_ptr()) == row.argmax()
        for wrong in (float("nan"), float("inf")):
            row = x[0].clone()
            row[size // 3] = wrong
            assert largest(size, row.data_ptr()) == -1
        assert largest(size, torch.full((size,), -float("inf")).data_ptr()) == -1


@torch.no_grad()
def test_large_pages(tmp_path: Path) -> None:
    """The same tensors in another place, each still a tensor of its own."""
    model = gss.build_model(gss.preset("gss-tiny", vocab_size=8000), seed=0)
    before = {name: (tensor, tensor.clone(), tensor.data_ptr()) for name, tensor in model.named_parameters()}
    use_large_pages(model)
    for name, tensor in model.named_parameters():
        same, copy, place = before[name]
        assert same is tensor
        assert torch.equal(tensor, copy)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.data_ptr() != place or not hasattr(mmap, "MADV_HUGEPAGE")
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # which refuses tensors that share memory
    small = nn.Linear(4, 4)
    place = small.weight.data_ptr()
    use_large_pages(small)  # not worth a page
    assert small.weight.data_ptr() == place
