"""The precision in which a model reads and writes text: float32, or bfloat16 by autocast.

bfloat16 is for products; parameters, states and the state spaces' arithmetic stay float32, as in training. Training may
also use fp8, which is bfloat16 with the wide products in 8 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from gss.model import LanguageModel
from gss.ops import fast

PRECISIONS = ("auto", "fp32", "bf16")


def check(precision: str) -> None:
    """Refuse anything but the name of a precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be auto, fp32 or bf16, not {precision!r}")


def resolved(precision: str, model: LanguageModel) -> str:
    """fp32 or bf16: auto is bf16 for a float32 model on a GPU that has it, and leaves any other as it is (fp32)."""
    check(precision)
    if precision != "auto":
        return precision
    if model.device.type != "cuda" or model.norm.weight.dtype != torch.float32:
        return "fp32"
    with torch.cuda.device(model.device):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def resolved_for_training(precision: str, model: LanguageModel) -> str:
    """fp32, bf16 or fp8, which is refused on hardware that lacks it."""
    if precision != "fp8":
        return resolved(precision, model)
    fast.check_fp8(model.device)
    return precision


@contextmanager
def running(model: LanguageModel, precision: str) -> Iterator[None]:
    """Around whatever runs a model in a precision (that was resolved), in the thread that runs it.

    Autocast and the current GPU, where kernels are launched, are a thread's own. Do not yield inside: the caller's
    code would run in that precision too.
    """
    device = model.device
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    reduced = torch.autocast(device.type, torch.bfloat16) if precision in ("bf16", "fp8") else nullcontext()
    with on_device, reduced, fast.in_fp8() if precision == "fp8" else nullcontext():
        yield
