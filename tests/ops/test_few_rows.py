"""Dense products of few rows: the same numbers by parts, whatever the shape."""

import pytest
import torch
import torch.nn.functional as F

import gss
from gss.decode import blocked
from gss.ops.few_rows import FewRows, linear
from tests.comparing import relative_error
from tests.conftest import ALL_FAMILIES, small_config


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 7, 8, 30, 64])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5), (2, 1, 5), (1, 2, 5), (3, 5), (0, 5)])
def test_the_same_product(shape: tuple[int, ...], outputs: int, bias: bool) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(outputs, 5, dtype=torch.float64)
    shift = torch.randn(outputs, dtype=torch.float64) if bias else None
    expected = F.linear(x, weight, shift)
    torch.testing.assert_close(linear(x, weight, shift), expected)
    with FewRows():
        torch.testing.assert_close(F.linear(x, weight, shift), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_decoding_with_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_MANY_PARAMETERS", 0)
    model = gss.build_model(small_config(family)).double()
    tokens = torch.randint(0, 61, (2, 30))
    decoder = blocked.Decoder(model, model.initial_state(2), block=4)
    logits = torch.stack([decoder.step(tokens[:, i]) for i in range(30)], dim=1)
    assert relative_error(logits, model(tokens)[0]) < 1e-11
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(decoder.step(tokens[:, 0])).all()
