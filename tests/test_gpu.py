"""The same answers on a CUDA device: `pytest -m gpu` there; skipped with a word elsewhere."""

import pytest
import torch

import gss
from gss.nn.state_space import DiagonalStateSpace
from gss.ops.kernel import kernel
from tests.comparing import relative_error, run
from tests.conftest import ALL_FAMILIES, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("sizes", [[1], [513], [1021], [700, 321], [1, 2, 510, 8]])
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
