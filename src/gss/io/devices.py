"""The device that a model runs on."""

import torch

DEVICES = ("auto", "cpu", "cuda")


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for a name in a configuration: cpu, cuda or auto."""
    if name not in DEVICES:
        raise ValueError(f"device cannot be {name!r}; choose from: {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU here: set device=cpu or device=auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} of this machine has no GPU of its own: start torchrun with --nproc-per-node "
            f"{torch.cuda.device_count()} at most"
        )
    return torch.device("cuda", local_rank)
