"""What the code of commit 1c9c81d wrote still loads, and gives the logits that it gave then.

fixtures/run            a hybrid trained for 12 steps in lanes: weights, optimizer, carried states, vocabulary
fixtures/exported       the same as a folder of `transformers`
fixtures/state…         its state after 40 tokens of two sequences
fixtures/families…      configs and first weights of every family
fixtures/expected…      logits at every 13th position
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gss
from gss.config import ModelConfig, from_mapping
from gss.data import Batch
from gss.io import checkpoint
from gss.io.runs import load_model, read_config
from gss.io.states import load_state
from gss.training import snapshot
from gss.training.config import TrainConfig
from gss.training.distributed import World
from gss.training.step import Stepper

FIXTURES = Path(__file__).with_name("fixtures")
CONFIGS = json.loads((FIXTURES / "families.json").read_text(encoding="utf-8"))
TOKENS = (torch.arange(80).reshape(2, 40) * 7) % 257


def assert_expected(name: str, logits: Tensor) -> None:
    torch.testing.assert_close(
        logits.detach()[:, ::13], load_file(FIXTURES / "expected.safetensors")[name], atol=1e-5, rtol=0
    )


def test_run_and_state() -> None:
    loaded = gss.load(FIXTURES / "run")
    assert (loaded.step, loaded.preset, loaded.tokenizer.vocab_size) == (12, "gss-hybrid-tiny", 257)
    assert_expected("run", loaded.model(TOKENS)[0])
    state = load_state(FIXTURES / "state.safetensors")
    assert_expected("state", loaded.model(TOKENS.flip(1), state)[0])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weights_that_stay_in_their_file(tmp_path: Path, kind: torch.dtype) -> None:
    run = FIXTURES / "run"
    config = read_config(run)
    saved = checkpoint.load(run / "checkpoints" / "step-00000012", [checkpoint.MODEL])
    weights = {name: tensor.to(kind) for name, tensor in saved.tensors[checkpoint.MODEL].items()}
    checkpoint.save(tmp_path / "checkpoints", 1, {checkpoint.MODEL: weights}, {})
    copied, mapped = (load_model(tmp_path, config, mapped=mapped)[0] for mapped in (False, True))
    for a, b in zip(copied.parameters(), mapped.parameters(), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert a.requires_grad == b.requires_grad
        assert torch.equal(a, b)


def test_training_goes_on_from_the_checkpoint() -> None:
    saved = checkpoint.load(FIXTURES / "run" / "checkpoints" / "step-00000012")
    config = from_mapping(TrainConfig, saved.trainer["config"])
    stepper = Stepper(gss.build_model(config.model), config, World(torch.device("cpu")))
    snapshot.restore(stepper, saved.tensors, saved.trainer["optimizer"])
    rows = (torch.arange(4 * 33).reshape(4, 33) * 5) % 257
    everywhere = torch.ones(4, 32, dtype=torch.bool)
    stepper.step(Batch(rows[:, :-1], rows[:, 1:], everywhere, ~everywhere, step=11, epoch=0), 11)
    assert_expected("trained", stepper.model.eval()(TOKENS)[0])


def test_export(tmp_path: Path) -> None:
    hf = pytest.importorskip("gss.hf")
    assert_expected("run", hf.GSSForCausalLM.from_pretrained(FIXTURES / "exported")(TOKENS).logits)
    assert_expected("run", gss.load(hf.import_folder(FIXTURES / "exported", tmp_path / "run")).model(TOKENS)[0])


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_of_every_family(family: str) -> None:
    weights = load_file(FIXTURES / "families.safetensors")
    model = gss.build_model(from_mapping(ModelConfig, CONFIGS[family])).eval()
    model.load_state_dict({n.partition(":")[2]: w for n, w in weights.items() if n.partition(":")[0] == family})
    assert_expected(family, model(TOKENS % 61)[0])
