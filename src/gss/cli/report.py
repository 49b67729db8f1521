"""`gss report`: one HTML page on one or several runs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gss.cli.options import Device, whole_numbers


def report_command(
    runs: Annotated[list[Path], Argument(help="Run folders that `gss train` made.", metavar="RUN...")],
    out: Annotated[Path, Option(help="The file to write.")] = Path("report.html"),
    data: Annotated[Path | None, Option(help="A corpus to score on. Default: each run's own validation data.")] = None,
    max_tokens: Annotated[
        int, Option(help="Most tokens to score per length where no scores are stored; 0: none.")
    ] = 131_072,
    lengths: Annotated[str | None, Option(help="Lengths, separated by commas. Default: the paper's.")] = None,
    again: Annotated[bool, Option("--again", help="Score again, even where scores are stored.")] = False,
    device: Device = "auto",
    prompt: Annotated[str | None, Option(help="The prompt of the samples. Default: the run's newest sample.")] = None,
) -> None:
    """Write a report on one or several runs: curves, scores by length, what the state spaces remember, text."""
    from gss.cli.show import share_bar
    from gss.io.devices import pick_device
    from gss.report import write_report

    with share_bar("reading") as show:
        written = write_report(
            runs,
            out,
            data=data,
            max_tokens=max_tokens,
            lengths=whole_numbers(lengths) if lengths is not None else None,
            again=again,
            device=str(pick_device(device)),
            prompt=prompt,
            show=show,
        )
    print(f"wrote {written}")
