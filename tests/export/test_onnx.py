"""Models as ONNX graphs, run by onnxruntime beside the library's own."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import gss
from gss.accounting import account
from gss.config import override
from gss.data import load_tokenizer
from gss.export import export_onnx, export_page
from gss.export.model import build, rings, shapes, write_model
from gss.lm import LM, run_folder
from gss.nn.quantized import quantize
from tests.conftest import Command
from tests.making import save_run

TOLERANCE = 1e-4
SIZES = (64, 1, 7, 64, 33, 1, 1, 64, 20, 64, 2)
"""Tokens of the pieces that a text is read in: the most, one, and what lies between."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gss": ("gss-tiny", {"state_space.modes": 16}),
    "gss, bilinear, RMS norms, no biases": (
        "gss-tiny",
        {"state_space.discretization": "bilinear", "norm": "rmsnorm", "bias": False, "activation": "relu2"},
    ),
    "gss and chunks of 128": ("gss-hybrid-tiny", {"attention.chunk": 128}),
    "gss and chunks shorter than a piece": ("gss-hybrid-tiny", {"attention.chunk": 8, "positions": "sinusoidal"}),
    "gss2": ("gss2-tiny", {}),
    "gss2, its window longer than a piece, QK-norm": (
        "gss2-tiny",
        {
            "attention.sliding": 100,
            "attention.qk_norm": True,
            "matrix_state.taps": 2,
            "matrix_state.feature_map": "relu2",
        },
    ),
    "attention over a short window": ("llama-tiny", {"attention.sliding": 16, "activation": "relu"}),
    "dss with one step for all channels": ("dss-tiny", {"state_space.step_range": None, "dss_mixers": 2}),
}


