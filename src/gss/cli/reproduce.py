"""`gss reproduce`: the paper's tables on corpora at hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from gss.cli.options import Device, whole_numbers

if TYPE_CHECKING:
    from gss.reproduce import Corpus, Outcome

STDLIB = Path("data/stdlib")
_TARGETS = (
    "table1 (Transformer, DSS, GSS), table2 (block-recurrent, GSS, GSS-L, GSS-Hybrid-L), or lengths (GSS and "
    "the hybrid by evaluation length)."
)
_SCALES = (
    "tiny: minutes on a CPU. small: 45M to 80M parameters and 105M tokens, minutes per run on a GPU. paper: the full "
    "recipe, for many GPUs; the commands that train are printed, and what has been trained is scored."
)


def reproduce_command(
    target: Annotated[str, Argument(help=_TARGETS)],
    out: Annotated[Path, Option(help="Folder for the runs; those that are finished there are not run again.")] = Path(
        "runs/reproduce"
    ),
    data: Annotated[
        list[Path] | None,
        Option(help="A prepared corpus, or a folder of them; repeatable. Default at the tiny scale: data/stdlib."),
    ] = None,
    corpus: Annotated[list[str] | None, Option(help="Only the corpus in the folder of this name; repeatable.")] = None,
    scale: Annotated[str, Option(help=_SCALES)] = "tiny",
    only: Annotated[
        list[str] | None, Option(help="Only the system of this name; repeatable. An unknown name lists them.")
    ] = None,
    tokens: Annotated[int | None, Option(help="Training tokens of every run. Default: the scale's.")] = None,
    seeds: Annotated[str, Option(help="Seeds, separated by commas.")] = "0",
    evaluate_tokens: Annotated[
        int | None, Option(help="Most tokens to score at each length. Default: the scale's.")
    ] = None,
    set_: Annotated[list[str] | None, Option("--set", help="A setting of every run, `key=value`.")] = None,
    device: Device = "auto",
    quiet: Annotated[bool, Option("--quiet", help="Only the table at the end.")] = False,
) -> None:
    """Train and score the systems of one of the paper's tables at equal tokens; print it beside the paper's figures.

    With the same --out the command resumes: a finished run has a result.json in its folder, and an interrupted one
    continues from its checkpoint. What is fixed, and why: docs/reproducing.md.
    """
    from rich.console import Console

    from gss.cli.show import share_bar
    from gss.config import parse_assignments
    from gss.reproduce import SCALES, TARGETS, planned, reproduce

    for name, value, known in (("target", target, TARGETS), ("scale", scale, SCALES)):
        if value not in known:
            raise ValueError(f"there is no {name} {value!r}; choose from: {', '.join(known)}")
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    trials = planned(
        TARGETS[target],
        SCALES[scale],
        _corpora(data or [], corpus or [], scale),
        only=only or (),
        seeds=list(dict.fromkeys(whole_numbers(seeds, "seeds", "0,1,2"))),
        tokens=tokens,
        evaluate_tokens=evaluate_tokens,
        changes=parse_assignments(set_ or ()),
    )
    outcome = reproduce(
        TARGETS[target],
        trials,
        out,
        device=device,
        quiet=quiet,
        say=lambda text: console.print(text, markup=False),
        **({} if quiet else {"bar": share_bar}),
    )
    _conclude(outcome, out)


def _corpora(data: list[Path], names: Sequence[str], scale: str) -> "list[Corpus]":
    from gss.data import load_tokenizer, prepare
    from gss.reproduce import find_corpora

    if not data:
        if scale != "tiny":
            raise ValueError("no data: give --data FOLDER, a corpus that gss prepare made or a folder of them")
        prepare(["stdlib"], STDLIB, load_tokenizer("bytes"))
        data = [STDLIB]
    return find_corpora(data, names)


def _conclude(outcome: "Outcome", out: Path) -> None:
    print(outcome.text)
    print(f"{len(outcome.done)} results in {out}")
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)
    if outcome.commands:
        print(f"\n{len(outcome.commands)} runs need many GPUs. Train them, then run this command again:\n")
        print("\n".join(outcome.commands))
    if outcome.failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in outcome.failed.items())
        raise ValueError(f"{len(outcome.failed)} runs failed, the others are kept: {reasons}")
