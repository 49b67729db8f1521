"""One switch for every GPU kernel: where they can run, and whether they are wanted.

They are on wherever they can be: an NVIDIA GPU with bfloat16 tensor cores, Triton installed, and work in the reduced
precision of autocast. `GSS_FAST=0` in the environment, or `disabled()` around some code, leaves the plain paths.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_enabled = os.environ.get("GSS_FAST", "1") != "0"


@contextmanager
def disabled() -> Iterator[None]:
    """Plain PyTorch inside, whatever the machine has."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def usable(device: torch.device) -> bool:
    """Whether GPU kernels can run on a device and are wanted."""
    return _enabled and device.type == "cuda" and _supported(device.index or 0)


@functools.cache
def _supported(index: int) -> bool:
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(index) >= (8, 0)
