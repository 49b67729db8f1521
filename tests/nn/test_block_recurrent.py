"""Every piece of Block-Recurrent Transformers, slide and xl against plain loops written from the description."""

import pytest
import torch
from torch import nn

import gss
from gss.nn.block_recurrent import FeedbackLayer, RecurrentLayer, StateCell
from gss.nn.window_attention import SlideLayer, WindowAttention, XLLayer, distance_buckets, unit
from gss.nn.windows import Windows
from tests.comparing import relative_error
from tests.conftest import small_config
from tests.nn import block_recurrent_loops as loops

WINDOW = 8


def stirred(module: nn.Module) -> nn.Module:
    """The module in float64, with scales, biases and gates away from what they start at, some scales negative."""
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, std=1.5)
    return module.double()


def config(gate: str = "fixed", layout: str = "skip", **overrides: object) -> gss.ModelConfig:
    return small_config("feedback-fixed-skip", **{"recurrent.gate": gate, "recurrent.layout": layout, **overrides})


def test_t5_buckets() -> None:
    distance = torch.arange(1000)
    assert distance_buckets(distance).tolist() == [loops.bucket(d) for d in range(1000)]
    assert distance_buckets(torch.tensor([1, 15, 16, 17, 18, 31, 64, 127, 128, 5000])).tolist() == [
        *[1, 15, 16, 16, 16, 21, 26, 31, 31, 31],
    ]


@pytest.mark.parametrize("length", [1, 5, 8, 9, 30])
@pytest.mark.parametrize("whole_previous", [False, True], ids=["slide", "xl"])
def test_what_a_token_attends_to(whole_previous: bool, length: int) -> None:
    """With one-hot values the output is the attention itself."""
    attention = stirred(WindowAttention(2, WINDOW, whole_previous))
    queries, keys = nn.functional.normalize(torch.randn(2, 1, length, 2, 5).double(), dim=-1)
    values = torch.eye(length).double()[None, :, None, :].expand(1, length, 2, length)
    windows = Windows(WINDOW, length)
    joined = (windows.join(None, tensor) for tensor in (keys, values))
    weights = attention.in_windows(unit(queries, attention.scale), *joined, windows)[0].transpose(0, 1)  # [h, L, L]
    for head in range(2):
        for i in range(length):
            seen = loops.visible(i, WINDOW, whole_previous)
            logits = [
                (queries[0, i, head] @ keys[0, j, head] + attention.table[loops.bucket(i - j), head])
                * attention.scale[head].abs()
                for j in seen
            ]
            expected = loops.softmax_sum(logits, [values[0, j, 0] for j in seen], length, sink=True)
            assert torch.allclose(weights[head, i], expected, atol=1e-12)
            assert set(weights[head, i].nonzero().flatten().tolist()) == set(seen)
            assert i not in seen
            assert len(seen) <= (2 * WINDOW - 1 if whole_previous else WINDOW)
    assert not weights[:, 0].any()  # a sequence's first token has the sink alone
    assert (weights.sum(-1) < 1).all()


def test_a_sliding_window_is_exactly_the_tokens_before() -> None:
    assert [len(loops.visible(i, WINDOW, False)) for i in (0, 3, 8, 9, 100)] == [0, 3, 8, 8, 8]
    layer = stirred(SlideLayer(small_config("slide"))).eval()
    x = torch.randn(1, 30, 16).double()
    moved = x.clone()
    moved[0, 10] += 1
    changed = (layer(moved)[0] - layer(x)[0]).abs().amax(-1)[0] > 0
    assert changed.nonzero().flatten().tolist() == list(range(10, 10 + WINDOW + 1))


@pytest.mark.parametrize("kind", [SlideLayer, XLLayer])
def test_plain_layers(kind: type) -> None:
    layer = stirred(kind(small_config("slide")))
    x = torch.randn(21, 16).double()
    loop = loops.BlockLoop(layer.block)
    expected = torch.stack([loop.token(token) for token in x])
    assert relative_error(layer(x.unsqueeze(0))[0][0], expected) < 1e-12


