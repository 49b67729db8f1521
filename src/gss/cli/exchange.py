"""Commands that write a model in another form: export and import for other libraries, and quantize."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gss.cli.shared import Step

_TO = "hf: for `transformers`. onnx: one graph for any runtime. web: a page that runs the model."
_RUNTIME = "With --to web: onnxruntime-web's folder `dist`, to copy beside the page instead of a CDN."


Target = StrEnum("Target", ("hf", "onnx", "web"))


def export_command(
    run: Annotated[Path, Argument(help="A run folder that `gss train` made, or box.")],
    out: Annotated[Path, Argument(help="The folder to write; it must be new or empty.", metavar="DIR")],
    to: Annotated[Target, Option(help=_TO)] = Target.hf,
    step: Step = None,
    runtime: Annotated[Path | None, Option(help=_RUNTIME)] = None,
) -> None:
    """Write a run's model for use elsewhere: in `transformers`, as ONNX, or as a static page for the browser."""
    if runtime is not None and to is not Target.web:
        raise ValueError("--runtime is for --to web")
    if to is Target.hf:
        from gss.hf import export_run

        print(f"wrote {export_run(run, out, step=step)}: load it after `import gss.hf`")
    elif to is Target.onnx:
        from gss.export import export_onnx

        print(f"wrote {export_onnx(run, out, step=step)}: model.onnx, and model.json with the shapes of its state")
    else:
        from gss.export import export_page

        folder = export_page(run, out, step=step, runtime=runtime)
        print(f"wrote {folder}: python -m http.server --directory {folder} shows it at http://localhost:8000")


def import_command(
    folder: Annotated[Path, Argument(help="A folder that `gss export` or `save_pretrained` wrote.", metavar="DIR")],
    run: Annotated[Path, Argument(help="The run folder to create; it must be new or empty.")],
) -> None:
    """Turn a folder that `transformers` reads into a run folder, for `gss eval`, `gss generate` and `gss.load`."""
    from gss.hf import import_folder

    print(f"wrote {import_folder(folder, run)}")


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
