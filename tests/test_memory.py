"""Long inputs fit: memory that does not grow over a million tokens, and 65,536 at once at the paper's size."""

import os

import pytest
import torch

import gss
from gss.bench.measure import peak_bytes
from gss.nn.gss import GSSLayer
from tests.conftest import small_config


def _read(pieces: int) -> object:
    """A function that reads that many pieces of 8,192 tokens, the state carried."""

    def run() -> None:
        torch.manual_seed(0)
        model = gss.build_model(small_config("gss-hybrid"))
        state = None
        with torch.no_grad():
            for _ in range(pieces):
                _, state = model(torch.randint(0, 61, (1, 8192)), state)
        assert state is not None
        assert state.position.item() == pieces * 8192
        assert all(torch.isfinite(t).all() for layer in state.layers for t in layer.values())

    return run


def test_a_million_tokens_in_constant_memory() -> None:
    few, many = peak_bytes(_read, 8), peak_bytes(_read, 128)
    assert many < few + 16 * 2**20  # 120 pieces more leave no more than allocator noise


def _layer_pass() -> object:
    def run() -> None:
        layer = GSSLayer(gss.preset("gss"))
        x = torch.randn(1, 65_536, 1024, requires_grad=True)
        layer(x, keep_state=False)[0].square().mean().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in layer.parameters())

    return run


def test_paper_layer_at_65536_forward_and_backward() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < 20 * 2**30:
        pytest.skip(f"needs a machine of 20 GiB, this one has {memory / 2**30:.0f}")
    assert peak_bytes(_layer_pass) < 16 * 2**30
