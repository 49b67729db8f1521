"""Norms whose result is an input of matrix products."""

import torch
from torch import Tensor, nn

from gss.ops import fast


def normalize(norm: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> Tensor:
    """`norm(x)`; on a GPU, without gradients and in reduced precision, rounded to that precision at once."""
    kind = fast.half(x) if fast.without_gradients() else None
    if kind is None or not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        return norm(x)
    from gss.ops.gpu.stream import normalize_to

    epsilon = norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    return normalize_to(x, norm.weight, bias, epsilon, isinstance(norm, nn.LayerNorm), kind)
