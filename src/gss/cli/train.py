"""`gss train`: train, or resume training."""

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from gss.cli.settings import complete_name, complete_preset, complete_recipe, complete_setting


def train_command(
    data: Annotated[Path, Option(help="A corpus that `gss prepare` made.")],
    out: Annotated[Path, Option(help="The run folder. If it holds checkpoints, training continues from the newest.")],
    preset: Annotated[str | None, Option(help="The model: see `gss presets`.", autocompletion=complete_preset)] = None,
    start: Annotated[
        str | None, Option("--from", help="Weights to start from: a run, an exported folder, or `box`.")
    ] = None,
    lora: Annotated[int | None, Option(min=1, help="Train only low-rank updates of this rank (LoRA).")] = None,
    tune: Annotated[str | None, Option(help="`state`: train only the state that texts start from.")] = None,
    config: Annotated[
        str | None,
        Option(
            help="A recipe (tiny, small, pg19, …) or a TOML file. Default: one for the model and machine.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option(
            "--set",
            help="A setting: steps=1000, optimizer.learning_rate=1e-3, … (`gss settings`).",
            autocompletion=complete_setting,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        Option(help="A setting that may differ from the resumed run's, e.g. `steps`.", autocompletion=complete_name),
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="Show no progress; metrics.jsonl still has it.")] = False,
) -> None:
    """Train a model on a prepared corpus, or continue from the newest good checkpoint of a run.

    Ctrl-C and SIGTERM save and stop (exit status 130 and 143); the same command continues. Several GPUs or machines:
    `torchrun --nproc-per-node 8 -m gss train …`.
    """
    from gss.config import parse_assignments
    from gss.training import train
    from gss.training.start import plan

    given = {"start": start, "lora": lora, "tune": tune}
    settings = {name: value for name, value in given.items() if value is not None} | parse_assignments(set_ or ())
    run, chosen = plan(data, out, preset, config, settings)
    if chosen and not quiet and os.environ.get("RANK", "0") == "0":
        print(chosen, flush=True)
    result = train(run, data, out, allow=allow or (), quiet=quiet)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
