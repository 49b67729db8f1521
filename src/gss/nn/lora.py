"""Low-rank fine-tuning (Hu et al. 2021): a dense layer's weight is frozen, and a product of two thin matrices that
starts at zero is added to it and trained. Code that reads `layer.weight` sees the sum; `merged` turns the sum into a
plain weight.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_PLACE = ".parametrizations.weight."
"""What torch puts into the name of a weight that has something on top of it."""


class LowRank(nn.Module):
    """W → W + up·down."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs, dtype=weight.dtype, device=weight.device) / math.sqrt(rank))
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_lora(model: nn.Module, rank: int) -> None:
    """Put a product of this rank on top of every dense layer, in place; nothing else learns from here on."""
    from torch.nn.utils import parametrize  # slow to import, and only training needs it

    model.requires_grad_(False)
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))


def merged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by name with every such product added to its weight; those of a plain model as they are."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner, place, part = name.partition(_PLACE)
        if not place:
            plain[name] = tensor
        elif part == "original":
            start = f"{owner}{_PLACE}0."
            up, down = tensors[f"{start}up"], tensors[f"{start}down"]
            if tensor.shape != (up.shape[0], down.shape[-1]):  # before a product of any size is made
                raise ValueError(f"the LoRA update of {owner} has the wrong size")
            plain[f"{owner}.weight"] = tensor + up @ down
    return plain
