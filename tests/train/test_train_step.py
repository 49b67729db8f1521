"""A step gives the same however it is cut up, carries what it should, and learns."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from train_runs import FAMILIES, small_config, window_config

from gss.data import Batch, Dataset, Segments, as_tensors, open_dataset
from gss.model import build_model
from gss.nn.gss import GSSLayer
from gss.nn.state_space import DiagonalStateSpace
from gss.pieces import accumulate
from gss.presets import PRESETS, preset
from gss.training import loop
from gss.training.config import TrainConfig
from gss.training.distributed import World, keeps_products
from gss.training.loop import BATCHINGS
from gss.training.step import Stepper
from tests.conftest import WINDOW_FAMILIES
from tests.making import dataset_from_arrays

# Rates so small that parameters stay put: a step then shows the loss of the model as it was.
STILL = {
    "optimizer__learning_rate": 1e-30,
    "optimizer__final_learning_rate": 0,
    "optimizer__state_space_learning_rate": 1e-30,
    "optimizer__weight_decay": 0,
}


def _stepper(config: TrainConfig, dtype: torch.dtype = torch.float32) -> Stepper:
    torch.manual_seed(config.seed)
    return Stepper(build_model(config.model).to(dtype), config, World(torch.device("cpu")))


def _losses(config: TrainConfig, dataset: Dataset, steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    stepper = _stepper(config, dtype)
    batches = BATCHINGS[config.batching](dataset, config.length, config.rows, config.seed)
    return [stepper.step(as_tensors(batches.batch(step)), step).loss.item() for step in range(steps)]


@pytest.mark.parametrize("batching", ["segments", "lanes", "packed"])
@pytest.mark.parametrize("micro_rows", [1, 3])
@pytest.mark.parametrize("piece_tokens", [None, 12])
def test_micro_batches_and_pieces_change_nothing_but_rounding(
    corpus: Path, batching: str, micro_rows: int, piece_tokens: int | None
) -> None:
    dataset = open_dataset(corpus, "train")
    whole = small_config(batching=batching)
    settings: dict[str, object] = {"batching": batching, "micro_batch_tokens": 32 * micro_rows}
    if piece_tokens is not None:
        settings |= {"piece_tokens": piece_tokens, "activation_checkpointing": micro_rows == 3}
        if batching == "packed":
            with pytest.raises(ValueError, match="piece_tokens does not work with packed rows: leave it out"):
                small_config(**settings)
            return
    pieces = small_config(**settings)
    expected = _losses(whole, dataset, 6, torch.float64)
    assert _losses(pieces, dataset, 6, torch.float64) == pytest.approx(expected, rel=1e-10)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("family", ["rec-fixed-skip", "feedback-lstm-single"])
def test_micro_batches_of_transformers_on_windows(corpus: Path, family: str) -> None:
    dataset = open_dataset(corpus, "train")
    whole = _losses(window_config(family), dataset, 5, torch.float64)
    assert _losses(window_config(family, micro_batch_tokens=32), dataset, 5, torch.float64) == pytest.approx(
        whole, rel=1e-9
    )


def test_longer_rows_are_cut_into_micro_batches_of_their_own_length(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    place = "gss.training.step.accumulate"
    monkeypatch.setattr(place, lambda *given: shapes.append(given[2][0].tokens.shape) or accumulate(*given))
    dataset = open_dataset(corpus, "train")
    long = as_tensors(Segments(dataset, 64, 3).batch(0))
    whole, micro = (
        small_config(batch_tokens=192, late_length=64, **settings) for settings in ({}, {"micro_batch_tokens": 64})
    )
    expected = _stepper(whole, torch.float64).step(long, 0)
    found = _stepper(micro, torch.float64).step(long, 0)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-10)
    assert found.gradient_norm.item() == pytest.approx(expected.gradient_norm.item(), rel=1e-10)
    assert shapes == [(3, 64), *[(1, 64)] * 3]


def test_the_loss_is_the_mean_over_counted_targets(corpus: Path) -> None:
    """Not a mean of rows' means: a batch with a short tail would tell them apart."""
    dataset = open_dataset(corpus, "train")
    config = small_config(**STILL, optimizer__clip_norm=0.01)
    batches = Segments(dataset, config.length, config.rows)
    step = next(s for s in range(100) if len({int(n) for n in batches.batch(s).mask.sum(1)}) > 1)
    batch = as_tensors(batches.batch(step))
    stepper = _stepper(config)
    with torch.no_grad():
        logits, _ = stepper.model(batch.tokens)
        plain = torch.nn.functional.cross_entropy(logits[batch.mask], batch.targets[batch.mask])
    result = stepper.step(batch, 0)
    assert result.loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert result.targets == batch.mask.sum()
    assert result.gradient_norm > 0.1  # before it was clipped
    means = [state["exp_avg"].flatten() for state in stepper.optimizer.state.values()]
    assert torch.cat(means).norm().item() == pytest.approx((1 - 0.9) * 0.01, rel=1e-4)


