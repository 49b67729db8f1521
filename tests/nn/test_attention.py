"""The options of the Transformer block, each against its definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gss
from gss.nn.attention import TransformerBlock
from gss.nn.dense import FeedForward
from gss.ops.positions import rotated
from tests.comparing import relative_error
from tests.conftest import small_config


@pytest.mark.parametrize("positions", ["none", "rotary"])
@pytest.mark.parametrize(("sliding", "length"), [(None, 9), (1, 4), (5, 5), (5, 23), (8, 64)])
def test_attention_is_its_definition(positions: str, sliding: int | None, length: int) -> None:
    """Each query over the tokens that it sees, one by one; qᵢ·kⱼ with rotary positions is (R^(i−j) q)·k."""
    config = small_config("llama", positions=positions, **{"attention.sliding": sliding})
    block = TransformerBlock(config).double()
    projected = torch.randn(2, length, 3, 2, 8, dtype=torch.float64)
    found, _ = block.attend(projected)
    queries, keys, values = projected.unbind(2)
    expected = torch.empty_like(queries)
    for i in range(length):
        seen = range(max(0, i + 1 - sliding) if sliding else 0, i + 1)
        scores = []
        for j in seen:
            query = queries[:, i]
            if positions == "rotary":
                query = _turned(query, i - j, config.attention.rotary_base)
            scores.append((query * keys[:, j]).sum(-1) / 8**0.5)
        weights = torch.stack(scores, dim=1).softmax(1)
        expected[:, i] = torch.einsum("bjh,bjhd->bhd", weights, values[:, list(seen)])
    assert relative_error(found, expected) < 1e-12


def _turned(x: Tensor, steps: int, base: float) -> Tensor:
    """Pairs (x_i, x_{i + d/2}) as complex numbers, turned back or forth by so many tokens."""
    half = x.shape[-1] // 2
    angle = torch.tensor([steps * base ** (-i / half) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_rotations_far_out_are_exact() -> None:
    """Products depend on distances alone, also a million tokens on and in float32."""
    query, key = torch.randn(2, 1, 1, 1, 64)
    near, far = (
        (rotated(query, torch.tensor([place + 7]), 5e5) * rotated(key, torch.tensor([place]), 5e5)).sum()
        for place in (0, 1_000_000)
    )
    assert abs(near - far) < 1e-4


def test_a_gated_feedforward_is_swiglu() -> None:
    layer = FeedForward(small_config("llama")).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    normed = F.rms_norm(x, (16,), eps=1e-6)
    assert layer.gated is not None
    w1, w2, w3 = layer.inner.weight, layer.gated.weight, layer.outer.weight
    expected = x + (F.silu(normed @ w1.T) * (normed @ w2.T)) @ w3.T
    assert relative_error(layer(x), expected) < 1e-12
    assert not any(name.endswith("bias") for name, _ in gss.build_model(small_config("llama")).named_parameters())


def test_a_small_embedding_and_the_scale_of_the_head() -> None:
    config = small_config("llama", vocab_size=4000)
    model = gss.build_model(config)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    hidden = torch.randn(3, 16)
    assert torch.allclose(model.logits(hidden), hidden @ model.embedding.weight.T)
    assert torch.allclose(
        gss.build_model(small_config("gss"), seed=0).embedding.weight,
        gss.build_model(small_config("gss", embedding_std=0.5), seed=0).embedding.weight * 2,
    )


def test_a_sliding_window_has_a_bounded_state() -> None:
    full, sliding = (gss.build_model(small_config("llama", **{"attention.sliding": each})) for each in (None, 5))
    assert sliding.bounded_state
    assert not full.bounded_state
    for length in (3, 40):
        _, state = sliding(torch.zeros(1, length, dtype=torch.int64))
        assert state.layers[0]["keys"].shape == (1, 5, 2, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.chunk": 4, "attention.sliding": 4}, "cannot both be set"),
        ({"attention.head_width": 3}, "an even head width"),
        ({"attention.rotary_base": 1.0}, "rotary_base must be over 1"),
        ({"embedding_std": 0.0}, "embedding_std must be over 0"),
        ({"activation": "sine"}, "activation cannot be 'sine'; choose from: gelu"),
        ({"pattern": ["gss", "mamba"]}, "pattern cannot be 'mamba'; choose from: gss, gss2, dss, attention"),
        ({"norm": "none"}, "norm cannot be 'none'; choose from: layernorm, rmsnorm"),
        ({"state_space.discretization": "euler"}, "discretization cannot be 'euler'; choose from: zoh, bilinear"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config("llama", **changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("sizes", [[64], [131], [8, 64], [9, 70, 3], [5, 70]])
def test_a_sliding_window_on_a_gpu(sizes: list[int]) -> None:
    """In 16 bits by another kernel: outputs and gradients, whole and in pieces, against float64."""
    block = TransformerBlock(small_config("llama", **{"attention.sliding": 8}))
    exact = torch.randn(2, sum(sizes), 3, 2, 8).bfloat16().double()
    weights = torch.randn(2, sum(sizes), 2, 8, dtype=torch.float64)
    found = []
    for projected in (exact, exact.bfloat16().cuda()):
        projected.requires_grad_()
        parts, state = [], None
        for part in projected.split(sizes if projected.is_cuda else sum(sizes), dim=1):
            attended, state = block.to(projected).attend(part, state)
            parts.append(attended)
        whole = torch.cat(parts, dim=1)
        (whole * weights.to(whole)).sum().backward()
        found.append((whole.detach().cpu(), projected.grad.cpu()))
    for reference, computed in zip(*found, strict=True):
        assert relative_error(computed, reference) < 0.01
