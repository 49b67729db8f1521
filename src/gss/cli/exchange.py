"""Commands that write a model in another form: export and import for `transformers`, and quantize."""

from pathlib import Path
from types import ModuleType
from typing import Annotated

from typer import Argument, Option

from gss.cli.options import Step


def export_command(
    run: Annotated[Path, Argument(help="A run folder that `gss train` made.")],
    out: Annotated[Path, Argument(help="The folder to write; it must be new or empty.", metavar="DIR")],
    step: Step = None,
) -> None:
    """Write a run's model as a folder that `transformers` loads, with its tokenizer and a model card."""
    print(f"wrote {_classes().export_run(run, out, step=step)}: load it after `import gss.hf`")


def import_command(
    folder: Annotated[Path, Argument(help="A folder that `gss export` or `save_pretrained` wrote.", metavar="DIR")],
    run: Annotated[Path, Argument(help="The run folder to create; it must be new or empty.")],
) -> None:
    """Turn a folder that `transformers` reads into a run folder, for `gss eval`, `gss generate` and `gss.load`."""
    print(f"wrote {_classes().import_folder(folder, run)}")


def quantize_command(
    run: Annotated[Path, Argument(help="A run folder that `gss train` made.")],
    out: Annotated[Path | None, Argument(help="The run folder to create. Default: RUN-int8 and so on.")] = None,
    bits: Annotated[int, Option(help="Bits of each weight: 16, 8 or 4.")] = 8,
    step: Step = None,
) -> None:
    """Write a run's model with its matrices in fewer bits, as a run folder: smaller, and faster to decode."""
    from gss.lm import quantize_run

    names = {16: "bf16", 8: "int8", 4: "int4"}
    if bits not in names:
        raise ValueError(f"weights have 16, 8 or 4 bits, not {bits}")
    target = quantize_run(run, out or run.with_name(f"{run.resolve().name}-{names[bits]}"), names[bits], step=step)
    print(f"wrote {target}: use it as any run, for example gss generate {target}")


def _classes() -> ModuleType:
    try:
        import gss.hf
    except ImportError as error:
        raise ValueError(str(error)) from error
    return gss.hf
