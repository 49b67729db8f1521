"""What a model's state spaces remember, as numbers: eigenvalues, time constants, kernels; at the start and now.

The start is drawn again: training seeds torch with the run's seed and builds the model, and so does this. Models
without state spaces have none of it.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from gss.model import LanguageModel, build_model
from gss.nn.state_space import DiagonalStateSpace
from gss.ops.kernel import kernel
from gss.report.run import Run

KERNEL_LENGTH = 4096
_SHOWN = 1024  # positions of a kernel that are drawn one by one
_FAR = 32  # tokens back that count as long ago

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Space:
    """One state space."""

    name: str
    """`layer 3`, or `layer 3b` where a layer has several."""
    log_a: npt.NDArray[np.complex128]
    """What a token multiplies the modes by, as logarithms: [N], or H·N of them where each channel has its own Δ."""
    lags: Array
    energy: Array
    """Root mean square over channels of the kernel, around each of the lags (tokens back, from 1)."""
    farthest: int
    """The channel whose kernel has most energy long ago."""
    taps: Array
    """The first positions of every channel's kernel, [H, L]."""

    @property
    def time_constants(self) -> Array:
        """Tokens after which a mode has faded to 1/e."""
        return -1 / self.log_a.real


@dataclass(frozen=True)
class Memory:
    """All state spaces of a model, first to last."""

    now: list[Space]
    start: list[Space] | None
    """None where the start cannot be drawn again: the folder has no seed, or the run was imported."""


def memory(run: Run) -> Memory | None:
    """The state spaces of a run's newest checkpoint and of its start; None without weights or state spaces."""
    if run.loaded is None:
        return None
    now = spaces(run.loaded.model)
    if not now:
        return None
    # What was imported may have changed on the way (a grown vocabulary moves every later draw).
    trained_here = "seed" in run.config and run.environment
    return Memory(now, spaces(build_model(run.model_config, run.config["seed"])) if trained_here else None)


@torch.no_grad()
def spaces(model: LanguageModel, length: int = KERNEL_LENGTH) -> list[Space]:
    """Every state space of a model."""
    found = []
    for number, layer in enumerate(model.sequence_layers(), 1):
        inside = [module for module in layer.modules() if isinstance(module, DiagonalStateSpace)]
        for index, space in enumerate(inside):
            letter = chr(ord("a") + index) if len(inside) > 1 else ""
            found.append(_space(f"layer {number}{letter}", space, length))
    return found


def _space(name: str, space: DiagonalStateSpace, length: int) -> Space:
    readout, log_a = space.discretized()
    taps = kernel(readout, log_a, length).double().cpu().numpy()
    squares = (taps**2).mean(0)
    edges = np.unique(np.round(np.geomspace(1, length, 49)).astype(int))
    bins = list(pairwise(edges.tolist()))  # low … high − 1 tokens back
    energy = [math.sqrt(squares[low:high].mean()) for low, high in bins]
    middles = [math.sqrt(low * (high - 1)) for low, high in bins]
    return Space(
        name,
        log_a.flatten().cpu().numpy(),
        np.array(middles),
        np.array(energy),
        int((taps[:, _FAR:] ** 2).sum(1).argmax()),
        taps[:, :_SHOWN],
    )
