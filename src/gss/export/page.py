"""A folder that runs a model in the browser: a static page, the model as ONNX, and its vocabulary for JavaScript.

Any file server can serve it. The page loads onnxruntime-web from a content delivery network, or from a local copy.
"""

import shutil
from pathlib import Path
from typing import Any

from gss.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from gss.export.model import ABOUT, loaded, write_model
from gss.io.files import read_json, require_new, write_file, write_json, written_folder

RUNTIME = "https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/"
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
_PAGE = Path(__file__).parent / "page"
_SHARED = Path(__file__).parents[1] / "serve" / "page"  # the playground's looks
_SHARED_FILES = ("style.css", "icon.svg")
_NORMAL, _UNKNOWN, _SYMBOL, _BYTE = 1, 2, 4, 6  # SentencePiece's kinds of pieces


def export_page(
    run: str | Path | None, out: str | Path, *, step: int | None = None, runtime: str | Path | None = None
) -> Path:
    """Write a folder with a page that runs a run's model in the browser.

    `runtime` is a folder with the files of onnxruntime-web, the `dist` of its npm package. They are copied next to the
    page, which then needs nothing from elsewhere.
    """
    target = Path(out)
    require_new(target)
    for name in RUNTIME_FILES if runtime else ():
        if not (Path(str(runtime)) / name).is_file():
            raise ValueError(f"{runtime} has no {name}: give the folder `dist` of the npm package onnxruntime-web")
    lm = loaded(run, step)
    vocabulary = browser_vocabulary(lm.tokenizer)
    with written_folder(target) as aside:
        write_model(lm, aside)
        write_json(aside / "vocabulary.json", vocabulary)
        name = "the model in the box" if run is None or str(run) == "box" else Path(run).resolve().name
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
