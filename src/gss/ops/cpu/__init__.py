"""The C functions for decoding on a CPU (kernels.c, sampler.c), compiled on first use and kept in the user's cache.

They are optional: without a C compiler, or with `GSS_FAST=0`, `library` is None and PyTorch does the same.
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
_TYPES: dict[str, Any] = {"l": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}

ACTIVATIONS = {"gelu": 1, "swish": 2, "relu": 3, "relu2": 4}
"""Those that the C functions know, by the numbers they have there."""


def record(*kinds: Any) -> type[ctypes.Structure]:
    """A structure type: each field is l (a whole number), d (a float), p (a pointer) or another structure type."""
    fields = [(f"field{i}", _TYPES.get(kind, kind)) for i, kind in enumerate(kinds)]
    return type("Record", (ctypes.Structure,), {"_fields_": fields})


def structure(*values: Any) -> ctypes.Structure:
    """A structure with these fields: numbers, other structures, and tensors (or None), which must be kept alive."""
    types = {bool: "l", int: "l", float: "d"}
    kinds = [type(each) if isinstance(each, ctypes.Structure) else types.get(type(each), "p") for each in values]
    return record(*kinds)(*map(pointer, values))


MATRIX = record(*"lllppp")
"""`struct matrix` of products.h: kind, inputs, outputs; values, scale, bias."""


def function(name: str, arguments: str) -> Any | None:
    """A compiled function, or None as for `library`; `arguments` are their types, l a whole number, p a pointer."""
    return _declared(name, arguments) if fast.enabled() else None


@functools.cache
def _declared(name: str, arguments: str) -> Any | None:
    library = _compiled()
    if library is None:
        return None
    found = library[name]
    found.argtypes, found.restype = [_TYPES[argument] for argument in arguments], ctypes.c_int64
    return found


def library() -> ctypes.CDLL | None:
    """The compiled functions; None without a compiler, and where `GSS_FAST=0` turns them off."""
    return _compiled() if fast.enabled() else None


def pointer(value: Any) -> Any:
    """Where a contiguous tensor's numbers are; anything else as it is."""
    return value.data_ptr() if isinstance(value, Tensor) else value


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
        return ctypes.CDLL(str(folder / name))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    """What the processor can do: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
