"""Weights in fewer bits: what packing keeps, every way to multiply by it, and models that are loaded with it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gss
from gss.accounting import account
from gss.decode import Decoder, blocked
from gss.io import runs
from gss.lm import quantize_run
from gss.nn.dense import dense
from gss.nn.quantized import QuantizedEmbedding, QuantizedLinear, packed_twin, packed_weight, quantize, weights_of
from gss.ops import cpu, fast
from gss.ops.products import BITS, MOST_ROWS, Packed, linear, pack, unpacked
from tests.comparing import relative_error
from tests.conftest import ALL_FAMILIES, small_config
from tests.making import save_run

# The root of a group's mean square error, of its largest weight: half a step of rounding, or of bf16's last bit.
ROUNDING = {16: 2.0**-9, 8: 0.5 / 128, 4: 0.5 / 8}
# What rounding the inputs of a product to 8 bits adds, relative to the result.
INPUTS = {16: 1e-6, 8: 0.012, 4: 0.012}


TEXT = "It was a dark night, and the wind had risen. He went to the window and looked out upon the sea."


@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize("outputs", [1, 16, 37])
def test_packing_rounds(outputs: int, bits: int) -> None:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, 128)
    weight[0, :64] = 0
    packed = pack(weight, bits)
    kept = unpacked(packed).float()
    assert (packed.bits, packed.inputs, packed.outputs) == (bits, 128, outputs)
    groups, error = weight.view(outputs, 2, 64), (kept - weight).view(outputs, 2, 64)
    assert (error.square().mean(-1).sqrt() <= ROUNDING[bits] * groups.abs().amax(-1)).all()
    rows = torch.tensor([[outputs - 1, 0], [0, outputs // 2]])
    assert torch.equal(unpacked(packed, rows).float(), kept[rows])


@torch.no_grad()
@pytest.mark.parametrize("bits", [32, *BITS.values()])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (40, 128), (67, 192)])
def test_products_by_c(outputs: int, inputs: int, bits: int) -> None:
    if cpu.library() is None:
        pytest.skip("there is no C compiler")
    torch.manual_seed(bits)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = Packed(weight, None, outputs) if bits == 32 else pack(weight, bits)
    x = torch.randn(MOST_ROWS, inputs)
    x[1] = 0
    together = linear(x, packed, bias)
    with fast.disabled():
        assert relative_error(together, linear(x, packed, bias)) < INPUTS.get(bits, 1e-6)
    for rows in range(1, MOST_ROWS + 1):  # to the last bit what each row is alone, whatever stands beside it
        assert torch.equal(linear(x[:rows], packed, bias), together[:rows])
    assert torch.equal(linear(x.view(2, 4, inputs), packed), linear(x, packed).view(2, 4, outputs))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5), (1, 2, 5), (3, 5), (0, 5)])
def test_products_by_torch(shape: tuple[int, ...], bias: bool) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    shift = torch.randn(8, dtype=torch.float64) if bias else None
    with torch.no_grad():
        torch.testing.assert_close(linear(x, Packed(weight, None, 8), shift), F.linear(x, weight, shift))


@torch.no_grad()
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_decoding_by_such_products(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_MANY_PARAMETERS", 0)
    tokens = torch.randint(0, 61, (2, 30))
    for kind, error in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        model = gss.build_model(small_config(family)).to(kind)
        decoder = Decoder(model, model.initial_state(2), block=4)
        logits = torch.stack([decoder.step(tokens[:, i]) for i in range(30)], dim=1)
        assert relative_error(logits, model(tokens)[0]) < error
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(decoder.step(tokens[:, 0])).all()


@torch.no_grad()
@pytest.mark.parametrize("family", ["gss-hybrid", "gss2", "transformer", "dss"])
def test_a_large_model_whose_parameters_are_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_MANY_PARAMETERS", 0)
    model, tokens = gss.build_model(small_config(family)).bfloat16(), torch.randint(0, 61, (2, 30))
    decoder = Decoder(model, model.initial_state(2))
    logits = torch.stack([decoder.step(tokens[:, i]) for i in range(30)], dim=1)
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits.float(), model(tokens)[0].float()) < 0.05


def test_which_modules_are_packed() -> None:
    assert isinstance(packed_twin(nn.Embedding(5, 128), 8), QuantizedEmbedding)
    for layer, bits in ((nn.Linear(64, 512), 8), (nn.Linear(512, 128), 8), (nn.Linear(192, 256), 4)):
        assert isinstance(twin := packed_twin(layer, 4), QuantizedLinear)
        assert packed_weight(twin).bits == bits  # 8 in narrow ones
    last = dense(192, 256, gss.preset("gss-tiny"), last=True)
    assert packed_weight(packed_twin(last, 4)).bits == 8  # type: ignore[arg-type]
    assert packed_twin(nn.Linear(65, 5), 8) is None  # no groups of 64
    assert packed_twin(nn.LayerNorm(64), 8) is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the box's model in float32, moved off the numbers that its own format has."""
    lm = gss.load(weights="fp32")
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter *= 1 + 1e-2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return save_run(lm.model, tmp_path_factory.mktemp("whole") / "run", lm.tokenizer)


