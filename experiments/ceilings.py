"""The machine's peak rates of matrix products and copies, measured in the same run as what they are compared with."""

import statistics
from dataclasses import dataclass

import torch

from gss.bench.machine import intervals


@dataclass(frozen=True)
class Ceilings:
    """Peak rates: bf16 products on a GPU, float32 on a CPU."""

    square: float
    """FLOP/s of a large square product, the reference for MFU."""
    sustained: float | None
    """The same rate once a GPU has been busy for a second or two and runs at the clock that its power limit allows."""
    tall: float | None
    """FLOP/s of a product of a training step's shape, 131072×1024×4096; GPU alone."""
    copy: float
    """Bytes/s of a copy within the device, counting bytes read and written."""
    square_size: int
    precision: str

    def as_dict(self) -> dict[str, float]:
        """The rates by name, for a header."""
        named = {f"{self.precision} matmul {self.square_size}³, TFLOP/s": self.square / 1e12}
        if self.sustained is not None:
            named["the same, sustained, TFLOP/s"] = self.sustained / 1e12
        if self.tall is not None:
            named[f"{self.precision} matmul 131072×1024×4096, TFLOP/s"] = self.tall / 1e12
        return {**named, "device copy, TB/s": self.copy / 1e12}


def measure_ceilings(device: torch.device, repeats: int = 15) -> Ceilings:
    """Medians on random data (products of zeros draw less power and run faster)."""
    on_gpu = device.type == "cuda"
    dtype, size = (torch.bfloat16, 8192) if on_gpu else (torch.float32, 1024)
    square = _product_rate(size, size, size, dtype, device, repeats)
    sustained = _product_rate(size, size, size, dtype, device, 1500) if on_gpu else None  # two seconds
    tall = _product_rate(131_072, 1024, 4096, dtype, device, repeats) if on_gpu else None
    source = torch.randn((1 << 31 if on_gpu else 1 << 26) // 4, device=device)  # 2 GiB, 64 MiB: beyond any cache
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / statistics.median(intervals(lambda: target.copy_(source), repeats, device))
    return Ceilings(square, sustained, tall, copy, size, "bf16" if on_gpu else "float32")


def _product_rate(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    seconds = statistics.median(intervals(lambda: torch.mm(left, right, out=out), repeats, device))
    return 2 * rows * inner * columns / seconds
