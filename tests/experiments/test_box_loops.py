"""Training the model in the box against loops: what counts as a repeat, and two steps from a box to a box."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

import gss
from experiments import box_loops
from experiments.box_export import FACTS as FACTS_FILE
from experiments.box_export import write_box, write_card
from experiments.box_loops import Rounded, Text, beginnings, repeats, unlikelihood
from gss.config import override
from gss.data import load_tokenizer, open_dataset
from gss.nn.quantized import quantize, unpacked_state
from tests.making import make_corpus, make_run
from tests.test_box import FACTS


def tiny() -> gss.LanguageModel:
    """A model of width 64, so that its matrices can be rounded."""
    settings = {"width": 64, "depth": 2, "feedforward_width": 64, "attention.heads": 2, "vocab_size": 257}
    return gss.build_model(override(gss.preset("gss-hybrid-tiny"), settings), seed=0)


def test_repeats_are_what_the_model_wrote_again() -> None:
    assert repeats(Text([9, 1, 2, 3, 1, 2, 3], 4), 2) == [5, 6]
    assert repeats(Text([9, 1, 2, 3, 1, 2, 3], 4), 3) == [6]
    assert repeats(Text([9, 1, 2, 1, 2, 3, 4], 5), 2) == []  # the prompt's own
    assert repeats(Text([5, 5, 5, 5], 1), 2) == [2, 3]  # a run of one token
    assert repeats(Text([5], 1), 2) == []


def test_beginnings_are_sentences_of_the_books(tmp_path: Path) -> None:
    data = make_corpus(
        tmp_path, {"train/1": "No one knew. The house was old, and stood alone.\n\nCHAPTER IX\n\nHe went. " * 9}
    )
    dataset = open_dataset(data, "train")
    for ids in islice(beginnings(dataset, dataset.tokenizer(), random.Random(0)), 20):
        assert ids[0] == dataset.eos_id
        assert box_loops.SHORTEST < len(ids) <= 1 + box_loops.LONGEST
        assert dataset.tokenizer().decode(ids[1:]).startswith(("No o", "The ", "CHAP", "He w"))


def test_the_unlikelihood_is_that_of_repeats_alone() -> None:
    model = tiny().double()
    text = Text([9, 1, 2, 3, 1, 2, 3], 4)
    found, share = unlikelihood(model, [text, Text([9, 1], 1)], 2, "fp32")
    logs = model(torch.tensor([text.ids]))[0].log_softmax(-1)[0]
    expected = -sum(torch.log1p(-logs[place - 1, text.ids[place]].exp()) for place in (5, 6)) / 4
    torch.testing.assert_close(found, expected.float())
    assert share == 2 / 4
    assert unlikelihood(model, [Text([9, 1], 1)], 2, "fp32")[0] == 0


def test_the_model_runs_rounded_and_is_moved_whole() -> None:
    model, packed = tiny(), tiny()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize(packed, "int4")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rounded = Rounded(model, optimizer, "int4")
    for name, tensor in unpacked_state(packed).items():
        assert torch.equal(model.state_dict()[name], tensor)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4)
    optimizer.step()
    weight = model.layers[0].output.weight
    assert weight.unique().numel() < weight.numel()
    rounded.restore()
    for name, tensor in whole.items():
        torch.testing.assert_close(model.state_dict()[name], tensor - 1e-4)


def test_two_steps_from_a_box_to_a_box(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        f"{split}/{n}": f"The {n}th of the {split} documents says little. " * 20
        for split in ("train", "valid")
        for n in "12"
    }
    data = make_corpus(tmp_path, texts, load_tokenizer("bytes"))
    run = make_run("gss-hybrid-tiny", data, tmp_path / "run", model__width=64, eos_first=True)
    start = write_box(run, tmp_path / "start")
    write_card(start, FACTS)
    sizes = ["--steps=2", "--texts=3", "--measured=16", "--set=report.evaluate_tokens=500", "--set=length=64"]
    sizes += ["--set=batch_tokens=128", "--device=cpu", "--trial"]
    out = tmp_path / "out"
    box_loops.main([f"--from={run}", f"--card={start}", f"--work={tmp_path}", f"--out={out}", *sizes])
    facts = json.loads((out / FACTS_FILE).read_text())
    assert facts["before"]["training"] == FACTS["training"]
    assert facts["training"]["steps"] == gss.load(out).step == 2
    assert facts["unlikelihood"]["after"]["texts"] == 16
    assert facts["unlikelihood"]["after"]["loss"] != facts["unlikelihood"]["before"]["loss"]
    assert "unlikelihood" in (out / "card.md").read_text()
    assert "after: " in capsys.readouterr().out
