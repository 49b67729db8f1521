"""Options that several commands share, and lists of numbers as an option takes them."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Run = Annotated[Path | None, Argument(help="A run folder that `gss train` made. Default: the model in the box.")]
Step = Annotated[int | None, Option(help="The checkpoint's step. Default: the newest good one.")]
Device = Annotated[str, Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Precision = Annotated[str, Option(help="fp32, bf16 (autocast), or auto: bf16 on a GPU, else fp32.")]
Weights = Annotated[str | None, Option(help="Pack the weights: bf16, int8 or int4. Default: as they are.")]
Speculate = Annotated[bool, Option(help="Draft by lookup in what was read where that is faster; same text.")]
State = Annotated[
    Path | None, Option(help="A state that `gss read` or `gss train --tune state` made: every text starts there.")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Force = Annotated[bool, Option("--force", help="Replace what an earlier command made in OUT.")]


def whole_numbers(text: str, what: str = "lengths", example: str = "512,4096") -> list[int]:
    """The numbers of an option that takes several."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is not a list of {what}: write whole numbers with commas, for example {example}")
    return [int(part) for part in parts]
