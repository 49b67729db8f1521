"""`gss probe`: how much of its context a model uses, on documents and on generated tasks."""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from gss.cli.options import AsJson, Device, Precision, whole_numbers
from gss.cli.show import table

if TYPE_CHECKING:
    from rich.table import Table

    from gss.probe import ContextProbe, Stage

FILE = "probe.json"


class _ContextByDefault(TyperGroup):
    """`gss probe RUN …` is `gss probe context RUN …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["context", *args]
        return super().parse_args(ctx, args)


probe = typer.Typer(
    help="Measure how much of its context a model uses. `gss probe RUN …` is `gss probe context RUN …`.",
    cls=_ContextByDefault,
    no_args_is_help=True,
)


@probe.command()
def context(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders that `gss train` made.")],
    data: Annotated[Path, Option(help="A corpus that `gss prepare` made, with the runs' vocabulary.")],
    split: Annotated[str, Option(help="The split to score.")] = "valid",
    longest: Annotated[
        int | None, Option(help="The longest context. Default: the largest that 8 documents reach.")
    ] = None,
    shortest: Annotated[int, Option(help="The shortest context.")] = 1,
    targets: Annotated[int, Option(help="Consecutive target tokens of a block.")] = 512,
    blocks: Annotated[int, Option(help="Most blocks per document.")] = 2,
    documents: Annotated[int, Option(help="Most documents.")] = 32,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Score the same target tokens after more and more of their own document.

    Each model's result is kept in its run folder as probe.json, from which `gss report` draws a figure.
    """
    from rich.console import Console

    from gss.cli.show import share_bar
    from gss.data import open_dataset
    from gss.io.devices import pick_device
    from gss.io.files import finite, write_json
    from gss.lm import load
    from gss.probe import probe_context

    dataset, results, kept = open_dataset(data, split), {}, []
    for run in runs:
        lm = load(run, device=pick_device(device))
        with share_bar(f"probing {run}") as show:
            result = probe_context(
                lm, dataset, longest=longest, shortest=shortest, targets=targets, per_document=blocks,
                max_documents=documents, precision=precision,
                report=lambda done, total, run=run, show=show: show(f"probing {run}", done / total),  # type: ignore[misc]
            )  # fmt: skip
        results[str(run)] = result
        kept.append(finite({"run": str(run), "step": lm.step, "data": dataset.hash, **asdict(result)}))
        try:
            write_json(run / FILE, kept[-1])
        except OSError as error:
            warnings.warn(f"the result is not kept in the run folder: {error}", stacklevel=1)
    if as_json:
        print(json.dumps(kept, indent=2))
        return
    console, first = Console(), next(iter(results.values()))
    positions = {name: {row.start: f"{row.loss:.4f}" for row in result.by_position} for name, result in results.items()}
    title = "Loss by position, the state carried (nats per token)"
    console.print(_table(title, "positions", positions, name=_positions))
    columns: dict[str, dict[int, str]] = {}
    for name, result in results.items():
        columns[name] = {row.context: f"{row.loss:.4f}" for row in result.fresh}
        columns[f"{name} replaced"] = {row.context: f"{row.loss:.4f}" for row in result.replaced}
        columns[f"{name} ±"] = {row.context: _number(row.excess_error, ".4f") for row in result.replaced}
    read = f"{first.documents:,} document{'s' * (first.documents > 1)}"
    title = f"Loss of the same {first.tokens:,} tokens of {read} by the true tokens before them"
    caption = (
        "Read from a fresh start, and after another document's tokens up to the longest context (replaced). ±: "
        "standard error of the difference between replaced and its last row, over documents."
    )
    console.print(_table(title, "true tokens", columns, caption))
    for name, result in results.items():
        console.print(f"{name}: {_effective(result)}", markup=False, highlight=False)


