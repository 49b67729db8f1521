"""Associative recall and a passkey, with a constant state: the settings that were found, and what they give.

    python -m experiments.recall recall recall-gss passkey --seeds 0,1,2 [--device cuda] [--scale 1.0]

Each study trains a small model on a generated task (`gss.probe`), first on easier sequences of the same task, and tests
it on fresh ones. A result goes into benchmarks/results/probe/, one file per study and seed; --out changes the folder,
and a file that is there is not made again. --scale multiplies every number of steps: 0.05 is a trial run.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gss.bench.machine import provenance
from gss.config import ModelConfig, override, to_mapping
from gss.io.files import finite, write_json
from gss.presets import preset
from gss.probe import Stage, make_task, task_optimizer, train_on_task
from gss.reproduce.tables import markdown, mean
from gss.training import OptimizerConfig

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "probe"

# A large rate for what Adam moves: the short convolution has to turn from the token itself to the one before it.
RATES = {
    "learning_rate": 0.02,
    "matrix_learning_rate": 0.01,
    "embedding_factor": 0.5,
    "state_space_learning_rate": 0.01,
    "warmup_steps": 10,
}
# One layer without attention, whose modes neither turn nor fade within a sequence.
RECALL = {
    "pattern": ("gss2",),
    "depth": 1,
    "width": 128,
    "feedforward_width": 128,
    "matrix_state": {"heads": 2, "value_width": 128},
    "state_space": {"modes": 64, "decay_range": (1e-3, 2e-3), "frequency_range": (1e-6, 1e-4)},
    "embedding_std": 1.0,
    "head_scale": 0.125,
}
# Beside a key that has faded over 4,096 tokens, at 1,000 per time constant, noise is as loud as 65,536 tokens of it are
# beside one that has not: so the model learns to write next to nothing for noise. Stretched afterwards, modes hold.
PASSKEY = {
    **RECALL,
    "width": 64,
    "feedforward_width": 64,
    "matrix_state": {"heads": 1, "value_width": 64, "taps": 8, "skip": 0.0},
    "state_space": {"modes": 32, "decay_range": (1e-3, 1.25e-3), "frequency_range": (1e-8, 1e-7)},
    "head_scale": None,
}
PASSKEY_RATES = {**RATES, "embedding_factor": 1.0, "state_space_learning_rate": 1e-4}
RECALL_STAGES = (
    Stage(4, 16, 128, 150),
    Stage(8, 32, 64, 50),
    Stage(16, 64, 32, 50),
    Stage(32, 128, 16, 50),
    Stage(64, 256, 8, 250),
)
PASSKEY_STAGES = (Stage(5, 32, 64, 75), Stage(5, 256, 16, 25), Stage(5, 1024, 8, 50))


@dataclass(frozen=True)
class Study:
    """A model, a task and how it is trained."""

    preset: str
    changes: dict[str, Any]
    task: str
    length: int
    rows: int
    steps: int
    """Those of the curriculum too."""
    curriculum: tuple[Stage, ...]
    rates: dict[str, Any]
    lengths: tuple[int, ...] = ()
    stretch: float = 1.0

    def model(self) -> ModelConfig:
        """The model's configuration."""
        return preset(self.preset, **self.changes)

    def optimizer(self) -> OptimizerConfig:
        """Muon, at the study's rates."""
        return override(task_optimizer(self.model(), self.steps), self.rates)

    def scaled(self, scale: float) -> "Study":
        """With so many times the steps, at least one in each stage."""
        stages = tuple(stage._replace(steps=max(1, round(scale * stage.steps))) for stage in self.curriculum)
        own = self.steps - sum(stage.steps for stage in self.curriculum)
        steps = sum(stage.steps for stage in stages) + max(1, round(scale * own))
        return replace(self, curriculum=stages, steps=steps)


STUDIES = {
    "recall": Study("gss2-tiny", RECALL, "recall", 512, 8, 800, RECALL_STAGES, RATES),
    "recall-gss": Study("gss-tiny", {}, "recall", 512, 8, 800, RECALL_STAGES, RATES),
    "passkey": Study(
        "gss2-tiny", PASSKEY, "passkey", 4096, 4, 300, PASSKEY_STAGES, PASSKEY_RATES, (16_384, 65_536), 1000.0
    ),
}  # fmt: skip


def measure(study: Study, seed: int, device: str, sequences: int) -> dict[str, Any]:
    """Train and test; everything that is needed to do it again."""
    result = train_on_task(
        study.model(), make_task(study.task), length=study.length, steps=study.steps, rows=study.rows,
        curriculum=study.curriculum, lengths=study.lengths, sequences=sequences, stretch=study.stretch,
        optimizer=study.optimizer(), seed=seed, device=device,
    )  # fmt: skip
    return {**asdict(result), "model": to_mapping(study.model()), "optimizer": to_mapping(study.optimizer())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run studies, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=list(STUDIES))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    for name in given.studies:
        for seed in map(int, given.seeds.split(",")):
            file = given.out / f"{name}.seed{seed}.json"
            if file.exists():
                continue
            found = measure(STUDIES[name].scaled(given.scale), seed, given.device, given.sequences)
            given.out.mkdir(parents=True, exist_ok=True)
            write_json(file, finite({"study": name, **provenance(torch.device(given.device)), **found}))
            rows = ", ".join(f"{row['length']:,}: {row['accuracy']:.2%}" for row in found["accuracy"])
            print(f"{name}, seed {seed}: {rows} ({found['seconds']:.0f} s, loss {found['loss']:.3f})", flush=True)


def table(folder: Path = RESULTS) -> str:
    """Accuracy of kept results in Markdown, a row per study and length, ± over seeds."""
    header = ["study", "layers", "params", "trained at", "tested at", "seeds", "accuracy, %", "all answers right, %"]
    studies: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        studies.setdefault(run["study"], []).append(run)
    rows = []
    for study, runs in studies.items():
        model = runs[0]["model"]
        layers = f"{model['depth']} × {', '.join(model['pattern'])}"
        for index, tested in enumerate(runs[0]["accuracy"]):
            found = [run["accuracy"][index] for run in runs]
            shares = [mean([100 * each[key] for each in found]) for key in ("accuracy", "solved")]
            cells = [f"`{study}`", layers, f"{runs[0]['parameters']:,}", f"{runs[0]['length']:,}"]
            rows.append([*cells, f"{tested['length']:,}", str(len(runs)), *shares])
    return markdown(header, rows, frozenset({"study", "layers"})) if rows else "Not run yet."


if __name__ == "__main__":
    main()
