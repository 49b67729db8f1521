"""Configs: overrides, files, and the way back from plain data."""

import json

import pytest

import gss
from gss.config import ModelConfig, from_mapping, override, parse_assignments, read_toml, to_mapping
from gss.presets import preset
from gss.training import TrainConfig


@pytest.mark.parametrize("name", gss.PRESETS)
def test_round_trip_through_json(name: str) -> None:
    config = gss.preset(name)
    assert from_mapping(ModelConfig, json.loads(json.dumps(to_mapping(config)))) == config


def test_settings_that_only_fit_together_may_come_in_any_order() -> None:
    settings = {"model.width": 64, "model.attention.heads": 2, "length": 32, "batch_tokens": 96}
    for order in (settings, dict(reversed(settings.items()))):
        config = override(TrainConfig(model=preset("llama-small", width=384, attention={"heads": 6})), order)
        assert (config.model.width, config.model.attention.heads, config.rows) == (64, 2, 3)


def test_overrides_reach_nested_fields() -> None:
    config = gss.preset("gss", depth=3, state_space={"modes": 7}, **{"attention.chunk": 9})
    assert (config.depth, config.state_space.modes, config.attention.chunk) == (3, 7, 9)
    assert config.state_space.decay_range == gss.preset("gss").state_space.decay_range
    both = override(config, {"state_space.modes": 8, "state_space.imaginary": "plain"})
    assert (both.state_space.modes, both.state_space.imaginary) == (8, "plain")


def test_assignments() -> None:
    values = parse_assignments(
        ["depth=3", "norm=rmsnorm", 'activation="swish"', "attention.chunk=none", "pattern=gss, dss", "norm_epsilon=1"]
    )
    config = override(gss.preset("gss-hybrid"), values)
    assert (config.depth, config.norm, config.activation, config.attention.chunk) == (3, "rmsnorm", "swish", None)
    assert config.pattern == ("gss", "dss")
    assert config.norm_epsilon == 1.0


def test_toml(tmp_path) -> None:
    path = tmp_path / "model.toml"
    path.write_text('width = 64\npattern = ["gss", "attention"]\n[state_space]\ndecay_range = [1e-2, 1]\n')
    config = from_mapping(ModelConfig, read_toml(path))
    assert (config.width, config.pattern, config.state_space.decay_range) == (64, ("gss", "attention"), (0.01, 1.0))


def test_the_pattern_names_every_layer() -> None:
    attention = [i for i, kind in enumerate(gss.preset("gss-hybrid-l").layers, start=1) if kind == "attention"]
    assert attention == [2, 6, 10, 14, 18, 22, 26, 30]
    assert gss.preset("gss", depth=3).layers == ("gss",) * 3
