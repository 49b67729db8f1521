"""Kernels of 8-bit products in Triton's interpreter: its casts put right, and training sent through them on a CPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gss.ops import fast

KINDS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def correct_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry of what it rounds up to 8 bits, so PyTorch casts for it."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, before: Any, after: Any, rounding: Any) -> Any:
        if str(before) == "fp32" and str(after) in KINDS:
            return torch.from_numpy(np.array(data)).to(KINDS[str(after)]).view(torch.uint8).numpy()
        return convert(data, before, after, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def products_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in fp8 on a CPU: the kernels of the gate and of the head interpreted, everything else plain."""
    from gss.ops.gpu import fp8_gate

    correct_casts(monkeypatch)
    monkeypatch.setitem(fp8_gate.TILE, "STEPS", 2)  # what is past the last row takes as long here as what is not
    monkeypatch.setattr(fast, "check_fp8", lambda device: None)
    kernels = SimpleNamespace(
        half=lambda x: torch.bfloat16 if torch.is_autocast_enabled(x.device.type) and fast.fp8() else None,
        fp8=fast.fp8,
        usable=lambda device: False,
        without_gradients=fast.without_gradients,
    )
    monkeypatch.setattr("gss.ops.gate.fast", kernels)
    monkeypatch.setattr("gss.loss.fast", kernels)
