"""Adafactor against a plain loop, against torch's, and its schedule; shards refused."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from train_runs import small_config

from gss.model import build_model
from gss.training.adafactor import Adafactor
from gss.training.config import OptimizerConfig
from gss.training.optim import build_optimizer, set_learning_rates
from gss.training.schedule import learning_rate


def _gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    """Of very different sizes by row, column and step."""
    scale = torch.logspace(-6, 1, math.prod(shape)).reshape(shape)
    return [torch.randn(shape) * scale * 3**step for step in range(steps)]


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _loop(start: Tensor, gradients: list[Tensor], rate: float, momentum: float, decay: float) -> Tensor:
    """The same, an element at a time in Python's floats."""
    rows, columns = start.shape if start.ndim == 2 else (1, start.numel())
    theta = start.double().flatten().tolist()
    row, column, square = [0.0] * rows, [0.0] * columns, [0.0] * len(theta)
    mean = [0.0] * len(theta)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double().flatten().tolist()
        squares = [value**2 + 1e-30 for value in g]
        new = t**-0.8
        for i in range(rows):
            row[i] += new * (sum(squares[i * columns : (i + 1) * columns]) / columns - row[i])
        for j in range(columns):
            column[j] += new * (sum(squares[j::columns]) / rows - column[j])
        square = [old + new * (value - old) for old, value in zip(square, squares, strict=True)]
        if start.ndim == 2:
            second = [row[i] * column[j] / (sum(row) / rows) for i in range(rows) for j in range(columns)]
        else:
            second = square
        update = [value / math.sqrt(v) for value, v in zip(g, second, strict=True)]
        size = rate * max(1e-3, _rms(theta)) / max(1.0, _rms(update))
        mean = [momentum * m + (1 - momentum) * size * u for m, u in zip(mean, update, strict=True)]
        theta = [value * (1 - rate * decay) - m for value, m in zip(theta, mean, strict=True)]
    return torch.tensor(theta, dtype=torch.float64).reshape(start.shape)


@pytest.mark.parametrize("shape", [(4, 6), (7,), (1, 5)], ids=str)
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.0), (0.0, 0.1)])
def test_against_a_plain_loop(shape: tuple[int, ...], momentum: float, decay: float) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape))
    start, gradients = parameter.detach().clone(), _gradients(shape, 8)
    optimizer = Adafactor([{"params": [parameter], "lr": 0.02, "weight_decay": decay}], momentum=momentum)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    expected = _loop(start, gradients, 0.02, momentum, decay)
    assert torch.allclose(parameter.double(), expected, rtol=1e-5, atol=1e-7)
    state = optimizer.state[parameter]
    factors = {"rows", "columns"} if len(shape) == 2 else {"squares"}
    assert state.keys() == {"step", *factors, *({"momentum"} if momentum else set())}


def test_is_torchs_where_torchs_has_neither_cap_nor_momentum() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(8, 12, generator=torch.Generator().manual_seed(1))) for _ in range(2))
    own = Adafactor([{"params": [ours], "lr": 0.01}], momentum=0.0)
    other = torch.optim.Adafactor([theirs], lr=0.01, eps=(1e-15, 1e-3))
    for _ in range(10):  # 0.01 is under 1/√step that long
        ours.grad = theirs.grad = torch.randn(8, 12)
        own.step()
        other.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_rows_without_gradient_stay_finite() -> None:
    parameter = nn.Parameter(torch.randn(5, 4))
    before = parameter.detach().clone()
    optimizer = Adafactor([{"params": [parameter], "lr": 0.01}])
    for size in (0.0, 1e-18, 1.0):
        parameter.grad = torch.zeros(5, 4)
        parameter.grad[0] = size
        optimizer.step()
    assert torch.isfinite(parameter).all()
    assert torch.equal(parameter[1:], before[1:])


def test_the_choice_and_its_groups() -> None:
    config = OptimizerConfig(name="adafactor", betas=(0.8, 0.98), weight_decay=0.0)
    optimizer = build_optimizer(build_model(small_config("gss-hybrid").model), config)
    assert isinstance(optimizer, Adafactor)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.8}
    set_learning_rates(optimizer, config, 499, 10_000)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"decayed": 8e-4, "undecayed": 8e-4, "embedding": 8e-4, "state_space": 1e-3}


def test_inverse_square_root_schedule() -> None:
    config = OptimizerConfig(schedule="inverse_sqrt", learning_rate=1.0, warmup_steps=100, final_learning_rate=0.05)
    assert learning_rate(config, 49, 1) == 0.5
    assert learning_rate(config, 99, 1) == learning_rate(config, 100, 1) / math.sqrt(100 / 101) == 1.0
    assert learning_rate(config, 399, 1) == pytest.approx(0.5)
    assert learning_rate(config, 10**6, 1) == 0.05
    no_warmup = OptimizerConfig(schedule="inverse_sqrt", learning_rate=1.0, warmup_steps=0)
    assert [learning_rate(no_warmup, step, 9) for step in (0, 3)] == [1.0, 0.5]


def test_shards_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh))
        with pytest.raises(ValueError, match=r"set parallel=ddp, or optimizer\.name=adamw"):
            Adafactor([{"params": [parameter], "lr": 0.01}])
    finally:
        dist.destroy_process_group()