def test_the_batches_of_a_run(corpus: Path) -> None:
    """By its own seed, rows that start with the end-of-document id, and longer ones from a step on."""
    dataset = open_dataset(corpus, "train")
    config = small_config(seed=3, eos_first=True, steps=10, late_length=64, late_share=0.4)
    batches = loop._batches(config, dataset)
    for step, length in ((5, 32), (6, 64)):
        expected, found = Segments(dataset, length, config.batch_tokens // length, 3).batch(step), batches.batch(step)
        assert (found.targets == expected.targets).all()
        assert (found.tokens[:, 0] == dataset.eos_id).all()
        assert (found.tokens[:, 1:] == expected.tokens[:, 1:]).all()


def test_any_seed_will_do(corpus: Path) -> None:
    dataset = open_dataset(corpus, "train")
    for seed in (-(10**9), 10**18):
        assert all(map(math.isfinite, _losses(small_config(seed=seed), dataset, 1)))


def test_dropout_is_drawn_anew_for_every_seed_and_step(corpus: Path) -> None:
    losses = set()
    for seed in (1, 2):
        config = small_config("gss2", model__dropout=0.5, model__zero_outputs=False, seed=seed)
        batch = as_tensors(Segments(open_dataset(corpus, "train"), config.length, config.rows).batch(0))
        for step in (0, 1):
            stepper = Stepper(build_model(config.model, seed=0), config, World(torch.device("cpu")))
            losses.add(stepper.step(batch, step).loss.item())
    assert len(losses) == 4


def test_activation_checkpointing_changes_nothing(corpus: Path) -> None:
    dataset = open_dataset(corpus, "train")
    for batching in ("segments", "lanes"):
        plain = _losses(small_config(batching=batching), dataset, 4)
        assert _losses(small_config(batching=batching, activation_checkpointing=True), dataset, 4) == plain


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_change_nothing_but_rounding(corpus: Path, family: str) -> None:
    dataset = open_dataset(corpus, "train")
    for settings in ({}, {"activation_checkpointing": True}):
        plain = _losses(small_config(family, **settings), dataset, 4)
        assert _losses(small_config(family, compile=True, **settings), dataset, 4) == pytest.approx(plain, abs=1e-5)


def _assert_documents_are_read_alone(config: TrainConfig, lengths: Sequence[int]) -> None:
    """The losses of an epoch sum up to those of the documents, each read alone and whole."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 256, length).tolist() for length in lengths]
    stepper = _stepper(config, torch.float64)
    whole = 0.0
    for document in documents:
        with torch.no_grad():
            logits, _ = stepper.model(torch.tensor([[256, *document]]))
        targets = torch.tensor([*document, 256])
        whole += torch.nn.functional.cross_entropy(logits[0], targets, reduction="sum").item()
    dataset = dataset_from_arrays(documents, vocab_size=257, eos_id=256)
    batches = BATCHINGS[config.batching](dataset, config.length, config.rows)
    total = 0.0
    for step in range(batches.steps_per_epoch):
        result = stepper.step(as_tensors(batches.batch(step)), step)
        total += result.loss.item() * int(result.targets)
    assert total == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("family", ["gss", "gss-hybrid", "dss", *WINDOW_FAMILIES])
@pytest.mark.parametrize("micro_rows", [1, 2])
def test_lanes_read_documents_whole(family: str, micro_rows: int) -> None:
    """Over an epoch in lanes every token has the loss that it has in its whole document, and none is affected by
    the document before it in its lane."""
    make = window_config if family in WINDOW_FAMILIES else small_config
    rows = {"batch_tokens": 64, "micro_batch_tokens": 32 * micro_rows}
    config = make(family, batching="lanes", optimizer__name="adamw", **rows, **STILL)
    _assert_documents_are_read_alone(config, [100, 40, 33, 90, 7])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_read_apart(family: str) -> None:
    config = small_config(family, batching="packed", batch_tokens=128, **STILL)
    _assert_documents_are_read_alone(config, [10, 20, 5, 31, 12, 12])


def test_lanes_of_a_model_whose_state_grows_are_refused() -> None:
    with pytest.raises(ValueError, match="grows with everything it has read"):
        _stepper(small_config("transformer", batching="lanes"))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_keeps_parameters_gradients_and_states_in_fp32(corpus: Path, family: str) -> None:
    batching = "segments" if family == "transformer" else "lanes"
    config = small_config(family, precision="bf16", batching=batching)
    stepper = _stepper(config)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for module in stepper.model.modules():
        if isinstance(module, DiagonalStateSpace):
            module.register_forward_hook(lambda _, inputs, outputs: seen.append((inputs[0].dtype, outputs[0].dtype)))
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: seen.append((gradient.dtype, torch.float32)) and None)
    batches = BATCHINGS[batching](open_dataset(corpus, "train"), config.length, config.rows)
    losses = [stepper.step(as_tensors(batches.batch(0)), step).loss for step in range(2)]
    assert all(torch.isfinite(loss) and loss.dtype == torch.float32 for loss in losses)
    assert all(p.dtype == torch.float32 for p in stepper.model.parameters())
    assert bool(seen) == (family != "transformer")
    assert all(output == torch.float32 for _, output in seen)
    if stepper.lanes is not None:
        for layer in stepper.lanes.layers:
            assert all(tensor.dtype == torch.float32 for name, tensor in layer.items() if name.startswith("modes"))


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny")])
def test_every_family_overfits_a_small_batch(name: str) -> None:
    rates = {"optimizer__warmup_steps": 10, "optimizer__weight_decay": 0}
    config = small_config(name.removesuffix("-tiny"), model__width=32, steps=300, **rates)
    assert config.model.pattern == preset(name).pattern
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 257, (4, 33), generator=draw)
    every = torch.ones(4, 32, dtype=torch.bool)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], every, torch.zeros_like(every), 0, 0)
    stepper = _stepper(config)
    losses = [stepper.step(batch, 0).loss.item()]
    while losses[-1] >= 0.05 and len(losses) < config.steps:
        losses.append(stepper.step(batch, len(losses)).loss.item())
    assert losses[0] > 5
    assert losses[-1] < 0.05, losses[::15]


def test_rows_that_processes_cannot_share_are_refused() -> None:
    config = small_config()
    with pytest.raises(ValueError, match="cannot be divided among 3 processes"):
        Stepper(build_model(config.model), config, World(torch.device("cpu"), rank=0, size=3))


def test_gss_layers_keep_products_where_memory_allows() -> None:
    """Two 16-bit numbers per token and unit of the gate, in a quarter of what AdamW leaves of the memory."""
    model = build_model(small_config("gss-hybrid").model)
    gates = [layer.gate.out_features for layer in model.layers if isinstance(layer, GSSLayer)]
    needed = 4 * 4 * 1000 * sum(gates) + 16 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < len(gates) < len(model.layers)
    assert keeps_products(model, 1000, needed)
    assert not keeps_products(model, 1000, needed - 1)
