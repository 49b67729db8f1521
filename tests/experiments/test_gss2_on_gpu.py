"""The kernels of GSS2 are called as they are defined, which only a GPU would tell otherwise."""

import pytest
import torch

pytest.importorskip("triton")
from experiments import gss2_on_gpu


def test_the_matrix_state_runs_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 70, 2, size) for size in (8, 8, 6))
    given = [q, k, v, -torch.rand(2, 2, 4).double(), torch.randn(1, 2, 8, 6), torch.randn(2)]
    given = [t.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_() for t in given]
    monkeypatch.setattr(gss2_on_gpu, "operands", lambda *sizes: given)
    y, after = gss2_on_gpu.scan(given)
    assert y.shape == v.shape
    assert after.shape == (1, 2, 8, 6)
    for run in gss2_on_gpu.scan_runs():
        run()
