"""Dense layers and embeddings whose weights are packed in fewer bits, for models that only decode.

They replace `nn.Linear` and `nn.Embedding` and give the same results, except for rounding; `weight` unpacks. They also
exist for float32, where packing changes nothing, so that a decoder always multiplies through `gss.ops.products`.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gss.ops.products import BITS, GROUP, Packed, linear, pack, shapes, unpacked

_NARROW = 128


class QuantizedLinear(nn.Linear):
    """A dense layer with a packed weight."""

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = packed.inputs, packed.outputs
        self.register_buffer("packed", packed.values)
        self.register_buffer("scale", packed.scale)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The whole matrix, unpacked."""
        return unpacked(packed_weight(self))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, packed_weight(self), self.bias)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the matrix: what it is as an embedding."""
        found = unpacked(packed_weight(self), index)
        return found.float() if found.dtype == torch.bfloat16 else found


class QuantizedEmbedding(nn.Embedding):
    """An embedding that is a `QuantizedLinear` seen from the other side, as the tied head needs it."""

    def __init__(self, packed: Packed) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packed.outputs, packed.inputs
        self.head = QuantizedLinear(packed)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The whole matrix, unpacked."""
        return self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head.rows(tokens)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def packed_weight(layer: nn.Linear) -> Packed:
    """The weight of a dense layer of either kind."""
    if not isinstance(layer, QuantizedLinear):
        return Packed(layer.weight.detach(), None, layer.out_features)
    values = layer._buffers["packed"]
    assert values is not None
    return Packed(values, layer._buffers["scale"], layer.out_features)


def project(x: Tensor, embedding: nn.Embedding) -> Tensor:
    """An embedding as the head: [..., E] → [..., V]."""
    return embedding.head(x) if isinstance(embedding, QuantizedEmbedding) else F.linear(x, embedding.weight)


def packed_twin(module: nn.Module, bits: int | None = None) -> nn.Module | None:
    """A dense layer or an embedding with its weight packed (None: as it is); None for any other module.

    In 8 and 4 bits, a weight whose width is not a multiple of 64 stays as it is. With 4 bits, embeddings, narrow
    matrices and those that write to the residual stream get 8: in the box, 4 bits there cost the most perplexity.
    """
    if type(module) not in (nn.Linear, nn.Embedding):
        return None
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    if bits is None:
        packed = Packed(weight, None, len(weight))
    elif bits < 16 and weight.shape[1] % GROUP:
        return None
    else:
        careful = isinstance(module, nn.Embedding) or min(weight.shape) <= _NARROW or getattr(module, "last", False)
        packed = pack(weight, 8 if careful and bits == 4 else bits)
    return _with(module, packed)


def _with(module: nn.Module, packed: Packed) -> nn.Module:
    return QuantizedLinear(packed, module.bias) if isinstance(module, nn.Linear) else QuantizedEmbedding(packed)


def weights_of(model: nn.Module) -> str | None:
    """The format of a model's packed weights, by the fewest bits among them: bf16, int8 or int4; None if none is."""
    packed = (packed_weight(module).bits for module in model.modules() if isinstance(module, QuantizedLinear))
    return {bits: name for name, bits in BITS.items()}.get(min(packed, default=0))


def quantize(model: nn.Module, weights: str) -> None:
    """Pack the weights of every dense layer and embedding of a model in place: bf16, int8 or int4."""
    if weights not in BITS:
        raise ValueError(f"weights must be one of {', '.join(BITS)}, not {weights!r}")
    if packed := weights_of(model):
        raise ValueError(f"the model's weights are in {packed} already: load it with weights={weights!r}")
    _replace(model, {name: packed_twin(module, BITS[weights]) for name, module in model.named_modules()})


def unpacked_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model with no weight packed."""
    state = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            for name in ("packed", "scale"):
                state.pop(f"{path}.{name}", None)
            state[f"{path.removesuffix('.head')}.weight"] = module.weight.float()
    return state


def expect(model: nn.Module, saved: Mapping[str, Sequence[int]]) -> None:
    """Make room in a model for weights that were saved packed, given the shapes of all saved tensors."""
    found: dict[str, nn.Module | None] = {}
    for name, shape in saved.items():
        path = name.removesuffix(".packed").removesuffix(".head")
        if name.endswith(".packed") and type(module := model.get_submodule(path)) in (nn.Linear, nn.Embedding):
            outputs, inputs = module.weight.shape  # type: ignore[misc]
            bits = 32 * shape[1] // inputs if len(shape) == 4 else 16
            size, scale = shapes(outputs, inputs, bits)
            room = torch.empty(size, dtype=torch.bfloat16 if scale is None else torch.uint8)
            found[path] = _with(module, Packed(room, None if scale is None else torch.empty(scale), outputs))
    _replace(model, found)


def _replace(model: nn.Module, by: Mapping[str, nn.Module | None]) -> None:
    for path, module in by.items():
        if module is not None:
            model.set_submodule(path, module)
