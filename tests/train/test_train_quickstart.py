"""`gss quickstart` goes the whole way: here with narrow models and a few steps."""

from pathlib import Path

from train_runs import SMALL_MODEL, command

CONFIG = "quickstart"
NARROW = {"model.matrix_state.heads": 1, "model.matrix_state.value_width": 4, "model.attention.heads": 1}


def test_the_whole_way_and_again(tmp_path: Path) -> None:
    small = {**SMALL_MODEL, **NARROW, "steps": 3, "length": 64, "batch_tokens": 256, "report.log_every": 1}
    sets = [f"--set={key}={value}" for key, value in small.items()]
    arguments = ["quickstart", "--config", CONFIG, "--data", tmp_path / "data", "--runs", tmp_path / "runs", *sets]
    process = command(*arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    for name in ("gss2-tiny", "gss-tiny"):
        assert (tmp_path / "runs" / name / "checkpoints" / "step-00000003").is_dir()
        assert f"{name}: " in output
    for word in ("unigrams", "512", "16,384", "nats per byte", "$ gss generate", "run folders: "):
        assert word in output
    process = command(*arguments)
    again, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "resuming from step 3 of 3" in again
    assert [line for line in again.splitlines() if "nats per byte" in line] == [
        line for line in output.splitlines() if "nats per byte" in line
    ]