@pytest.mark.parametrize("layout", ["skip", "single"])
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_horizontal(gate: str, layout: str) -> None:
    """The update alone: self-attention and attention to tokens, side by side, into the gate."""
    cell = stirred(StateCell(config(gate, layout)))
    vectors = torch.randn(2, 5, 16).double()
    keys, values = torch.randn(2, 2, 11, 2, 8).double()
    keys = nn.functional.normalize(keys, dim=-1)
    after = cell.update(vectors, cell.read(vectors), (keys, values))
    for row in range(2):
        tokens = [[list(token) for token in tensor[row]] for tensor in (keys, values)]
        expected = loops.update(cell, list(vectors[row]), *tokens)
        assert relative_error(after[row], torch.stack(expected)) < 1e-12


@pytest.mark.parametrize("layout", ["skip", "single"])
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
@pytest.mark.parametrize("kind", [RecurrentLayer, FeedbackLayer])
def test_vertical_and_horizontal_together(kind: type, gate: str, layout: str) -> None:
    """Three and a half windows: what tokens read, what the vectors become, and when."""
    layer = stirred(kind(config(gate, layout)))
    x = torch.randn(2, 3 * WINDOW + 4, 16).double()
    y, state = layer(x)
    for row in range(2):
        expected, vectors = loops.stack(layer, x[row])
        assert relative_error(y[row], expected) < 1e-11
        assert relative_error(state["vectors"][row], torch.stack(vectors)) < 1e-11


def test_a_window_reads_the_vectors_as_they_came_in() -> None:
    layer = stirred(RecurrentLayer(config()))
    x = torch.randn(1, 2 * WINDOW, 16).double()
    before = layer(x)[0]
    with torch.no_grad():
        layer.cell.output.weight.mul_(-2)  # another update
    after = layer(x)[0]
    assert torch.equal(after[:, :WINDOW], before[:, :WINDOW])
    assert not torch.allclose(after[:, WINDOW:], before[:, WINDOW:])


def test_feedback_reaches_the_blocks_below_the_one_that_writes() -> None:
    layer = stirred(FeedbackLayer(config(**{"recurrent.block": 2})))
    assert layer.writer == 1
    x = torch.randn(1, 2 * WINDOW, 16).double()
    with torch.no_grad():
        layer.blocks[1].output.weight.zero_()  # what is left in the first half comes from the first block
        before = layer(x)[0]
        layer.cell.initial.add_(1)
        assert not torch.allclose(layer(x)[0][:, :WINDOW], before[:, :WINDOW])


def test_starts() -> None:
    model = gss.build_model(gss.preset("feedback-lstm-single-small", **{"recurrent.blocks": 2, "recurrent.block": 1}))
    stack = model.layers[0]
    assert stack.cell.initial.std().item() == pytest.approx(0.1, rel=0.02)
    assert stack.cell.identity.std().item() == pytest.approx(1.0, rel=0.02)
    assert all((block.attention.scale == 1).all() for block in stack.blocks)
    assert not any(name.endswith("bias") for name, _ in stack.named_parameters() if ".gate." not in name)
    fixed = StateCell(gss.preset("rec-fixed-skip-small"))
    assert fixed.gate.bias.std().item() == pytest.approx(0.1, rel=0.1)


def test_dropout_only_in_training() -> None:
    model = gss.build_model(small_config("rec-fixed-skip", dropout=0.5))
    tokens = torch.randint(0, 61, (1, 20))
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    for name in ("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip", "slide", "xl"):
        assert gss.preset(name).dropout == gss.preset(f"{name}-small").dropout == 0.05


def test_no_mask_grows_with_the_sequence() -> None:
    attention = WindowAttention(2, WINDOW)
    sizes = {tuple(attention.bias(Windows(WINDOW, length), WINDOW).shape) for length in (8, 100, 10_000)}
    assert sizes == {(1, 2, WINDOW, 2 * WINDOW)}
