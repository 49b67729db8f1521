"""Configs: what overrides what, what is refused, and every recipe."""

from pathlib import Path

import pytest
from train_runs import run

from gss.config import from_mapping, to_mapping
from gss.presets import PRESETS, preset
from gss.recipes import recipe_names
from gss.training import ParallelConfig, TrainConfig, resolve
from gss.training.config import differences
from tests.making import SMALL_MODEL

# The paper's tables 1 and 2, as far as their models are presets: (file, preset) → rows × length.
PAPER_RUNS = {
    **{("lm1b", name): (1024, 512) for name in ("gss-lm1b", "dss-lm1b", "transformer-lm1b")},
    **{("pg19", name): (128, 4096) for name in ("gss", "gss-l", "gss-hybrid-l", "dss")},
    **{("arxiv", name): (128, 4096) for name in ("gss", "gss-l", "gss-hybrid-l", "dss")},
    **{("github", name): (256, 4096) for name in ("gss", "gss-l", "gss-hybrid-l", "dss")},
}
BLOCK_RECURRENT = ("rec-fixed-skip", "feedback-lstm-single", "feedback-fixed-skip", "slide", "xl")
SMALL_RUNS = {
    "tiny": ["gss-tiny", "gss-hybrid-tiny"],
    "quickstart": ["gss2-tiny", "gss-tiny"],
    "small": ["gss-small"],
    "tiny-block-recurrent": ["rec-fixed-skip-tiny"],
    "small-block-recurrent": ["rec-fixed-skip-small", "xl-small"],
    "muon": ["gss2-small", "gss-hybrid-small"],
    "box": ["gss2-small"],
    "cpu": ["gss-small"],
}
TUNING = {"fine-tune", "lora", "tune-state"}  # test_train_start runs what they are for


def test_every_file_is_covered_here() -> None:
    files = set(recipe_names())
    assert files == {file for file, _ in PAPER_RUNS} | SMALL_RUNS.keys() | {"block-recurrent"} | TUNING


def test_every_preset_of_the_paper_has_a_run() -> None:
    stated = {name for name, entry in PRESETS.items() if entry.paper_parameters is not None}
    assert stated <= {name for _, name in PAPER_RUNS} | set(BLOCK_RECURRENT)


@pytest.mark.parametrize(("file", "name"), PAPER_RUNS)
def test_the_papers_runs(file: str, name: str) -> None:
    config = resolve(name, file)
    assert (config.rows, config.length) == PAPER_RUNS[file, name]
    assert config.model == preset(name)
    assert config.steps == 125_000
    assert config.batching == ("packed" if file == "lm1b" else "segments")
    optimizer = config.optimizer
    assert optimizer.learning_rate in (0.0064, 0.0032, 0.0016, 0.0008)
    assert (optimizer.warmup_steps, optimizer.final_learning_rate) == (1000, 1e-6)
    assert (optimizer.state_space_learning_rate, optimizer.weight_decay, optimizer.clip_norm) == (1e-3, 0.1, 1.0)


@pytest.mark.parametrize("name", BLOCK_RECURRENT)
def test_block_recurrent_runs(name: str) -> None:
    config = resolve(name, "block-recurrent")
    assert config.model == preset(name)
    assert (config.batching, config.length, config.steps * config.batch_tokens) == ("lanes", 4096, 125_000 << 19)
    assert config.length % config.model.attention.window == 0
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.warmup_steps, optimizer.weight_decay) == ("adafactor", 1000, 0.0)
    assert (optimizer.learning_rate, optimizer.final_learning_rate) == (0.01, 0.001)


def test_a_setting_that_is_new_does_not_stop_an_old_run() -> None:
    config = resolve("gss-tiny")
    old = to_mapping(config)
    del old["optimizer"]["schedule"], old["model"]["dropout"], old["model"]["recurrent"]
    assert differences(old, config) == {}
    other = resolve("gss-tiny", None, ["optimizer.schedule=inverse_sqrt"])
    assert differences(old, other) == {"optimizer.schedule": ("cosine", "inverse_sqrt")}


def test_what_a_model_does_not_use_may_differ() -> None:
    start = "model.state_space.frequency_init=log_normal"
    for name, differ in (("transformer-tiny", set()), ("gss-tiny", {"model.state_space.frequency_init"})):
        old = to_mapping(resolve(name, None, [start, "model.state_space.frequency_range=[0.1,1.0]"]))
        assert set(differences(old, resolve(name, None, [start]))) == set()
        assert set(differences(old, resolve(name, None, ["model.state_space.frequency_range=[0.1,1.0]"]))) == differ


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in SMALL_RUNS.items() for name in names])
def test_small_runs_run(corpus: Path, tmp_path: Path, file: str, name: str) -> None:
    """With narrower layers, fewer and shorter rows and 3 steps: their own schedule, reports and checkpoints."""
    reports = {"report.evaluate_lengths": [32, 64], "report.evaluate_tokens": 512, "report.sample_tokens": 4}
    settings = SMALL_MODEL | {"length": 64, "batch_tokens": 128, "steps": 3, "device": "cpu"} | reports
    assert len(run(resolve(name, file, settings, 257), corpus, tmp_path / "run")) == 3


