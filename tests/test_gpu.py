"""The same answers on a CUDA device: `pytest -m gpu` there; skipped with a word elsewhere."""

from statistics import median

import pytest
import torch

import gss
from gss.generate import Sampling, read
from gss.loss import next_token_loss
from gss.nn.state_space import DiagonalStateSpace
from gss.ops import fast
from gss.ops.state_space import kernel
from tests.comparing import relative_error, run, stream
from tests.conftest import ALL_FAMILIES, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("sizes", [[2], [513], [1021], [700, 321], [1, 2, 510, 8]])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_float32_on_the_device_against_float64_on_the_cpu(family: str, sizes: list[int]) -> None:
    model = gss.build_model(small_config(family))
    tokens = torch.randint(0, 61, (2, sum(sizes)))
    on_device = run(model.cuda(), tokens.cuda(), sizes)
    expected = run(model.cpu().double(), tokens, [sum(sizes)])
    for name, reference in expected.items():
        assert relative_error(on_device[name].cpu(), reference) < 2e-4, name


def test_kernel_at_65536_on_the_device() -> None:
    space = DiagonalStateSpace(16, gss.preset("gss", state_space={"decay_range": (1e-6, 1e-5)}).state_space)
    with torch.no_grad():
        expected = kernel(*space.double().discretized(), 65_536)
        actual = kernel(*space.float().cuda().discretized(), 65_536).cpu()
    assert (actual - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_autocast_in_bfloat16(family: str) -> None:
    model = gss.build_model(small_config(family)).cuda()
    tokens = torch.randint(0, 61, (2, 600)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits, state = model(tokens)
        following, _ = model(tokens[:, :5], state)
    assert relative_error(logits.cpu(), model(tokens)[0].cpu()) < 0.05
    assert torch.isfinite(following).all()
    logits.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def _loss_and_gradients(
    model: gss.LanguageModel, tokens: torch.Tensor, cut: int | None = None
) -> dict[str, torch.Tensor]:
    """The loss, every gradient and the last logits under autocast; with `cut`, in two pieces."""
    model.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=model.embedding.weight.dtype == torch.float32):
        hidden, state = model.hidden(tokens[:, :cut], keep_state=cut is not None)
        if cut is not None:
            rest, _ = model.hidden(tokens[:, cut:], state)
            hidden = torch.cat([hidden, rest], dim=1)
        targets = tokens.roll(-1, dims=1)
        mask = torch.ones_like(targets, dtype=torch.bool)
        loss = next_token_loss(model.logits, model.embedding.weight, hidden, targets, mask)
    (loss / tokens.numel()).backward()
    named = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": model.logits(hidden[:, -8:].to(model.embedding.weight)).detach(), **named}


@pytest.mark.parametrize(("batch", "length", "cut"), [(2, 4096, None), (1, 700, None), (1, 5001, None), (3, 600, 413)])
@pytest.mark.parametrize("family", ["gss", "gss-hybrid", "dss"])
def test_kernels_are_no_worse_than_autocast_without_them(family: str, batch: int, length: int, cut: int | None) -> None:
    """Against float64, the error with the kernels is at most a little over plain autocast's.

    The median of eight models, of sizes at which no vector is so short that its error is chance.
    """
    sizes = {"width": 48, "channels": 48, "gate_width": 64, "state_space.modes": 48}
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(8):
        torch.manual_seed(seed)
        model = gss.build_model(small_config(family, **sizes)).cuda()
        tokens = torch.randint(0, 61, (batch, length)).cuda()
        found = _loss_and_gradients(model, tokens, cut)
        with fast.disabled():
            plain = _loss_and_gradients(model, tokens, cut)
            exact = _loss_and_gradients(model.double(), tokens, cut)
        assert not torch.equal(found["logits"], plain["logits"])  # something of it was the kernels'
        for name, reference in exact.items():
            pair = [relative_error(run[name].cpu(), reference.cpu()) for run in (found, plain)]
            errors.setdefault(name, []).append((pair[0], pair[1]))
    for name, pairs in errors.items():
        with_kernels, without = map(median, zip(*pairs, strict=True))
        assert with_kernels < 1.5 * without + 0.01, name


@pytest.mark.parametrize("piece", [5001, 3000])
@pytest.mark.parametrize("family", ["gss", "gss-hybrid", "dss"])
def test_reading_is_no_worse_than_autocast_without_kernels(family: str, piece: int) -> None:
    """The last logits and every state, against float64."""
    model = gss.build_model(small_config(family)).cuda().eval()
    tokens = torch.randint(0, 61, (2, 5001)).cuda()

    def found(model: gss.LanguageModel) -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=model.embedding.weight.dtype == torch.float32):
            logits, state = read(model, tokens, piece=piece)
        return [logits, *(layer[name] for layer in state.layers for name in layer if name != "length")]

    with_kernels = found(model)
    with fast.disabled():
        without, exact = found(model), found(model.double())
    assert not torch.equal(with_kernels[0], without[0])
    for ours, plain, reference in zip(with_kernels, without, exact, strict=True):
        error = relative_error(ours.double().cpu(), reference.cpu())
        assert error < 1.5 * relative_error(plain.double().cpu(), reference.cpu()) + 0.01


def test_a_compiled_layer_gives_the_same() -> None:
    model = gss.build_model(small_config("gss")).cuda()
    tokens = torch.randint(0, 61, (2, 1024)).cuda()
    eager = _loss_and_gradients(model, tokens)
    for layer in model.layers:
        layer.compile()
    compiled = _loss_and_gradients(model, tokens)
    for name, reference in eager.items():
        assert relative_error(compiled[name].cpu(), reference.cpu()) < 0.02, name


def test_many_sequences_decode_alike_with_and_without_kernels() -> None:
    model = gss.build_model(small_config("gss")).cuda().eval()
    tokens = torch.randint(0, 61, (80, 40)).cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        _, state = model(tokens)
        found, _ = model(tokens[:, :1], state)
        with fast.disabled():
            expected, _ = model(tokens[:, :1], state)
    assert relative_error(found.cpu(), expected.cpu()) < 0.02


def test_a_single_row_in_float32_is_the_models_own() -> None:
    """By the plain decoder, which speculates on a CPU alone."""
    model = gss.build_model(small_config("gss")).cuda().eval()
    tokens = [1, 2, 3]
    for token in stream(model, tokens, precision="fp32", max_tokens=20, sampling=Sampling(temperature=0)):
        with torch.no_grad():
            logits, _ = model(torch.tensor([tokens]).cuda())
        assert token == int(logits[0, -1].argmax())
        tokens.append(token)