def random_model(name: str, changes: dict[str, Any], spread: float = 0.05) -> gss.LanguageModel:
    """A model no weight of which is at its start, where many are zero or one."""
    model = gss.build_model(override(gss.preset(name), {"depth": 3, "width": 64, "gate_width": 96, **changes}), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def session(made: onnx.ModelProto | Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    source = str(made) if isinstance(made, Path) else made.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def logits(
    opened: onnxruntime.InferenceSession, model: gss.LanguageModel, ids: list[int], pieces: tuple[int, ...]
) -> torch.Tensor:
    """The logits [L, V] of a text that is read in pieces, each from the state that the one before it left."""
    sizes = shapes(model)
    state = {"position": np.zeros(1, np.int64), **{name: np.zeros(size, np.float32) for name, size in sizes.items()}}
    names = [output.name for output in opened.get_outputs()]
    found, start = [], 0
    for size in pieces:
        given = {"tokens": np.array(ids[start : start + size]), **state}
        answer = dict(zip(names, opened.run(None, given), strict=True))
        found.append(torch.from_numpy(answer.pop("logits")))
        after = {name.removeprefix("next."): value for name, value in answer.items()}
        for name in rings(model):
            ring, rows = state[name], after[name]
            assert rows.shape == (size, *ring.shape[1:])
            ring[(start + np.arange(size)) % len(ring)] = rows
            after[name] = ring
        state, start = after, start + size
    assert state["position"].tolist() == [len(ids)] == [start]
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_any_length_give_the_models_logits(name: str) -> None:
    model = random_model(*MODELS[name])
    ids = torch.randint(0, model.config.vocab_size, (sum(SIZES),), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(ids[None])[0][0]
    made = build(model)
    assert expected.std() > 0.1
    assert "DFT" not in {node.op_type for node in made.graph.node}
    assert {node.domain for node in made.graph.node} == {""}
    found = logits(session(made), model, ids.tolist(), SIZES)
    assert (found - expected).abs().max() <= TOLERANCE


def test_the_box_step_by_step_and_in_chunks(tmp_path: Path) -> None:
    lm = gss.load()
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:4000]
    ids = [lm.tokenizer.eos_id, *map(int, lm.tokenizer.encode(text))]
    ids = ids[: len(ids) // 64 * 64]
    folder = export_onnx("box", tmp_path / "box")
    with torch.inference_mode():
        expected = lm.model(torch.tensor([ids]))[0][0]
    opened = session(folder / "model.onnx")
    assert len(ids) > 1100  # past the end of the window of its attention
    for pieces in ((1,) * len(ids), (64,) * (len(ids) // 64)):
        assert (logits(opened, lm.model, ids, pieces) - expected).abs().max() <= TOLERANCE
    weights = account(lm.model.config).parameters
    stored = sum(path.stat().st_size for path in run_folder("box").rglob("*.safetensors"))
    assert (folder / "model.onnx").stat().st_size < stored + 0.4 * weights  # its matrices stay as short as they are
    about = json.loads((folder / "model.json").read_text())
    assert {name: list(size) for name, size in shapes(lm.model).items()} == about["state"]
    attention = [i for i, kind in enumerate(lm.model.config.layers) if kind == "attention"]
    assert about["rings"] == [f"layers.{i}.{name}" for i in attention for name in ("keys", "values")] != []
    assert (about["eos_id"], about["parameters"]) == (lm.tokenizer.eos_id, weights)
    assert load_tokenizer(folder / "vocabulary").hash == lm.tokenizer.hash


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.3), ("int4", 0.25)])
def test_packed_weights_stay_packed_in_the_file(weights: str, most: float, tmp_path: Path) -> None:
    changes = {"width": 192, "channels": 64, "gate_width": 256, "state_space.modes": 8}  # wide enough for 4 bits
    model = random_model("gss-hybrid-tiny", changes, 0.2)
    plain = len(build(model).SerializeToString())
    quantize(model, weights)
    made = build(model)
    assert len(made.SerializeToString()) < most * plain
    write_model(LM(model, load_tokenizer("bytes")), tmp_path)
    assert json.loads((tmp_path / "model.json").read_text())["parameters"] == account(model.config).parameters
    unpacked = gss.build_model(model.config).eval()
    with torch.no_grad():
        for name, module in unpacked.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.copy_(model.get_submodule(name).weight)
    rest = {name: tensor for name, tensor in model.state_dict().items() if name in unpacked.state_dict()}
    unpacked.load_state_dict(rest, strict=False)
    ids = torch.arange(100)
    with torch.inference_mode():
        expected = unpacked(ids[None])[0][0]
    assert (logits(session(made), model, ids.tolist(), (64, 36)) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("transformer-tiny", "its state grows with the text"),
        ("dss-tiny", "a step per channel"),
        ("slide-tiny", "SlideLayer has no ONNX export: GSS, GSS2 and attention"),
        ("feedback-fixed-skip-tiny", "FeedbackLayer has no ONNX export"),
    ],
)
def test_what_cannot_be_exported_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    run = save_run(gss.build_model(gss.preset(name)), tmp_path / "run")
    with pytest.raises(ValueError, match=reason):
        export_onnx(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tuned_first_state_is_refused(tmp_path: Path) -> None:
    model = gss.build_model(gss.preset("gss-tiny"))
    model.start_from(model(torch.arange(5)[None])[1].detach())
    run = save_run(model, tmp_path / "run")
    with pytest.raises(ValueError, match="a tuned initial state"):
        export_onnx(run, tmp_path / "out")


def test_the_command_writes_folders_and_says_what_is_missing(tmp_path: Path, command_line: Command) -> None:
    run = save_run(gss.build_model(gss.preset("gss-tiny")), tmp_path / "run")
    status, _, error = command_line("export", run, tmp_path / "onnx", "--to", "onnx")
    assert (status, error) == (0, "")
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == ["model.json", "model.onnx", "vocabulary"]
    for arguments, reason in (
        (["--to", "onnx"], "not an empty folder"),
        (["--to", "onnx", "--runtime", tmp_path], "--runtime only works with --to web"),
    ):
        status, _, error = command_line("export", run, tmp_path / "onnx", *arguments)
        assert status == 1
        assert reason in error
    with pytest.raises(ValueError, match=r"has no ort\.wasm\.bundle\.min\.mjs: give the folder `dist`"):
        export_page(run, tmp_path / "page", runtime=tmp_path)
    assert not (tmp_path / "page").exists()


def test_without_onnx_the_command_says_what_to_install(
    tmp_path: Path, command_line: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("gss.export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    status, _, error = command_line("export", "box", tmp_path / "out", "--to", "web")
    assert (status, "pip install 'gss-lm[onnx]'" in error) == (1, True)
