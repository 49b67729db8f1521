"""A run's model as an ONNX file, and as a static page that runs it in a browser.

    tokens [L], position [1], layers.0.modes, …  →  logits [L, V], next.position, next.layers.0.modes, …

L is 1 to 64: one graph serves for decoding steps, for prompts in chunks, and for the last, shorter chunk. The initial
state is all zeros. Any file server can serve the page, which loads onnxruntime-web from a content delivery network, or
from a local copy.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gss.accounting import account
from gss.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from gss.export.graph import Graph
from gss.export.layers import LONGEST, Piece, add_layer, state_shapes, waves
from gss.io.files import read_json, write_file, write_json, written_folder
from gss.lm import LM, load_to_export
from gss.model import LanguageModel
from gss.nn.attention import TransformerBlock
from gss.ops.positions import sinusoid_frequencies

MODEL = "model.onnx"
ABOUT = "model.json"
RUNTIME = "https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/"
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
_PAGE = Path(__file__).parent / "page"
_SHARED = Path(__file__).parents[1] / "serve" / "page"  # the playground's looks
_SHARED_FILES = ("style.css", "icon.svg")
_NORMAL, _UNKNOWN, _SYMBOL, _BYTE = 1, 2, 4, 6  # SentencePiece's kinds of pieces


def export_onnx(run: str | Path | None, out: str | Path, *, step: int | None = None) -> Path:
    """Write a folder with a run's model as `model.onnx`, its description as `model.json`, and its vocabulary."""
    target = Path(out)
    with written_folder(target) as aside:
        lm = load_to_export(run, step=step)
        write_model(lm, aside)
        lm.tokenizer.save(aside / "vocabulary")
    return target


def write_model(lm: LM, folder: Path) -> None:
    """Write the model and its description to a folder."""
    made = build(lm.model, {"vocabulary": lm.tokenizer.hash, "step": str(lm.step)})
    onnx.save_model(made, folder / MODEL)
    write_json(folder / ABOUT, {
        "parameters": account(lm.model.config).parameters,
        "preset": lm.preset,
        "step": lm.step,
        "vocab_size": lm.model.config.vocab_size,
        "eos_id": lm.tokenizer.eos_id,
        "longest": LONGEST,
        "state": shapes(lm.model),
        "rings": sorted(rings(lm.model)),
    })  # fmt: skip


def shapes(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """The float32 tensors of the state by name, besides `position`, int64 [1]."""
    return {
        f"layers.{i}.{name}": shape
        for i, layer in enumerate(model.layers)
        for name, shape in state_shapes(layer).items()
    }


def rings(model: LanguageModel) -> set[str]:
    """The tensors of the state [W, …] whose row for a position is `position` modulo W.

    For these the graph returns only the rows of the piece [L, …], which its caller writes to their places: copying
    them in and out whole would take a browser as long as the rest of a step.
    """
    blocks = [i for i, layer in enumerate(model.layers) if isinstance(layer, TransformerBlock)]
    return {f"layers.{i}.{name}" for i in blocks for name in ("keys", "values")}


def build(model: LanguageModel, about: dict[str, str] | None = None) -> onnx.ModelProto:
    """The graph of a model; `about` is added to its metadata."""
    config = model.config
    sizes, rows = shapes(model), rings(model)  # refuses what has no export
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
    hidden = graph("Mul", graph.norm(x, model.norm), graph.number(model.head_scale))
    logits = graph("Gemm", hidden, embedding, transB=1)
    graph.output("logits", logits, np.float32, ["L", config.vocab_size])
    graph.output("next.position", graph("Add", position, piece.count), np.int64, [1])
    for name, shape in sizes.items():
        graph.output(f"next.{name}", after[name], np.float32, ["L", *shape[1:]] if name in rows else shape)
    return graph.model({"longest": str(LONGEST), **(about or {})})


def export_page(
    run: str | Path | None, out: str | Path, *, step: int | None = None, runtime: str | Path | None = None
) -> Path:
    """Write a folder with a page that runs a run's model in the browser.

    `runtime` is a folder with the files of onnxruntime-web, the `dist` of its npm package. They are copied next to the
    page, which then needs nothing from elsewhere.
    """
    target = Path(out)
    for name in RUNTIME_FILES if runtime else ():
        if not (Path(str(runtime)) / name).is_file():
            raise ValueError(f"{runtime} has no {name}: give the folder `dist` of the npm package onnxruntime-web")
    with written_folder(target) as aside:
        lm = load_to_export(run, step=step)
        write_json(aside / "vocabulary.json", browser_vocabulary(lm.tokenizer))
        write_model(lm, aside)
        name = "the bundled model" if run is None or str(run) == "box" else Path(run).resolve().name
        about = {"name": name, "runtime": "onnxruntime/" if runtime else RUNTIME, **read_json(aside / ABOUT)}
        write_json(aside / ABOUT, about)
        for path in (*_PAGE.iterdir(), *(_SHARED / name for name in _SHARED_FILES)):
            shutil.copyfile(path, aside / path.name)
        playground = (_SHARED / "index.html").read_text(encoding="utf-8")
        prompt = playground[
            playground.index('      <label for="prompt"') : playground.index('        <button id="further"')
        ]
        page = (_PAGE / "index.html").read_text(encoding="utf-8")
        write_file(aside / "index.html", page.replace("      <!-- the playground's prompt -->\n", prompt))
        if runtime:
            (aside / "onnxruntime").mkdir()
            for name in RUNTIME_FILES:
                shutil.copyfile(Path(runtime) / name, aside / "onnxruntime" / name)
    return target


def browser_vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """A vocabulary in the format of the page's tokenizer.js."""
    if isinstance(tokenizer, ByteTokenizer):
        return {"kind": "bytes"}
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise ValueError(_refusal(f"not {tokenizer.kind}"))
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(tokenizer.content)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != trainer.UNIGRAM:
        raise ValueError(_refusal("not SentencePiece's other kinds of models"))
    changes = normalizer.precompiled_charsmap or normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces
    if changes or not trainer.byte_fallback or not normalizer.escape_whitespaces or trainer.treat_whitespace_as_suffix:
        raise ValueError(_refusal("and this one changes texts before it cuts them into pieces"))
    kinds = [piece.type for piece in model.pieces]
    return {
        "kind": "unigram",
        "pieces": [piece.piece for piece in model.pieces],
        "scores": [piece.score if piece.type in (_NORMAL, _SYMBOL) else None for piece in model.pieces],
        "bytes": [index for index, kind in enumerate(kinds) if kind == _BYTE],
        "unknown": kinds.index(_UNKNOWN),
    }


def _refusal(why: str) -> str:
    return (
        f"the page reads bytes and unigram vocabularies that `gss tokenizer train` makes, {why}: use --to onnx, and "
        "the vocabulary's own library"
    )
