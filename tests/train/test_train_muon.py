"""Muon against torch's, its orthogonal steps block by block, and AdamW beside it in one optimizer."""

import copy
import gc

import pytest
import torch
from torch import nn
from train_runs import small_config

from gss.model import build_model
from gss.nn.lora import add_lora
from gss.training.config import OptimizerConfig
from gss.training.muon import Muon, orthogonal
from gss.training.optim import build_optimizer, set_learning_rates


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)], ids=str)
def test_is_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape))
    theirs = nn.Parameter(ours.detach().clone())
    own = Muon([{"params": [ours], "lr": 0.02, "weight_decay": 0.1, "orthogonal": True}])
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(8):
        ours.grad, before = torch.randn(shape), ours.detach().clone()
        theirs.grad = ours.grad.clone()
        own.step()
        other.step()
    assert (ours - before).square().mean().sqrt().item() == pytest.approx(0.02 * 0.2, rel=0.3)  # a step of AdamW's size
    # Theirs iterates in bfloat16, which the singular values feel.
    assert (ours - theirs).norm() < 0.03 * (ours - before).norm() * 8**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_come_near_one(dtype: torch.dtype) -> None:
    matrices = torch.randn(3, 20, 50) * torch.logspace(-6, 3, 3).view(3, 1, 1)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonal(matrices, dtype)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() < values.max() < 1.3
    assert ((found * (u @ v)).sum((1, 2)) / found.norm(dim=(1, 2)) / 20**0.5 > 0.98).all()  # the same directions
    assert torch.equal(orthogonal(torch.zeros(1, 4, 6)), torch.zeros(1, 4, 6))


def test_batches_and_blocks_are_what_each_matrix_gives_alone() -> None:
    stacked, wide, tall = (nn.Parameter(torch.randn(shape)) for shape in ((36, 20), (12, 20), (20, 12)))
    parts = [nn.Parameter(part.detach().clone()) for part in stacked.chunk(3)]
    alone = [*parts, *(nn.Parameter(matrix.detach().clone()) for matrix in (wide, tall))]
    together = Muon([{"params": [stacked, wide, tall], "lr": 0.1, "orthogonal": True}], blocks={stacked: 3})
    singly = [Muon([{"params": [matrix], "lr": 0.1, "orthogonal": True}]) for matrix in alone]
    for _ in range(3):
        for parameter in (stacked, wide, tall):
            parameter.grad = torch.randn_like(parameter)
        for own, whole in zip(alone, (*stacked.grad.chunk(3), wide.grad, tall.grad), strict=True):
            own.grad = whole
        for optimizer in (together, *singly):
            optimizer.step()
    torch.testing.assert_close(stacked, torch.cat(parts), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close((wide, tall), tuple(alone[3:]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["gss-hybrid", "dss", "slide"])
def test_what_is_no_matrix_has_adamw(family: str) -> None:
    adam = {"learning_rate": 1e-3, "embedding_factor": 8.0, "betas": (0.8, 0.95), "epsilon": 1e-2}
    config = OptimizerConfig(name="muon", matrix_learning_rate=4e-3, **adam)
    model = build_model(small_config(family, model__attention__window=8).model)
    twin = copy.deepcopy(model)
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, Muon)
    adamw = build_optimizer(twin, OptimizerConfig(**adam))
    for step in range(1000, 1003):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = other.grad = torch.randn_like(parameter)
        set_learning_rates(optimizer, config, step, 10_000)
        set_learning_rates(adamw, config, step, 10_000)
        optimizer.step()
        adamw.step()
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other) == (id(parameter) not in matrices), name
        state = {"momentum"} if id(parameter) in matrices else {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[parameter].keys() == state
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["decayed"] == pytest.approx(4 * rates["undecayed"])


def test_stacked_layers_say_so() -> None:
    model = build_model(small_config("gss-hybrid").model)
    blocks = {name: module.blocks for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name.rpartition(".")[2]: count for name, count in blocks.items() if count > 1} == {"query_key_value": 3}
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", learning_rate=0.01, weight_decay=0.0))
    weight = next(module.weight for module in model.modules() if getattr(module, "blocks", 1) == 3)
    before, weight.grad = weight.detach().clone(), torch.randn_like(weight)
    optimizer.step()
    for moved, block in zip((weight - before).chunk(3), weight.grad.chunk(3), strict=True):
        size = 0.01 * 0.2 * max(block.shape) ** 0.5
        torch.testing.assert_close(moved, -size * orthogonal(block.unsqueeze(0))[0], rtol=1e-3, atol=1e-6)


def test_nothing_is_kept_of_weights_that_lora_computes() -> None:
    model = build_model(small_config("gss-hybrid").model)
    add_lora(model, 2)

    def computed() -> int:
        return sum(type(each) is torch.Tensor and each.grad_fn is not None for each in gc.get_objects())

    before = computed()
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    assert computed() == before
    model(torch.randint(0, 61, (1, 8)))[0].square().sum().backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
