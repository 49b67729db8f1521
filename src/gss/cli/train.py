"""`gss train`: train, or resume training."""

from pathlib import Path
from typing import Annotated

import typer


def train_command(
    data: Annotated[Path, typer.Option(help="A corpus that `gss prepare` made.")],
    out: Annotated[
        Path, typer.Option(help="The run folder. If it holds checkpoints, training continues from the newest.")
    ],
    preset: Annotated[str | None, typer.Option(help="The model: see `gss presets`.")] = None,
    config: Annotated[
        str | None, typer.Option(help="A recipe: its name (tiny, small, pg19, …), or a TOML file.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting, `key=value`: steps=1000, optimizer.learning_rate=1e-3, model.depth=8."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A setting that may differ from those of the run that is resumed, for example `steps`."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress; metrics.jsonl still has it.")] = False,
) -> None:
    """Train a model on a prepared corpus, or continue from the newest good checkpoint of a run.

    Ctrl-C and SIGTERM save and stop (exit status 130 and 143); the same command continues. Several GPUs or machines:
    `torchrun --nproc-per-node 8 -m gss train …`.
    """
    from gss.data import read_manifest
    from gss.training import resolve, train

    run = resolve(preset, config, set_ or (), read_manifest(data).tokenizer["vocab_size"])
    result = train(run, data, out, allow=allow or (), quiet=quiet)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