@torch.no_grad()
@pytest.mark.parametrize(
    ("weights", "error", "size"), [("bf16", 1e-4, 2.13), ("int8", 0.01, 1.21), ("int4", 0.03, 0.97)]
)
def test_a_quantized_run(whole: Path, tmp_path: Path, weights: str, error: float, size: float) -> None:
    source, folder = gss.load(whole), quantize_run(whole, tmp_path / weights, weights)
    lm = gss.load(folder)
    at_load = gss.load(whole, weights=weights)
    tokens = torch.from_numpy(lm.tokenizer.encode(TEXT)).long().unsqueeze(0)
    logs = [each.model(tokens)[0].log_softmax(-1) for each in (source, lm, at_load)]
    assert torch.equal(logs[1], logs[2])
    assert 0 < _divergence(logs[0], logs[1]) <= error
    assert weights_of(lm.model) == weights_of(at_load.model) == weights
    decoder = Decoder(lm.model, lm.model.initial_state(1))
    steps = torch.stack([decoder.step(token) for token in tokens.T], dim=1).log_softmax(-1)
    assert _divergence(logs[1], steps) < 0.01
    assert lm.generate("The ", max_tokens=5, temperature=0) == at_load.generate("The ", max_tokens=5, temperature=0)
    written = sum(path.stat().st_size for path in folder.glob("checkpoints/*/model.safetensors"))
    plain = gss.load(folder, weights="fp32").model
    torch.testing.assert_close(
        plain(tokens)[0].log_softmax(-1), logs[1], rtol=0, atol=0.02 if weights == "bf16" else 1e-4
    )
    assert f"QuantizedEmbedding(\n    8192, {lm.model.config.width}" in repr(lm.model).replace("(embedding): ", "")
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert plain.state_dict().keys() == source.model.state_dict().keys()
    assert written < size * account(lm.model.config).parameters  # state spaces, norms and biases stay float32


@torch.no_grad()
def test_a_quantized_run_with_a_first_state(tmp_path: Path) -> None:
    whole = gss.load(weights="fp32")
    tokens = torch.from_numpy(whole.tokenizer.encode(" there was a man")).long().unsqueeze(0)
    without = whole.model(tokens)[0].log_softmax(-1)
    whole.model.start_from(whole.read("Once upon a time"))
    save_run(whole.model, tmp_path / "run", whole.tokenizer)
    folder = quantize_run(tmp_path / "run", tmp_path / "int8", "int8")
    packed, plain = gss.load(folder), gss.load(folder, weights="fp32")
    assert torch.equal(plain.model.initial_state(1).position, whole.model.initial_state(1).position)
    expected, *found = (each.model(tokens)[0].log_softmax(-1) for each in (whole, packed, plain))
    decoder = Decoder(packed.model, packed.model.initial_state(1))
    found.append(torch.stack([decoder.step(token) for token in tokens.T], dim=1).log_softmax(-1))
    largest = max(_divergence(expected, each) for each in found)
    assert largest < 0.01
    assert _divergence(expected, without) > 100 * largest


@pytest.mark.parametrize("to", BITS)
@pytest.mark.parametrize("stored", BITS)
def test_a_quantized_run_quantized_again(tmp_path: Path, stored: str, to: str) -> None:
    config = gss.preset("gss2-tiny", width=192, feedforward_width=256)  # matrices to pack in 4 bits and in 8
    run = save_run(gss.build_model(config), tmp_path / "run")
    first = quantize_run(run, tmp_path / "first", stored)
    unpacked = save_run(gss.load(first, weights="fp32").model, tmp_path / "unpacked")
    expected = gss.load(unpacked, weights=to).model.state_dict()
    if to == stored:
        with pytest.raises(ValueError, match=rf"the weights of .*first are in {to} already"):
            quantize_run(first, tmp_path / "second", to)
        expected = gss.load(first).model.state_dict()
    else:
        with pytest.warns(match=rf"first is stored in {stored}, so its weights are now rounded twice"):
            second = quantize_run(first, tmp_path / "second", to)
        torch.testing.assert_close(gss.load(second).model.state_dict(), expected, rtol=0, atol=0)
    torch.testing.assert_close(gss.load(first, weights=to).model.state_dict(), expected, rtol=0, atol=0)


def test_the_size_of_a_state_is_compared_with_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gss.build_model(gss.preset("llama-tiny", attention={"sliding": 4096}))
    folder = quantize_run(save_run(model, tmp_path / "run"), tmp_path / "int8", "int8")
    monkeypatch.setattr(runs, "_STATE_BYTES", 0)
    assert weights_of(gss.load(folder).model) == "int8"


def _divergence(expected: Tensor, found: Tensor) -> float:
    """Nats per token."""
    return ((expected - found) * expected.exp()).sum(-1).mean().item()


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match="bf16, int8, int4"):
        quantize(nn.Linear(64, 1), "int3")
    model = nn.Sequential(nn.Linear(64, 1))
    quantize(model, "int8")
    with pytest.raises(ValueError, match="already"):
        quantize(model, "int4")
