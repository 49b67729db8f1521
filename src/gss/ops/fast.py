"""One switch for all kernels: whether they are wanted, and whether the GPU can run them.

GPU kernels are on by default if there is an NVIDIA GPU with bfloat16 tensor cores and Triton is installed. Kernels that
trade precision for speed, within that of 16-bit operands, only run if 16 bits are asked for, by autocast or by the
tensors themselves. `GSS_FAST=0` in the environment, or `disabled()` around some code, selects plain PyTorch.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None
_HALVES = (torch.bfloat16, torch.float16)

P = ParamSpec("P")
R = TypeVar("R")

_enabled = os.environ.get("GSS_FAST", "1") != "0"
_fp8 = False


@contextmanager
def _switched(name: str, value: bool) -> Iterator[None]:
    before, globals()[name] = globals()[name], value
    try:
        yield
    finally:
        globals()[name] = before


def disabled() -> AbstractContextManager[None]:
    """Plain PyTorch inside, whatever the machine has."""
    return _switched("_enabled", False)


def enabled() -> bool:
    """Whether anything but plain PyTorch is wanted."""
    return _enabled


def usable(device: torch.device) -> bool:
    """Whether GPU kernels can run on a device and are wanted."""
    return _enabled and _TRITON and device.type == "cuda" and _capable(device.index)


def prepare(device: torch.device) -> None:
    """Do what the first kernels on a device would wait for, in a thread beside other work: importing ours, launching
    one, for which Triton loads its driver and hashes itself, and a product, for which cuBLAS is set up. Nothing where
    kernels cannot run.
    """
    if usable(device):
        from gss.ops.gpu import decode_launch, long, transpose  # noqa: F401

        with torch.no_grad():
            some = torch.zeros(1, 16, 16, dtype=torch.bfloat16, device=device)
            transpose.swapped(some)[0] @ some[0]


def half(tensor: Tensor) -> torch.dtype | None:
    """The 16-bit type that kernels may compute in for this tensor; None where there are none or it wants more."""
    if not usable(tensor.device):
        return None
    if tensor.dtype in _HALVES:
        return tensor.dtype
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(tensor.device.type):
        return torch.get_autocast_dtype(tensor.device.type)
    return None


def in_fp8() -> AbstractContextManager[None]:
    """Inside, products that have an 8-bit path take it, where they would have taken a 16-bit kernel's."""
    return _switched("_fp8", True)


def fp8() -> bool:
    """Whether 8-bit products are wanted. Not a thread's own: autograd runs what is recomputed in another thread."""
    return _fp8


def check_fp8(device: torch.device) -> None:
    """Refuse a device that has no products in 8 bits, or no kernels around them."""
    needs = "precision=fp8 needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper and later)"
    if device.type != "cuda":
        raise ValueError(f"{needs}, but the device is {device.type!r}: use bf16 or fp32")
    with torch.cuda.device(device):
        if not usable(device):
            raise ValueError(f"{needs}, Triton, and GSS_FAST must not be 0: use bf16")
        major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise ValueError(f"{needs}, but this one has {major}.{minor}: use bf16")


def without_gradients() -> bool:
    """Whether nothing here will be differentiated and no compiler is looking, which would join operations itself."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _capable(index: int | None) -> bool:
    # A kernel is launched on the current device, wherever its tensors are.
    current = torch.cuda.current_device()
    return index in (None, current) and torch.cuda.get_device_capability(current) >= (8, 0)


_capable._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result would import the compiler


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, put off until someone has imported the compiler: before that, nothing is compiled."""
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(function)
        return (disabled or function)(*args, **kwargs)

    return call


class Operation(Generic[R]):
    """A function that is one operation to autograd and to the compiler: a `torch.library.custom_op`.

    The first call of one of those imports the compiler, which takes seconds. Where nothing is differentiated and nobody
    has imported it, the function is called as it is.
    """

    def __init__(self, name: str, function: Callable[..., R]) -> None:
        self.op = torch.library.custom_op(name, function, mutates_args=())
        self.register_fake, self.register_autograd = self.op.register_fake, self.op.register_autograd
        self._function = function

    def __call__(self, *args: Any) -> R:
        if without_gradients() and "torch._dynamo" not in sys.modules:
            return self._function(*args)
        return self.op(*args)


def operation(name: str) -> Callable[[Callable[..., R]], Operation[R]]:
    """Make a function that changes none of its arguments an `Operation`."""
    return functools.partial(Operation, name)
