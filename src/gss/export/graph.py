"""A builder of ONNX graphs, which the layers' exports call node by node. Independent of models.

Weights are stored in bf16, or as integers with scales, if that is exact; a runtime unpacks them once, when it loads the
file.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from gss.nn.quantized import QuantizedEmbedding, QuantizedLinear, packed_weight
from gss.ops.products import GROUP, unpacked

Array = npt.NDArray[Any]
OPSET, IR = 20, 10
KINDS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}


class Graph:
    """Nodes, constants, inputs and outputs; values are named by strings.

    >>> graph = Graph()
    >>> x = graph.input("x", np.float32, ["L", 4])
    >>> graph.output("y", graph("Add", x, graph.constant(np.ones(4, np.float32))), np.float32, ["L", 4])
    """

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._known: dict[Any, str] = {}
        self._count = 0

    def input(self, name: str, kind: Any, shape: Sequence[int | str]) -> str:
        """An input of a dtype and shape; variable dimensions have names."""
        self._inputs.append(helper.make_tensor_value_info(name, KINDS[np.dtype(kind)], shape))
        return name

    def output(self, name: str, value: str, kind: Any, shape: Sequence[int | str]) -> None:
        """Make a value an output of the graph."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, KINDS[np.dtype(kind)], shape))

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """The result of an operator."""
        return self.several(operator, 1, *inputs, **attributes)[0]

    def several(self, operator: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """The results of an operator with several outputs."""
        names = [self._name() for _ in range(count)]
        self._nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names

    def constant(self, array: Array) -> str:
        """A constant; small equal ones are shared."""
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size < 128 else object()
        if key not in self._known:
            self._known[key] = self._name()
            self._constants.append(numpy_helper.from_array(np.asarray(array, order="C"), self._known[key]))
        return self._known[key]

    def whole(self, *numbers: int) -> str:
        """Integers, for shapes and axes."""
        return self.constant(np.array(numbers, np.int64))

    def number(self, value: float) -> str:
        """A scalar constant."""
        return self.constant(np.array(value, np.float32))

    def parameter(self, tensor: Tensor) -> str:
        """A weight in float32, stored as bf16 where that is exact."""
        tensor = tensor.detach().cpu()
        short = tensor.to(torch.bfloat16)
        if tensor.dim() < 2 or not torch.equal(short.to(tensor.dtype), tensor):
            return self.constant(tensor.float().numpy())
        name = self._name()
        raw = short.contiguous().view(torch.int16).numpy().tobytes()
        self._constants.append(helper.make_tensor(name, TensorProto.BFLOAT16, list(tensor.shape), raw, raw=True))
        return self("Cast", name, to=TensorProto.FLOAT)

    def matrix(self, layer: nn.Linear | nn.Embedding) -> str:
        """The weight [O, I] of a dense layer or an embedding, packed or not."""
        inner = layer.head if isinstance(layer, QuantizedEmbedding) else layer
        if not isinstance(inner, QuantizedLinear) or inner._buffers["scale"] is None:
            return self.parameter(inner.weight)
        packed = packed_weight(inner)
        scale = packed.scale
        assert scale is not None
        whole = unpacked(packed._replace(scale=torch.ones_like(scale))).to(torch.int8)  # [O, I]
        each = scale.transpose(1, 2).flatten(0, 1)[: packed.outputs].unsqueeze(-1)  # [O, I / 64, 1]
        groups = self._integers(whole.unflatten(1, (-1, GROUP)).numpy(), packed.bits)
        scaled = self("Mul", groups, self.constant(each.contiguous().numpy()))
        return self("Reshape", scaled, self.whole(packed.outputs, packed.inputs))

    def _integers(self, whole: Array, bits: int) -> str:
        """Integers in float32, stored in 8 bits or, two to a byte, in 4: [O, I / 64, 64]."""
        if bits == 8:
            return self("Cast", self.constant(whole), to=TensorProto.FLOAT)
        low, high = np.split((whole + 8).astype(np.uint8), 2, axis=-1)
        pairs = self.constant(low | high << 4)
        low_half = self("BitwiseAnd", pairs, self.constant(np.array(15, np.uint8)))
        high_half = self("BitShift", pairs, self.constant(np.array(4, np.uint8)), direction="RIGHT")
        halves = self("Concat", low_half, high_half, axis=-1)
        return self("Sub", self("Cast", halves, to=TensorProto.FLOAT), self.number(8.0))

    def dense(self, x: str, *layers: nn.Linear, plus: str | None = None) -> str:
        """Dense layers that read the same input, their outputs side by side: [L, I] → [L, O]; `plus` is added."""
        # Joined and transposed when the file is loaded: the product of a single row is fastest with the inputs first.
        weights = [self.matrix(layer) for layer in layers]
        joined = weights[0] if len(layers) == 1 else self("Concat", *weights, axis=0)
        added = [plus] if plus else []
        if layers[0].bias is not None:
            bias = self.constant(torch.cat([layer.bias.detach().cpu().float() for layer in layers]).numpy())
            added = [self("Add", plus, bias) if plus else bias]
        return self("Gemm", x, self("Transpose", joined, perm=[1, 0]), *added)

    def norm(self, x: str, layer: nn.LayerNorm | nn.RMSNorm) -> str:
        """A norm over the last dimension."""
        scale = self.parameter(layer.weight)
        if isinstance(layer, nn.LayerNorm):
            return self("LayerNormalization", x, scale, self.parameter(layer.bias), epsilon=layer.eps)
        assert layer.eps is not None
        return self.rms(x, layer.eps, scale)

    def rms(self, x: str, epsilon: float, scale: str) -> str:
        """Vectors divided by their root mean square, times a scale, as onnxruntime fuses it into one node."""
        mean = self("ReduceMean", self("Pow", x, self.number(2.0)), self.whole(-1))
        normal = self("Div", x, self("Sqrt", self("Add", mean, self.number(epsilon))))
        return self("Mul", normal, scale)

    def activation(self, x: str, name: str) -> str:
        """One of `gss.choices.ACTIVATIONS`."""
        if name == "gelu":
            return self("Gelu", x)
        if name == "swish":
            return self("Mul", x, self("Sigmoid", x))
        positive = self("Relu", x)
        if name not in ("relu", "relu2"):
            raise ValueError(f"the activation {name} cannot be exported to ONNX yet: add it to gss.export.graph")
        return positive if name == "relu" else self("Mul", positive, positive)

    def first(self, table: Array, count: str, axis: int) -> str:
        """The first `count` entries of a table along an axis."""
        return self("Slice", self.constant(table), self.whole(0), count, self.whole(axis))

    def reshaped(self, x: str, *shape: int) -> str:
        """Reshape; 0 keeps a dimension, −1 infers it."""
        return self("Reshape", x, self.whole(*shape))

    def transposed(self, x: str, *order: int) -> str:
        """Permute the dimensions."""
        return self("Transpose", x, perm=list(order))

    def model(self, about: dict[str, str]) -> onnx.ModelProto:
        """The finished model, checked; `about` becomes its metadata."""
        graph = helper.make_graph(self._nodes, "gss", self._inputs, self._outputs, self._constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
        made.producer_name = "gss"
        helper.set_model_props(made, about)
        onnx.checker.check_model(made)
        return made

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"
