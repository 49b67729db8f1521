"""A run's model as an ONNX file.

    tokens [L], position [1], layers.0.modes, …  →  logits [L, V], next.position, next.layers.0.modes, …

L is from 1 to 64: one graph serves for decoding steps, for reading prompts in chunks, and for the rest of a prompt. The
initial state is all zeros.
"""

from pathlib import Path

import numpy as np
import onnx

from gss.export.graph import Graph
from gss.export.layers import LONGEST, Piece, add_layer, state_shapes, waves
from gss.io.files import require_new, write_json, written_folder
from gss.lm import LM, load
from gss.model import LanguageModel
from gss.ops.positions import sinusoid_frequencies

MODEL = "model.onnx"
ABOUT = "model.json"


def export_onnx(run: str | Path | None, out: str | Path, *, step: int | None = None) -> Path:
    """Write a folder with a run's model as `model.onnx`, its description as `model.json`, and its vocabulary."""
    target = Path(out)
    require_new(target)
    lm = loaded(run, step)
    with written_folder(target) as aside:
        write_model(lm, aside)
        lm.tokenizer.save(aside / "vocabulary")
    return target


def loaded(run: str | Path | None, step: int | None) -> LM:
    """Load a run's model, if it can be exported."""
    lm = load(run, step=step)
    if lm.model.first is not None:
        raise ValueError(
            f"{run} is a tuned first state, which an exported model would start without: export the model that it "
            "was tuned for"
        )
    return lm


def write_model(lm: LM, folder: Path) -> None:
    """Write the model and its description to a folder."""
    made = build(lm.model, {"vocabulary": lm.tokenizer.hash, "step": str(lm.step)})
    onnx.save_model(made, folder / MODEL)
    write_json(folder / ABOUT, {
        "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "preset": lm.preset,
        "step": lm.step,
        "vocab_size": lm.model.config.vocab_size,
        "eos_id": lm.tokenizer.eos_id,
        "longest": LONGEST,
        "state": shapes(lm.model),
    })  # fmt: skip


def shapes(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """The float32 tensors of the state by name, besides `position`, int64 [1]."""
    return {
        f"layers.{i}.{name}": shape
        for i, layer in enumerate(model.layers)
        for name, shape in state_shapes(layer).items()
    }


def build(model: LanguageModel, about: dict[str, str] | None = None) -> onnx.ModelProto:
    """The graph of a model; `about` is added to its metadata."""
    config = model.config
    sizes = shapes(model)  # refuses what has no export
    graph = Graph()
    tokens = graph.input("tokens", np.int64, ["L"])
    position = graph.input("position", np.int64, [1])
    state = {name: graph.input(name, np.float32, shape) for name, shape in sizes.items()}
    piece = Piece(graph, tokens, position)
    embedding = graph.matrix(model.embedding)
    x = graph("Gather", embedding, tokens)
    if config.positions == "sinusoidal":
        cos, sin = waves(graph, piece, sinusoid_frequencies(config.width, model.device).cpu().numpy())
        x = graph("Add", x, graph("Concat", sin, cos, axis=1))
    after: dict[str, str] = {}
    for i, layer in enumerate(model.layers):
        own = {name: state[f"layers.{i}.{name}"] for name in state_shapes(layer)}
        x, found = add_layer(graph, layer, x, own, piece)
        after |= {f"layers.{i}.{name}": value for name, value in found.items()}
    scale = config.width**-0.5 if config.head_scale is None else config.head_scale
    hidden = graph("Mul", graph.norm(x, model.norm), graph.number(scale))
    logits = graph("Gemm", hidden, embedding, transB=1)
    graph.output("logits", logits, np.float32, ["L", config.vocab_size])
    graph.output("next.position", graph("Add", position, piece.count), np.int64, [1])
    for name, shape in sizes.items():
        graph.output(f"next.{name}", after[name], np.float32, shape)
    return graph.model({"longest": str(LONGEST), **(about or {})})
