"""Muon (Jordan et al. 2024): the step of a matrix is its orthogonalized momentum; everything else uses AdamW.

The weight of a linear layer is a linear map, and the orthogonal factor of its momentum changes all directions by the
same amount. Embeddings, norms, biases and state-space parameters are not such maps. They use AdamW inside the same
optimizer, so schedules and checkpoints see only one. Stacked weights (query, key and value in one) are orthogonalized
block by block, since each block is a separate map. Learning rates are set from outside before every step. The state
holds only tensors; under FSDP2, every process gathers each whole matrix and computes the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gss.training.distributed import like

_MOMENTUM = 0.95
_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x ← a·x + b·(x xᵀ)x + c·(x xᵀ)²x, chosen for a steep start; brings every singular value to between 0.7 and 1.2."""
_TINY = 1e-7  # keeps a matrix without gradient at 0
_ADAM_SIZE = 0.2  # root mean square of an AdamW update; with it, the same rates suit both


class Muon(torch.optim.Optimizer):
    """Muon for the groups that have `orthogonal` set, AdamW for the others; decoupled weight decay for both.

    `blocks` gives the number of equal matrices that are stacked, by rows, in a parameter: 1 if it is not named.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        epsilon: float = 1e-8,
        blocks: Mapping[Tensor, int] | None = None,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "orthogonal": False})
        self._blocks = dict(blocks or {})
        self._matrices = [group for group in self.param_groups if group["orthogonal"]]
        rest = [group for group in self.param_groups if not group["orthogonal"]]
        # It shares the group objects and the state, so setting rates and restoring checkpoints work as usual.
        self._adamw = torch.optim.AdamW(rest, betas=betas, eps=epsilon, fused=True) if rest else None
        if self._adamw is not None:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if self._adamw is not None:
            self._adamw.step()
        for group in self._matrices:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter, update in zip(members, self._updates(members), strict=True):
                rows, columns = parameter.shape
                size = _ADAM_SIZE * max(rows // self._blocks.get(parameter, 1), columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(like(update, parameter), alpha=-group["lr"] * size)

    def _updates(self, parameters: list[Tensor]) -> list[Tensor]:
        """Each parameter's momentum, orthogonalized block by block; blocks of one shape are batched."""
        by_shape: dict[tuple[int, ...], list[tuple[int, bool, Tensor]]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            for block in self._moved(parameter).chunk(self._blocks.get(parameter, 1)):
                tall = block.shape[0] > block.shape[1]
                flat = block.T if tall else block
                by_shape[flat.shape].append((index, tall, flat))
        done: list[list[Tensor]] = [[] for _ in parameters]
        for same in by_shape.values():
            matrices = orthogonal(torch.stack([flat for *_, flat in same]))
            for (index, tall, _), matrix in zip(same, matrices.unbind(), strict=True):
                done[index].append(matrix.T if tall else matrix)
        return [torch.cat(blocks) for blocks in done]

    def _moved(self, parameter: Tensor) -> Tensor:
        """The whole Nesterov momentum: the running mean, one gradient ahead."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        ahead = gradient.lerp(state["momentum"].lerp_(gradient, 1 - _MOMENTUM), _MOMENTUM)
        return ahead.full_tensor() if isinstance(ahead, DTensor) else ahead


def orthogonal(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Matrices [K, rows ≤ columns, columns] with their singular values brought near 1, in their own precision.

    Computed in `dtype`: by default in bfloat16 on a GPU, where products are cheap, and as they are elsewhere.
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrices.is_cuda else matrices.dtype
    a, b, c = _COEFFICIENTS
    # A norm over all entries is no less than the largest singular value, which must be at most 1.
    x = (matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=_TINY)).to(dtype)
    for _ in range(_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
