"""The C functions for decoding on a CPU (kernels.c), compiled on first use and kept in the user's cache.

Nothing needs them: where there is no C compiler, or with `GSS_FAST=0`, `library` is None and PyTorch does the same.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gss.ops import fast

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]
_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """`struct matrix` of kernels.c, and the next two likewise. The tensors must be kept alive."""

    _fields_ = (
        *((name, _LONG) for name in ("kind", "inputs", "outputs")),
        *((name, _POINTER) for name in ("values", "scale", "bias")),
    )


class Norm(ctypes.Structure):
    _fields_ = (("centred", _LONG), ("epsilon", ctypes.c_double), ("weight", _POINTER), ("bias", _POINTER))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Norm) for name in ("norm", "inner_norm")),
        *((name, Matrix) for name in ("inner", "gate", "context", "output")),
        *(("size", _LONG), ("taps", _POINTER)),
    )


def library() -> ctypes.CDLL | None:
    """The compiled functions, where they can be had and are wanted."""
    return _compiled() if fast.enabled() else None


def pointer(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's numbers are."""
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    # torch's own copy of OpenMP, so that its threads are these functions' too: two sets of them would wait for cores.
    openmp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*"))) or ["-fopenmp"]
    command = [compiler, *_FLAGS, str(_SOURCE), *openmp[:1], "-lm"]
    described = [*command, _SOURCE.read_text(encoding="utf-8"), platform.machine(), _processor()]
    name = f"kernels-{hashlib.sha256(''.join(described).encode()).hexdigest()[:16]}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gss"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                written = Path(aside) / name
                subprocess.run([*command, "-o", str(written)], check=True, capture_output=True, timeout=300)
                written.replace(folder / name)
        found = ctypes.CDLL(str(folder / name))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    found.gss_product.argtypes = [_POINTER, _LONG, *[_POINTER] * 2]
    found.gss_blocked_steps.argtypes = [*[_LONG] * 5, *[_POINTER] * 5]
    found.gss_layer.argtypes = [_POINTER, *[_LONG] * 3, *[_POINTER] * 4]
    found.gss_product.restype = found.gss_blocked_steps.restype = found.gss_layer.restype = None
    return found


def _processor() -> str:
    """What the processor can do: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