@probe.command()
def tasks(
    preset: Annotated[str, Option(help="The model: see `gss presets`.")],
    task: Annotated[str, Option(help="induction, selective-copying, recall or passkey.")] = "recall",
    pairs: Annotated[
        int | None, Option("--pairs", "--items", help="Pairs of recall, items, or digits of a passkey.")
    ] = None,
    vocabulary: Annotated[int | None, Option(help="Number of ids. Default: the task's, 8,192 for recall.")] = None,
    length: Annotated[int, Option(help="Tokens of a training sequence.")] = 512,
    lengths: Annotated[str, Option(help="Further lengths to test at, separated by commas.")] = "",
    width: Annotated[int | None, Option(help="The model's width.")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="Another field of the model, e.g. depth=2, or of the optimizer: optimizer.…"),
    ] = None,
    steps: Annotated[int, Option(help="Training steps, those of the curriculum too.")] = 2000,
    rows: Annotated[int, Option(help="Sequences per step.")] = 64,
    curriculum: Annotated[
        str,
        Option(metavar="ITEMS:LENGTH:ROWS:STEPS,...", help="What the first steps are on: 4:16:128:100,8:32:64:100."),
    ] = "",
    sequences: Annotated[int, Option(help="Fresh sequences to test on at each length.")] = 64,
    stretch: Annotated[float, Option(help="After training, multiply the time constants of GSS2 layers by this.")] = 1.0,
    optimizer: Annotated[str, Option(help="muon, adamw or adafactor.")] = "muon",
    learning_rate: Annotated[float, Option(help="The base learning rate.")] = 3.2e-3,
    seed: Annotated[int, Option(help="Draws the first weights and the sequences.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a model on a generated task, and report how often it is right on fresh sequences."""
    from rich.console import Console

    from gss.cli.show import share_bar
    from gss.config import override, parse_assignments, to_mapping
    from gss.io.devices import pick_device
    from gss.io.files import finite
    from gss.presets import preset as named
    from gss.probe import make_task, task_optimizer, train_on_task

    given = parse_assignments(settings or [])
    rates = {key.partition(".")[2]: given.pop(key) for key in list(given) if key.startswith("optimizer.")}
    config = named(preset, **({} if width is None else {"width": width}), **given)
    with share_bar("training") as show:
        result = train_on_task(
            config, make_task(task, pairs, vocabulary), length=length, lengths=whole_numbers(lengths), steps=steps,
            rows=rows, curriculum=_stages(curriculum), sequences=sequences, stretch=stretch, seed=seed,
            optimizer=override(task_optimizer(config, steps, optimizer, learning_rate), rates),
            device=pick_device(device), precision=precision,
            report=lambda done, total: show("training", done / total),
        )  # fmt: skip
    if as_json:
        print(json.dumps(finite({"preset": preset, **asdict(result), "model": to_mapping(config)}), indent=2))
        return
    about = f"{preset} on {task}: {result.items} items, {steps:,} steps at length {length:,}, loss {result.loss:.3f}"
    rows_shown = [
        [f"{a.length:,}", f"{a.sequences}", f"{a.accuracy:.1%}", _number(a.standard_error, ".1%"), f"{a.solved:.1%}"]
        for a in result.accuracy
    ]
    Console().print(table(about, ["length", "sequences", "accuracy", "±", "all right"], rows_shown))


def _stages(text: str) -> list["Stage"]:
    from gss.probe import Stage

    try:
        return [Stage(*map(int, part.split(":"))) for part in text.split(",") if part]
    except (ValueError, TypeError):
        raise ValueError(f"a curriculum is ITEMS:LENGTH:ROWS:STEPS, separated by commas, not {text!r}") from None


def _table(
    title: str,
    rows: str,
    columns: Mapping[str, Mapping[int, str]],
    caption: str = "",
    name: Callable[[int], str] = lambda number: f"{number:,}",
) -> "Table":
    """Columns by their heads, of cells by the number of the row; `rows` says what the numbers are."""
    numbers = sorted({number for column in columns.values() for number in column})
    cells = [[name(number), *(column.get(number, "") for column in columns.values())] for number in numbers]
    return table(title, [rows, *columns], cells, caption)


def _positions(start: int) -> str:
    return f"{start:,} – {max(1, 2 * start) - 1:,}"


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"


def _effective(result: "ContextProbe") -> str:
    first, last = result.replaced[0], result.replaced[-1]
    gain = f"{first.context:,} to {last.context:,} true tokens gain {first.excess:.4f} ± {first.excess_error:.4f} nats"
    if result.effective_context is None:
        return f"no effective context, {gain}"
    low, high = result.effective_interval
    return f"effective context {result.effective_context:,} tokens (95%: {low:,} to {high:,}); {gain}"
