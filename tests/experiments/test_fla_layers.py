"""The recurrence that other packages' kernels are compared with."""

import torch

from experiments.fla_layers import recurrence


def test_the_recurrence_is_its_formula() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 1, size, dtype=torch.float64) for size in (3, 3, 2))
    decay, none = -torch.rand(1, 5, 1, dtype=torch.float64), torch.zeros(1, 5, 1, dtype=torch.float64)
    expected = sum((q[0, 4, 0] @ k[0, t, 0]) * decay[0, t + 1 :, 0].sum().exp() * v[0, t, 0] for t in range(5))
    torch.testing.assert_close(recurrence(q, k, v, decay)[0, 4, 0], expected)
    # By the delta rule at full strength, what is written last under a key is what the key finds.
    key = torch.nn.functional.normalize(k[:, :1], dim=-1).expand(1, 5, 1, 3)
    torch.testing.assert_close(recurrence(key, key, v, none, none + 1), v)
    torch.testing.assert_close(recurrence(key, key, v, none), v.cumsum(1))
