"""Block-Recurrent Transformers, slide and xl against plain loops, and what they learn that no window reaches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gss
from gss.nn.block_recurrent import FeedbackLayer, RecurrentLayer, StateCell
from gss.nn.window_attention import SlideLayer, WindowAttention, XLLayer, distance_buckets, unit
from gss.nn.windows import Windows
from tests.comparing import relative_error
from tests.conftest import small_config
from tests.nn import block_recurrent_loops as loops

WINDOW = 8
SYMBOLS, COUNT, GAP = 8, 4, 24  # of the text to copy


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


def test_the_released_dropout() -> None:
    for name in ("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip", "slide", "xl"):
        assert gss.preset(name).dropout == gss.preset(f"{name}-small").dropout == 0.05


def test_no_mask_grows_with_the_sequence() -> None:
    attention = WindowAttention(2, WINDOW)
    sizes = {tuple(attention.bias(Windows(WINDOW, length), WINDOW).shape) for length in (8, 100, 10_000)}
    assert sizes == {(1, 2, WINDOW, 2 * WINDOW)}


def _step(model: gss.LanguageModel, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """One step on the copied symbols of every row; returns their loss."""
    logits = model(tokens[:, :-1], keep_state=False)[0][:, -COUNT:]
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, -COUNT:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _copies(generator: torch.Generator) -> torch.Tensor:
    """Four symbols, a gap of three windows, a mark, the four symbols again: 29 tokens back, where two layers of
    windows of 8 reach 16."""
    symbols = torch.randint(0, SYMBOLS, (32, COUNT), generator=generator)
    gap = torch.full((32, GAP), SYMBOLS)
    return torch.cat([symbols, gap, torch.full((32, 1), SYMBOLS + 1), symbols], dim=1)


def _copy_loss(family: str, steps: int) -> float:
    torch.manual_seed(0)
    sizes = {"vocab_size": SYMBOLS + 2, "width": 32, "feedforward_width": 64, "recurrent.vectors": 8}
    model = gss.build_model(small_config(family, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    losses = [_step(model, optimizer, _copies(generator)) for _ in range(steps)]
    return sum(losses[-10:]) / 10


def test_recurrent_models_copy_over_a_distance_that_slide_cannot() -> None:
    chance = 2.08  # ln 8
    slide = _copy_loss("slide", 120)
    assert slide > chance - 0.05
    for family in ("rec-fixed-skip", "feedback-fixed-skip", "feedback-lstm-single"):
        assert _copy_loss(family, 120) < 0.6 * slide, family
