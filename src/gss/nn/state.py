"""The contract of sequence layers, and the state that it carries.

    y, state = layer(x, state)        # x [B, L, E] for any L ≥ 1; state None means the start of a sequence

A sequence gives the same y whether it runs whole, in pieces of any size with the state carried, or token by token, and
gradients flow through a carried state. States are values: a layer never changes the one it is given, so a state can be
kept, branched and batched. Rows of a batch are independent and may be at different positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gss.nn.decoding import Block, DecodePlan, GPUPlan, join_rows

LayerState = dict[str, Tensor]
"""Tensors by name, each with the batch first."""
Outputs = tuple[Tensor, LayerState]
"""What a layer makes of a piece: [B, L, E], and the state after it."""


class Slot(NamedTuple):
    """What one tensor of a layer's state looks like."""

    shape: tuple[int | None, ...]
    """Without the batch; None where the size grows with what has been read (0 at the start)."""
    integer: bool = False
    """Whether it counts (int64) instead of holding activations."""


class SequenceLayer(nn.Module):
    """A layer of a language model: maps [B, L, E] to [B, L, E] and carries a state."""

    def state_slots(self) -> dict[str, Slot]:
        """The tensors of this layer's state."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: LayerState | None = None, keep_state: bool = True) -> Outputs:
        """Outputs for the piece x and the state after it (empty if `keep_state` is off, which saves its cost).

        What mixes tokens is wrapped in `gss.nn.documents.each_document_alone`, which is all that packed rows need, and
        in `gss.nn.context.across_ranks`, which is all that sequences on several ranks need.
        """
        raise NotImplementedError

    def mixing_flops(self, length: int) -> float:
        """FLOPs per token for mixing the tokens of a sequence of `length`, on top of dense products."""
        raise NotImplementedError

    def decode_plan(self, state: LayerState, block: Block) -> DecodePlan | None:
        """This layer, prepared to read token by token from a state; None: `forward` is fast enough."""
        return None

    def gpu_plan(self, block: int) -> GPUPlan | None:
        """This layer's weights and launches for decoding on a GPU in blocks of tokens; None: there are no kernels."""
        return None

    def initial_state(self, batch: int) -> LayerState:
        """The state before any token, for `batch` sequences."""
        parameter = next(self.parameters())
        state = {}
        for name, slot in self.state_slots().items():
            shape, kind = (batch, *(size or 0 for size in slot.shape)), state_dtype(parameter.dtype)
            state[name] = torch.zeros(shape, dtype=torch.int64 if slot.integer else kind, device=parameter.device)
        return state

    def check_state(self, state: LayerState, batch: int) -> None:
        """Refuse a state that is not this layer's, or not of this batch size."""
        slots = self.state_slots()
        if not isinstance(state, dict) or state.keys() != slots.keys():
            held = ", ".join(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"the state is another model's: expected {', '.join(slots)}, got {held or 'nothing'}")
        for name, slot in slots.items():
            tensor = state[name]
            rows, *sizes = tensor.shape or (0,)
            if rows != batch:
                raise ValueError(f"the state has {rows} sequences, the input {batch}: select or join its rows")
            pairs = zip(slot.shape, sizes, strict=False)
            if len(sizes) != len(slot.shape) or any(want not in (None, got) for want, got in pairs):
                raise ValueError(
                    f"the state is another model's: {name} has shape {sizes} per sequence, expected {list(slot.shape)}"
                )
            if None in slot.shape and tensor.device.type == "cpu" and bool((state["length"] > sizes[0]).any()):
                raise ValueError(f"the state is damaged: it has read more tokens than its {name} hold")