def test_what_overrides_what(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "dss-tiny"\nsteps = 7\nseed = 3\n[model]\ndepth = 3\nwidth = 64\n[optimizer]\nbetas = [0.8, 0.9]\n'
    )
    config = resolve(None, file, ["steps=9", "model.depth=5", "checkpoint.every=2"], 300)
    assert (config.preset, config.steps, config.seed) == ("dss-tiny", 9, 3)
    assert (config.model.depth, config.model.width, config.model.vocab_size) == (5, 64, 300)
    assert config.model.pattern == ("dss",)
    assert config.optimizer.betas == (0.8, 0.9)
    assert resolve("gss-tiny", file).model.pattern == ("gss",)
    assert resolve("gss-tiny", file, ["preset=transformer-tiny"]).model.pattern == ("attention",)
    assert resolve("gss-tiny", None, ["model.vocab_size=512"], 300).model.vocab_size == 512


def test_the_strategy_is_set_by_its_group_alone() -> None:
    """As it was when it was the only setting, and in runs from then."""
    config = resolve("gss-tiny", None, ["parallel=fsdp2", "parallel.context=2"])
    assert config.parallel == ParallelConfig(strategy="fsdp2", context=2)
    assert from_mapping(TrainConfig, {"parallel": "fsdp2"}).parallel == ParallelConfig(strategy="fsdp2")
    assert differences({**to_mapping(config), "parallel": "ddp"}, config) == {}


def test_goes_out_and_comes_back() -> None:
    config = resolve("gss-hybrid-tiny", None, ["steps=5", "report.evaluate_lengths=[64, 128]"])
    assert resolve("gss-hybrid-tiny", None, ["steps=5", "report.evaluate_lengths=64, 128"]) == config
    assert from_mapping(TrainConfig, to_mapping(config)) == config
    assert differences(to_mapping(config), config) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["length=100", "batch_tokens=250"],
            r"batch_tokens \(250\) must be a multiple of length \(100\): try 200",
        ),
        (["length=100", "batch_tokens=200", "micro_batch_tokens=50"], "micro_batch_tokens"),
        (["late_length=6144"], r"late_length \(6144\) must be a multiple of length \(4096\): try 4096"),
        (["late_length=12288"], r"batch_tokens \(524288\) must be a multiple of late_length \(12288\)"),
        (["late_length=2048"], r"late_length \(2048\) must be a multiple of length \(4096\): try 4096"),
        (["late_length=8192", "batching=lanes"], "late_length does not work with lanes"),
        (["late_share=1"], "late_share must be over 0 and under 1"),
        (["steps=0"], "steps must be at least 1"),
        (["preset=5"], "there is no preset '5'"),
        (["seed=18446744073709551616"], "seed must be at least -9223372036854775808 and under 18446744073709551616"),
        (["batching=rows"], "batching cannot be 'rows'; choose from: segments, lanes, packed"),
        (["parallel=fsdp"], "parallel.strategy cannot be 'fsdp'; choose from: ddp, fsdp2"),
        (["parallel.context=0"], "parallel.context must be at least 1"),
        (["parallel.context=3"], r"length \(4096\) must be a multiple of parallel.context \(3\)"),
        (["parallel.context=4", "piece_tokens=90"], r"piece_tokens \(90\) must be a multiple of parallel.context"),
        (["precision=fp4"], "choose from: auto, fp32, bf16, fp8"),
        (["optimizer.name=sgd"], "choose from: adamw, adafactor"),
        (["optimizer.schedule=zigzag"], "optimizer.schedule cannot be 'zigzag'; choose from: cosine, inverse_sqrt"),
        (["optimizer.learning_rate=0"], "optimizer.learning_rate must be over 0"),
        (["optimizer.learning_rate=-1e-3"], "optimizer.learning_rate must be over 0"),
        (["optimizer.betas=[0.9, 1.0]"], r"optimizer.betas must be at least 0 and under 1, not 1.0"),
        (["optimizer.betas=[0.9]"], r"optimizer.betas must be two numbers, not \(0.9,\)"),
        (["report.evaluate_lengths=[512, 0]"], "report.evaluate_lengths must be at least 1, not 0"),
        (["checkpoint.keep_last=1"], "keep_last must be at least 2"),
        (["report.log_every=0"], "log_every must be at least 1"),
        (["stepz=3"], "has no field 'stepz'"),
        (["model.vocab_size=100"], "vocabulary has 257 ids, but the model only 100"),
        (["steps"], "not of the form key=value"),
    ],
)
def test_what_cannot_work_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve("gss-tiny", None, settings, 257)


def test_no_preset_and_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model given"):
        resolve(None, None, ["steps=3"])
    with pytest.raises(ValueError, match="there is no preset 'gsss'"):
        resolve("gsss")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ValueError, match="is not valid TOML"):
        resolve("gss", tmp_path / "bad.toml")
    with pytest.raises(ValueError, match="there is no recipe 'smal'; did you mean small"):
        resolve("gss", "smal")
