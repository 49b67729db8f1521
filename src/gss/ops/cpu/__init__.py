"""The C functions for decoding on a CPU (kernels.c, sampler.c), compiled on first use and kept in the user's cache.

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
from typing import Any

import torch
from torch import Tensor

from gss.ops import fast

_SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "sampler.c", "products.h")]
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]
_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p

ACTIVATIONS = {"gelu": 1, "swish": 2, "relu": 3, "relu2": 4}
"""Those that the C functions know, by the numbers they have there."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    """`struct matrix` of products.h; those that follow are of its or of kernels.c. The tensors must be kept alive."""

    _fields_ = (*_fields(_LONG, "kind inputs outputs"), *_fields(_POINTER, "values scale bias"))


class Norm(ctypes.Structure):
    _fields_ = (("centred", _LONG), ("epsilon", ctypes.c_double), *_fields(_POINTER, "weight bias"))


class GSS(ctypes.Structure):
    _fields_ = (
        *_fields(Norm, "norm inner_norm"),
        *_fields(Matrix, "inner gate context output"),
        *_fields(_LONG, "phi size"),
        ("taps", _POINTER),
    )


class FeedForward(ctypes.Structure):
    _fields_ = (("norm", Norm), *_fields(Matrix, "inner gated outer"), ("phi", _LONG))


class GSS2(ctypes.Structure):
    _fields_ = (
        ("norm", Norm),
        *_fields(Matrix, "query key value gate output"),
        ("feedforward", FeedForward),
        *_fields(_LONG, "heads modes values taps"),
        *_fields(_POINTER, "short_taps factor energy skip output_scale"),
    )


class Transformer(ctypes.Structure):
    _fields_ = (
        ("norm", Norm),
        *_fields(Matrix, "query_key_value output"),
        ("feedforward", FeedForward),
        *_fields(_LONG, "heads reach chunked"),
        ("frequency", _POINTER),
    )


class Cache(ctypes.Structure):
    _fields_ = (*_fields(_POINTER, "keys values"), *_fields(_LONG, "room position"))


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
    command = [compiler, *_FLAGS, *map(str, _SOURCES[:2]), *openmp[:1], "-lm"]
    sources = [source.read_text(encoding="utf-8") for source in _SOURCES]
    described = [*command, *sources, platform.machine(), _processor()]
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
    for name, longs, pointers in (("product", 1, 2), ("layer", 3, 4), ("transformer", 2, 3)):
        getattr(found, f"gss_{name}").argtypes = [_POINTER, *[_LONG] * longs, *[_POINTER] * pointers]
    found.gss2_layer.argtypes = [_POINTER, *[_LONG] * 3, *[_POINTER] * 5]
    found.gss_blocked_steps.argtypes = [*[_LONG] * 5, *[_POINTER] * 5]
    found.gss_draw.argtypes = [*[_LONG] * 3, *[_POINTER] * 6]
    found.gss_largest.argtypes, found.gss_largest.restype = [_LONG, _POINTER], _LONG
    return found


def _processor() -> str:
    """What the processor can do: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