def state_dtype(parameter_dtype: torch.dtype) -> torch.dtype:
    """What is summed up in a state is float32, whatever the compute precision, except in float64 models.

    Keys and values of full and chunked attention, which are only kept, have the precision they were computed in.
    """
    return torch.float64 if parameter_dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class ModelState:
    """Everything that a model remembers of B sequences, and needs to continue them.

    >>> state = gss.load(run).read("Once upon a time")
    >>> both = gss.ModelState.join([state, state]).select([1, 0])
    >>> both.batch
    2
    """

    position: Tensor
    """[B]: tokens read so far."""
    layers: tuple[LayerState, ...]
    """One state per layer, in order."""

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.position.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of the tensors of all sequences, in bytes."""
        return sum(t.nbytes for t in (self.position, *(t for layer in self.layers for t in layer.values())))

    def map(self, function: Callable[[Tensor], Tensor]) -> "ModelState":
        """The state with a function applied to every tensor."""
        layers = tuple({name: function(tensor) for name, tensor in layer.items()} for layer in self.layers)
        return ModelState(function(self.position), layers)

    def named(self) -> dict[str, Tensor]:
        """The tensors by name, for a file: "position", "layers.0.modes", …"""
        tensors = {"position": self.position}
        for i, layer in enumerate(self.layers):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
        return tensors

    @staticmethod
    def from_named(tensors: Mapping[str, Tensor]) -> "ModelState":
        """The inverse of `named`."""
        layers: dict[int, LayerState] = {}
        for name, tensor in tensors.items():
            if name != "position":
                _, index, slot = name.split(".", 2)
                layers.setdefault(int(index), {})[slot] = tensor
        position = tensors["position"]
        counts = [position, *(tensor for tensor in tensors.values() if not tensor.is_floating_point())]
        whole = position.ndim == 1 and position.dtype == torch.int64 and bool((position >= 0).all())
        if not whole or any(not torch.equal(count, position) for count in counts):
            raise ValueError("its counts of tokens are none, or do not agree")
        return ModelState(tensors["position"], tuple(layers[i] for i in range(len(layers))))

    def detach(self) -> "ModelState":
        """The same values without their graph, as truncated back-propagation needs."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> "ModelState":
        """The same values on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def select(self, rows: Tensor | Sequence[int]) -> "ModelState":
        """The sequences with these indices, in this order; a repeated index branches a sequence."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.position.device)
        return self.map(lambda tensor: tensor.index_select(0, index))

    def where(self, rows: Tensor, other: "ModelState") -> "ModelState":
        """The sequences of `other` where the mask `rows` [B] is true, and those of this state elsewhere.

        With an initial state as `other` this resets rows, for example where the next document starts.
        """
        both = ModelState.join([self, other])
        own = torch.arange(self.batch, device=rows.device)
        return both.select(torch.where(rows, own + self.batch, own))

    @staticmethod
    def join(states: Sequence["ModelState"]) -> "ModelState":
        """The sequences of several states of one model as one batch, each at its own position."""
        if not states:
            raise ValueError("no states to join: give at least one")
        layers = tuple(
            {name: join_rows([state.layers[i][name] for state in states]) for name in layer}
            for i, layer in enumerate(states[0].layers)
        )
        return ModelState(torch.cat([state.position for state in states]), layers)


class FirstState(nn.Module):
    """A state of one sequence that a model starts from instead of an empty one: parameters, so that it can be learned,
    and moves and is saved with the model."""

    def __init__(self, state: ModelState) -> None:
        super().__init__()
        self.position = nn.Parameter(state.position.clone(), requires_grad=False)
        self.layers = nn.ModuleList(nn.Module() for _ in state.layers)
        for module, layer in zip(self.layers, state.layers, strict=True):
            for name, tensor in layer.items():
                module.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))

    def value(self) -> ModelState:
        """The state, of one sequence."""
        return ModelState(self.position, tuple(dict(layer.named_parameters()) for layer in self.layers))

    def forward(self, batch: int) -> ModelState:
        """The state for `batch` sequences."""
        return self.value().select([0] * batch)

    def learn(self) -> int:
        """Set what is read of it to be learned, and return how many numbers that is: of a layer that counts its tokens,
        nothing is read before the first.
        """
        layers = [list(layer.parameters()) for layer in self.layers]
        read = [layer for layer in layers if all(part.is_floating_point() or int(part) for part in layer)]
        return sum(part.requires_grad_().numel() for layer in read for part in layer if part.is_floating_point())
