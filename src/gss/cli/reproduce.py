"""`gss reproduce`: the paper's tables on corpora at hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gss.reproduce import Corpus, Outcome

STDLIB = Path("data/stdlib")


def register(app: typer.Typer) -> None:
    """Add this module's commands to the app."""
    app.command("reproduce")(reproduce_command)


def reproduce_command(
    target: Annotated[
        str,
        typer.Argument(
            help="table1 (Transformer, DSS, GSS), table2 (block-recurrent, GSS, GSS-L, GSS-Hybrid-L), lengths (GSS and "
            "the hybrid by evaluation length), init and init-hybrid (how state spaces start), rates (learning rates), "
            "or vocabulary (the same text prepared in several ways, in bits a byte).",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Where results go; with the same folder, finished runs are not run again.")
    ] = Path("runs/reproduce"),
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A prepared corpus, or a folder of them; repeatable. Without it, at the tiny scale, this Python's "
            "standard library is prepared as data/stdlib."
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Take only the corpus of this name (its folder's); repeatable.")
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="tiny: minutes on a CPU. small: 45M to 80M parameters and 105M tokens, minutes a run on a GPU. paper: "
            "the full recipe, for many GPUs; on one device only configs and torchrun commands are written."
        ),
    ] = "tiny",
    only: Annotated[
        list[str] | None, typer.Option(help="Take only the system of this name; repeatable. A wrong one lists them.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Training tokens of every run, instead of the scale's; rounded to whole steps.")
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(help="Seeds, separated by commas. `init` gives those after the first to its best two alone."),
    ] = "0",
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds. A run that would not be done by then, by its measured speed, is not started."),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="With a time limit: at last begin a run that does not fit, and save it at the limit."
        ),
    ] = False,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Other work has the same device: no speed is noted. Tables have that of a run of the same shape that "
            "was alone, if there is one.",
        ),
    ] = False,
    evaluate_tokens: Annotated[
        int | None, typer.Option(help="Score at most this many held-out tokens at each length. Default: the scale's.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of every run, `key=value`, to try another than the fixed one."),
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Where run folders with checkpoints go. Default: OUT/runs.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    commit: Annotated[str, typer.Option(help="The commit to note, where the source tree does not know its own.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the table at the end.")] = False,
) -> None:
    """Train and score the systems of a table of the paper at equal tokens; print it with the paper's figures beside.

    Run again with the same --out it goes on: finished runs are known by their files in OUT/results, an interrupted one
    goes on from its checkpoint. What is fixed, and why: docs/reproducing.md.
    """
    from rich.console import Console

    from gss.bench.results import command_line
    from gss.cli.progress import share_bar
    from gss.config import parse_assignments
    from gss.reproduce import SCALES, TARGETS, planned, reproduce

    for name, value, known in (("target", target, TARGETS), ("scale", scale, SCALES)):
        if value not in known:
            raise ValueError(f"there is no {name} {value!r}; choose from: {', '.join(known)}")
    if time_limit is not None and time_limit <= 0:
        raise ValueError(f"--time-limit must be over 0, not {time_limit:g}")
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    runs = planned(
        TARGETS[target],
        SCALES[scale],
        _corpora(data or [], corpus or [], scale),
        only=only or (),
        seeds=_seeds(seeds),
        tokens=tokens,
        evaluate_tokens=evaluate_tokens,
        changes=parse_assignments(set_ or ()),
    )
    outcome = reproduce(
        TARGETS[target],
        runs,
        out,
        work=work,
        time_limit=time_limit,
        partial=partial,
        shared=shared,
        device=device,
        quiet=quiet,
        commit=commit,
        command=command_line(),
        say=lambda text: console.print(text, markup=False),
        bar=share_bar,
    )
    _conclude(outcome, out, scale)


def _corpora(data: list[Path], names: Sequence[str], scale: str) -> "list[Corpus]":
    from gss.data import load_tokenizer, prepare
    from gss.reproduce import find_corpora

    if not data:
        if scale != "tiny":
            raise ValueError("which data? give --data FOLDER, a corpus that gss prepare made or a folder of them")
        prepare(["stdlib"], STDLIB, load_tokenizer("bytes"))
        data = [STDLIB]
    return find_corpora(data, names)


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--seeds {text!r} is not a list of seeds: write whole numbers with commas, for example 0,1,2")
    return list(dict.fromkeys(map(int, parts)))


def _conclude(outcome: "Outcome", out: Path, scale: str) -> None:
    print(outcome.text)
    print(f"wrote {outcome.report}: table.md, results.json and figures; {len(outcome.done)} runs in {out / 'results'}")
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)
    if outcome.failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in outcome.failed.items())
        raise ValueError(f"{len(outcome.failed)} runs failed, the others are kept: {reasons}")
    if not outcome.left:
        return
    names = ", ".join(run.name for run in outcome.left)
    if scale == "paper":
        script = out / "paper" / "launch.sh"
        print(
            f"{len(outcome.left)} runs are not trained. The paper's scale is for many GPUs and this machine has at "
            f"most one, so nothing was started: the config of each run and the commands are in {script.parent}; with "
            f"the same --out, what has been trained is scored. {script}:\n\n{script.read_text(encoding='utf-8')}"
        )
    else:
        print(f"not done, give the same command again: {names}")
