"""Long inputs fit: memory that does not grow over a million tokens, and 65,536 at once at the paper's sizes."""

import math
import os
import statistics
import time

import pytest
import torch

import gss
from experiments.memory import peak_bytes
from gss.decode import Decoder
from gss.evaluation import evaluate
from gss.nn.gss import GSSLayer
from tests.conftest import small_config
from tests.making import dataset_from_arrays


def _score(tokens: int) -> object:
    """A function that evaluates one document of that many tokens, in pieces of 8,192 with the state carried."""
    torch.manual_seed(0)
    model = gss.build_model(small_config("gss-hybrid"))
    document = torch.randint(0, 60, (tokens,)).tolist()
    dataset = dataset_from_arrays([document], vocab_size=61, eos_id=60)

    def run() -> None:
        (row,) = evaluate(model, dataset, [None], piece=8192, batch_tokens=8192).rows
        assert row.tokens == tokens + 1
        assert math.isfinite(row.loss)

    return run


def test_a_document_of_a_million_tokens_in_constant_memory() -> None:
    few, many = peak_bytes(_score, 1 << 16), peak_bytes(_score, 1 << 20)
    assert many < few + 16 * 2**20  # sixteen times the document adds no more than allocator noise


@pytest.mark.soak
@torch.no_grad()
def test_a_million_tokens_decoded_in_constant_memory_and_time() -> None:
    torch.manual_seed(0)
    model = gss.build_model(small_config("gss-hybrid"))
    decoder = Decoder(model, model.initial_state(1))
    token = torch.zeros(1, dtype=torch.int64)
    seconds, sizes = [], []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(100_000):
            token = decoder.step(token).argmax(-1)
        seconds.append(time.perf_counter() - started)
        sizes.append(decoder.state().nbytes)
    assert decoder.state().position.item() == 1_000_000
    assert len(set(sizes)) == 1
    assert statistics.median(seconds[-3:]) < 1.25 * statistics.median(seconds[:3])


def _layer_pass(sizes: dict[str, int]) -> object:
    """A function that takes a layer of the paper's, but for these sizes, over 65,536 tokens and back."""

    def run() -> None:
        config = gss.preset("gss", **sizes)
        layer = GSSLayer(config)
        x = torch.randn(1, 65_536, config.width, requires_grad=True)
        layer(x, keep_state=False)[0].square().mean().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in layer.parameters())

    return run


def test_the_papers_state_space_at_65536_forward_and_backward() -> None:
    """All of its 256 channels and 512 modes between narrow products: 1.10 GiB, 1.33 with a table of modes × length."""
    assert peak_bytes(_layer_pass, {"width": 64, "gate_width": 256}) < 1.2 * 2**30


@pytest.mark.soak
def test_paper_layer_at_65536_forward_and_backward() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < 20 * 2**30:
        pytest.skip(f"needs a machine of 20 GiB, this one has {memory / 2**30:.0f}")
    assert peak_bytes(_layer_pass, {}) < 16 * 2**30
