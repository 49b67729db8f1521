"""Dense products of one or two rows on a CPU, at the speed of memory.

Such a product reads its whole weight for a few operations, so bandwidth is all it needs; but BLAS libraries often run
it on one core, and well under what that core can read (MKL on an AMD EPYC: 10 of 27 GB/s). The same product, its
weight seen as a batch of parts, takes another way through them that keeps all cores reading: no copy, no other
precision, two to three times the speed.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST_ROWS = 2
"""More rows than this are faster the usual way."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; for few rows on a CPU by parts of the weight's rows."""
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    parts = math.gcd(outputs, 2 * torch.get_num_threads())
    if not (x.device.type == "cpu" and 0 < rows <= MOST_ROWS and parts > 1 and x.dtype == weight.dtype):
        return F.linear(x, weight, bias)
    left = weight.unflatten(0, (parts, -1))  # [parts, O / parts, I]
    right = x.reshape(rows, inputs).t().expand(parts, inputs, rows)
    y = torch.bmm(left, right) if bias is None else torch.baddbmm(bias.view(parts, -1, 1), left, right)
    return y.view(outputs, rows).t().reshape(*x.shape[:-1], outputs)


class FewRows(TorchFunctionMode):
    """Within it `F.linear`, and so every dense layer, is `linear` of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))
