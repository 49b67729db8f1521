"""Adafactor (Shazeer & Stern 2018): factored second moments, and steps relative to the size of a parameter.

torch's own Adafactor caps the rate at 1/√step, lacks the momentum that the Block-Recurrent Transformers were trained
with, and synchronizes with the GPU twice per parameter. Learning rates are set from outside before every step. The
state consists only of tensors and does not depend on the number of replicas.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_DECAY_EXPONENT = -0.8  # the second moments of step t weigh the new gradient by t^−0.8
_TINY_SQUARE = 1e-30  # keeps the moments of a row or column without a gradient positive
_LEAST_SIZE = 1e-3  # of a parameter, so that one near 0 can move away from it
_MOST_UPDATE = 1.0  # root mean square of an update, before the rate


class Adafactor(torch.optim.Optimizer):
    """update = g / √v̂, clipped to a root mean square of 1; step = lr · max(1e-3, rms of the parameter) · update.

    v̂ of a matrix is rows ⊗ columns / mean(rows) of the averaged g², of a vector the averaged g² itself. With
    `momentum` above 0, the steps are averaged. `weight_decay` shrinks parameters by lr · weight_decay.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float = 0.9) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})
        if any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            raise ValueError(
                "adafactor needs whole matrices for its rows and columns, but fsdp2 shards them: "
                "set parallel=ddp, or optimizer.name=adamw"
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            if parameter.ndim > 1:
                state["rows"] = torch.zeros_like(parameter[..., :1])
                state["columns"] = torch.zeros_like(parameter[..., :1, :])
            else:
                state["squares"] = torch.zeros_like(parameter)
            if group["momentum"]:
                state["momentum"] = torch.zeros_like(parameter)
        state["step"] += 1
        update = gradient * self._inverse_root(gradient.square() + _TINY_SQUARE, state)
        update /= (_rms(update) / _MOST_UPDATE).clamp(min=1.0)
        update *= group["lr"] * _rms(parameter).clamp(min=_LEAST_SIZE)
        if group["momentum"]:
            update = state["momentum"].lerp_(update, 1 - group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)

    @staticmethod
    def _inverse_root(squares: Tensor, state: dict[str, Tensor]) -> Tensor:
        """1 / √v̂ after these squares have gone into the averages."""
        weight = state["step"] ** _DECAY_EXPONENT
        if "squares" in state:
            return state["squares"].lerp_(squares, weight).rsqrt()
        rows = state["rows"].lerp_(squares.mean(-1, keepdim=True), weight)
        columns = state["columns"].lerp_(squares.mean(-2, keepdim=True), weight)
        # Two roots, not one of the product: that may leave float32's range.
        return (rows / rows.mean(-2, keepdim=True)).rsqrt() * columns.rsqrt()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
