"""Commands that exchange models with `transformers`: export, import."""

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer


def export_command(
    run: Annotated[Path, typer.Argument(help="A run folder that `gss train` made.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must be new or empty.", metavar="DIR")],
    step: Annotated[int | None, typer.Option(help="The checkpoint's step. Default: the newest good one.")] = None,
) -> None:
    """Write a run's model as a folder that `transformers` loads, with its tokenizer and a model card."""
    print(f"wrote {_classes().export_run(run, out, step=step)}: load it after `import gss.hf`")


def import_command(
    folder: Annotated[
        Path, typer.Argument(help="A folder that `gss export` or `save_pretrained` wrote.", metavar="DIR")
    ],
    run: Annotated[Path, typer.Argument(help="The run folder to create; it must be new or empty.")],
) -> None:
    """Turn a folder that `transformers` reads into a run folder, for `gss eval`, `gss generate` and `gss.load`."""
    print(f"wrote {_classes().import_folder(folder, run)}")


def _classes() -> ModuleType:
    try:
        import gss.hf
    except ImportError as error:
        raise ValueError(str(error)) from error
    return gss.hf
