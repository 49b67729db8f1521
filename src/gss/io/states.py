"""Model states in safetensors files: the state after a text, or a tuned initial state."""

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import pad

from gss.io.files import write_file
from gss.nn.state import ModelState

_BLOCK = 64  # values that share a scale
_SCALE = ":scale"


def save_state(state: ModelState, path: str | Path, *, int8: bool = False) -> None:
    """Write a state to a safetensors file, from which you can continue any number of times.

    With `int8` the file is a quarter of the size: every 64 values are rounded to multiples of a common scale.

    >>> lm = gss.load(run)
    >>> gss.save_state(lm.read("Once upon a time"), folder / "state.safetensors")
    >>> state = gss.load_state(folder / "state.safetensors")
    >>> text = lm.generate(" there was", state=state, max_tokens=10)
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.named().items()}
    if int8:
        for name, tensor in list(tensors.items()):
            if tensor.is_floating_point() and tensor.numel():
                tensors[name], tensors[name + _SCALE] = _rounded(tensor)
    write_file(path, save(tensors))


def load_state(path: str | Path, device: torch.device | str = "cpu") -> ModelState:
    """Read a state written by `save_state`. A model that continues from it checks that the state fits.

    >>> gss.save_state(gss.load(run).read("Once"), folder / "once.safetensors")
    >>> gss.load_state(folder / "once.safetensors").position
    tensor([5])
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no state at {path} (`gss read` and `gss train --tune state` make one)")
    try:
        tensors = load_file(Path(path))
        for name in [name for name in tensors if name.endswith(_SCALE)]:
            # In numpy: torch would wake its threads, for which a busy machine takes hundreds of milliseconds.
            scale, own = tensors.pop(name).numpy(), name.removesuffix(_SCALE)
            count = tensors[own].numel()
            values = tensors[own].numpy().reshape(-1) * np.repeat(scale[: -(-count // _BLOCK)], _BLOCK)[:count]
            tensors[own] = torch.from_numpy(values).view(tensors[own].shape)
        return ModelState.from_named(tensors).to(device)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold a model's state: {error}") from None


def _blocks(values: Tensor) -> Tensor:
    return pad(values.flatten(), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values of the same shape, and the scale of each block."""
    blocks = _blocks(values.float())
    scale = blocks.abs().amax(1) / 127
    whole = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return whole.flatten()[: values.numel()].view(values.shape), scale
