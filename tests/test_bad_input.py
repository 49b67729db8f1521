"""Everything a user can get wrong in building and calling a model: a ValueError that says so."""

from unittest.mock import Mock

import pytest
import torch

import gss
from gss.config import override, parse_assignments, read_toml
from tests.conftest import ALL_FAMILIES, Command, small_config


@pytest.fixture(params=ALL_FAMILIES)
def model(request: pytest.FixtureRequest) -> gss.LanguageModel:
    return gss.build_model(small_config(request.param))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[3, 61]]), "token id 61 is outside the vocabulary of 61"),
        (torch.tensor([[-1, 3]]), "token id -1 is outside"),
        (torch.tensor([[0.5]]), "must be int64 or int32"),
        (torch.tensor([3]), r"shape \[batch, length\]"),
        (torch.empty(1, 0, dtype=torch.int64), "empty"),
        (torch.empty(0, 4, dtype=torch.int64), "empty"),
    ],
)
def test_tokens(model: gss.LanguageModel, tokens: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(tokens)


def test_state_of_another_batch(model: gss.LanguageModel) -> None:
    with pytest.raises(ValueError, match="state has 3 sequences, the input 2"):
        model(torch.zeros(2, 4, dtype=torch.int64), model.initial_state(3))


def test_state_of_another_model(model: gss.LanguageModel) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    deeper = gss.build_model(override(model.config, {"depth": 5}))
    with pytest.raises(ValueError, match="another model's: it has 5 layers"):
        model(tokens, deeper.initial_state(2))
    sizes = {"state_space.modes": 7, "attention.heads": 4, "channels": 7}
    with pytest.raises(ValueError, match="another model's"):
        model(tokens, gss.build_model(override(model.config, sizes)).initial_state(2))


def test_state_of_another_family() -> None:
    one, other = (gss.build_model(small_config(family, depth=2)) for family in ("gss", "transformer"))
    with pytest.raises(ValueError, match="another model's: expected modes, got keys, values, length"):
        one(torch.zeros(2, 4, dtype=torch.int64), other.initial_state(2))
    with pytest.raises(ValueError, match="must be a ModelState"):
        one(torch.zeros(2, 4, dtype=torch.int64), {"modes": 1})  # type: ignore[arg-type]


def test_batches_and_joins(model: gss.LanguageModel) -> None:
    with pytest.raises(ValueError, match="at least 1 sequence"):
        model.initial_state(0)
    with pytest.raises(ValueError, match="no states to join"):
        gss.ModelState.join([])


def test_packed_rows_with_a_state(model: gss.LanguageModel) -> None:
    tokens, starts = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="packed rows carry no state"):
        model.hidden(tokens, starts=starts)
    with pytest.raises(ValueError, match="packed rows carry no state"):
        model.hidden(tokens, model.initial_state(1), keep_state=False, starts=starts)
    model.start_from(model.initial_state(1))
    with pytest.raises(ValueError, match="packed rows start from empty states, but this model has its own"):
        model.hidden(tokens, keep_state=False, starts=starts)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"channels": 0}, "channels must be at least 1, not 0"),
        ({"width": -4}, "width must be"),
        ({"depth": 0}, "depth must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"depth": 2.5}, "depth must be of type int"),
        ({"bias": 1}, "bias must be of type bool"),
        ({"attention.heads": 7}, "the width 128 is not divisible by 7 heads"),
        ({"attention.head_width": 0}, "head_width must be"),
        ({"attention.chunk": -1}, "chunk must be"),
        ({"attention.window": 0}, "window must be at least 1, not 0"),
        ({"recurrent.vectors": 0}, "vectors must be"),
        ({"recurrent.gate": "gru"}, "gate cannot be 'gru'; choose from: fixed, lstm"),
        ({"recurrent.layout": "dual"}, "layout cannot be 'dual'; choose from: skip, single"),
        ({"recurrent.block": 13}, r"recurrent.block is 13, but the stack has only recurrent.blocks = 12: .* 1 to 12"),
        ({"recurrent.block": 0}, "block must be"),
        ({"dropout": 1.0, "pattern": ["slide"]}, "dropout must be at least 0 and under 1, not 1.0"),
        ({"dropout": 0.1}, "gss layers don't support dropout: set dropout to 0, not 0.1"),
        ({"pattern": []}, "pattern is empty"),
        ({"pattern": 3}, "pattern must be a list"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be over 0"),
        ({"positions": "sinusoidal", "width": 129, "attention.heads": 3}, "even width"),
        ({"state_space.modes": 0}, "modes must be"),
        ({"state_space.decay_range": [1.0, 0.1]}, "decay_range must be two numbers"),
        ({"state_space.step_range": [0.0, 0.1]}, "step_range must be two numbers"),
        ({"state_space.decay_range": [0.1]}, "decay_range must be two numbers"),
        ({"state_space": 3}, "state_space is a group of settings"),
        ({"depth.x": 3}, "depth has no field 'x'"),
        ({"name": "x"}, "ModelConfig has no field 'name'"),
        ({"colour": 3}, "ModelConfig has no field 'colour'; choose from: vocab_size"),
        ({"heads": 3}, "has no field 'heads'; did you mean matrix_state.heads or attention.heads?"),
        ({"widht": 3}, r"ModelConfig has no field 'widht'; did you mean width\?"),
        ({"attention.windw": 3}, "AttentionConfig has no field 'windw'; did you mean window"),
        ({"attention.colour": 3}, "AttentionConfig has no field 'colour'"),
    ],
)
def test_impossible_configs(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gss.preset("gss-tiny", **overrides)


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="there is no preset 'gsss'; did you mean gss"):
        gss.preset("gsss")


def test_assignments_and_files(tmp_path) -> None:
    with pytest.raises(ValueError, match="'depth' is not of the form key=value"):
        parse_assignments(["depth"])
    broken = tmp_path / "broken.toml"
    broken.write_text("depth = ")
    with pytest.raises(ValueError, match=r"broken.toml is not valid TOML"):
        read_toml(broken)
    with pytest.raises(ValueError, match=r"there is no settings file .*nowhere.toml"):
        read_toml(tmp_path / "nowhere.toml")


def test_the_command_prints_one_line(command_line: Command) -> None:
    status, _, errors = command_line("params", "nope")
    assert status == 1
    assert errors.startswith("error: there is no preset 'nope'")
    assert "Traceback" not in errors


def test_the_command_prints_one_line_when_memory_runs_out(
    command_line: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, reason in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore"), "CUDA out of memory. Tried"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator"),
        (MemoryError(), "MemoryError"),
    ):
        monkeypatch.setattr("gss.cli.app", Mock(side_effect=error))
        status, _, errors = command_line("presets")
        assert status == 1
        assert errors.startswith(f"error: out of memory; use fewer tokens at a time ({reason}")
        assert errors.count("\n") == 1
    monkeypatch.setattr("gss.cli.app", Mock(side_effect=RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        command_line("presets")


def test_a_file_that_is_missing(command_line: Command) -> None:
    assert command_line("generate", "--prompts", "nofile")[2] == "error: nofile: No such file or directory\n"
