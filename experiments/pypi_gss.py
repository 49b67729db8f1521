"""PyPI's GSS: its layer with the weights of ours, so that both compute the same, and its language model."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gss.config import ModelConfig
from gss.nn.gss import GSSLayer

if TYPE_CHECKING:
    from gated_state_spaces_pytorch import GatedStateSpacesLM
    from gated_state_spaces_pytorch.gss import GSS

PYPI_GSS = "gated-state-spaces-pytorch"
_MISSING = f"the peer {PYPI_GSS} is not installed: pip install 'gss-lm[peers]'"


def pypi_gss(layer: GSSLayer) -> "GSS":
    """PyPI's `gated-state-spaces-pytorch` layer with the weights of ours.

    It has a bias only in the last product, the exact GELU, LayerNorm with epsilon 1e-5, the unit step and zero-order
    hold.
    """
    try:
        from gated_state_spaces_pytorch.gss import GSS
    except ImportError:
        raise ValueError(_MISSING) from None
    space = layer.state_space
    if space.log_step is not None or space.config.discretization != "zoh":
        raise ValueError(f"{PYPI_GSS} has the unit step and zero-order hold alone")
    width, gate_width = layer.gate.in_features, layer.gate.out_features
    peer = GSS(
        dim=width,
        dim_expansion_factor=gate_width / width,
        dss_kernel_N=space.config.modes,
        dss_kernel_H=space.channels,
        dss_kernel_lambda_imag_exp=space.config.imaginary == "exp",
    ).to(layer.gate.weight)
    with torch.no_grad():
        for theirs, ours in paired_parameters(peer, layer):
            theirs.copy_(ours)
    return peer


def pypi_part(layer: GSSLayer, part: str) -> nn.Module:
    """PyPI's layer with our weights, or its state space alone: a rival of `experiments.layer`."""
    peer = pypi_gss(layer)
    if part == "layer":
        return peer
    peer.dss.norm = nn.Identity()
    return peer.dss


def pypi_gss_model(config: ModelConfig) -> "GatedStateSpacesLM":
    """PyPI's language model in the sizes of ours, with its own weights, an untied head and no final norm."""
    try:
        from gated_state_spaces_pytorch import GatedStateSpacesLM
    except ImportError:
        raise ValueError(_MISSING) from None
    return GatedStateSpacesLM(
        num_tokens=config.vocab_size,
        dim=config.width,
        depth=config.depth,
        dim_expansion_factor=config.gate_width / config.width,
        dss_kernel_N=config.state_space.modes,
        dss_kernel_H=config.channels,
    ).eval()


def paired_parameters(peer: "GSS", layer: GSSLayer) -> list[tuple[Any, Any]]:
    """Each parameter of the peer with its counterpart (the halves of C are views of one parameter)."""
    space = layer.state_space
    return [
        (peer.norm.weight, layer.norm.weight),
        (peer.norm.bias, layer.norm.bias),
        (peer.to_u[0].weight, layer.gate.weight),
        (peer.to_v[0].weight, layer.inner.weight),
        (peer.dss.norm.weight, layer.inner_norm.weight),
        (peer.dss.norm.bias, layer.inner_norm.bias),
        (peer.dss.Lambda_real, space.log_decay),
        (peer.dss.Lambda_imag, space.frequency),
        (peer.dss.C_real, space.readout[..., 0]),
        (peer.dss.C_imag, space.readout[..., 1]),
        (peer.dss.param_D, space.skip),
        (peer.to_gate.weight, layer.context.weight),
        (peer.to_out.weight, layer.output.weight),
        (peer.to_out.bias, layer.output.bias),
    ]
