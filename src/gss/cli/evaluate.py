"""Commands that score a model: eval (perplexity by sequence length) and probe (how much of its context it uses)."""

import csv
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option
from typer.core import TyperGroup

import gss
from gss.box import NAME
from gss.cli.shared import AsJson, Device, Precision, Run, State, Step, print_table, share_bar, whole_numbers
from gss.config import override, parse_assignments, to_mapping
from gss.io.files import file_to_be, finite, write_json
from gss.paper import PERPLEXITY

if TYPE_CHECKING:
    from gss.evaluation import LengthResult
    from gss.probe import Stage


def evaluate_command(
    data: Annotated[Path, Option(help="A corpus made by `gss prepare` with the run's vocabulary.")],
    run: Run = None,
    split: Annotated[str, Option(help="The split to score.")] = "valid",
    lengths: Annotated[str, Option(help="Sequence lengths, separated by commas.")] = "512,4096,16384,65536",
    carry_state: Annotated[bool, Option("--carry-state", help="Also score whole documents.")] = False,
    state: State = None,
    step: Step = None,
    max_tokens: Annotated[int | None, Option(help="Score at most this many tokens. Default: all.")] = None,
    piece: Annotated[int, Option(help="Tokens read at a time, which bounds memory.")] = 4096,
    batch_tokens: Annotated[int, Option(help="Tokens per batch when windows are short.")] = 16_384,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
    csv_file: Annotated[Path | None, Option("--csv", help="Also write the rows to a CSV file.")] = None,
) -> None:
    """Score held-out documents at several sequence lengths, on the same target tokens at each.

    Under torchrun, the processes share sequences that are longer than a piece.
    """
    from gss.data import open_dataset
    from gss.evaluation import longest_document
    from gss.training.distributed import joined

    asked, csv_file = whole_numbers(lengths), csv_file and file_to_be(csv_file)
    dataset = open_dataset(data, split)
    longest = longest_document(dataset, max_tokens)
    wanted: list[int | None] = [length for length in asked if length <= longest]
    if not wanted and not carry_state:
        wanted = [*asked]  # which `evaluate` refuses, with the reason
    elif len(wanted) < len(asked):
        beyond = ", ".join(f"{length:,}" for length in asked if length > longest)
        longest_text = "longest document" if max_tokens is None else "longest text that --max-tokens leaves"
        print(f"not scored at {beyond}: the {longest_text} has {longest:,} tokens", file=sys.stderr)
    with joined(device) as world, share_bar("scoring") as show:
        lm, name = gss.load(run, step=step, device=world.device, state=state), str(run or NAME)
        result = gss.evaluate(
            lm,
            dataset,
            wanted + [None] * carry_state,
            max_tokens=max_tokens,
            piece=piece,
            batch_tokens=batch_tokens,
            precision=precision,
            context=world.context(world.size),
            report=lambda done, total: show("scoring", done / total),
        )
    if not world.leads:
        return
    rows = [row.facts() for row in result.rows]
    if csv_file:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            columns = [name for name in rows[0] if not name.startswith("by_")]
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    if as_json:
        facts = {"run": name, "step": lm.step, "data": dataset.hash, "split": split}
        facts |= {"state": str(state)} if state else {}
        print(json.dumps(finite({**facts, "documents": result.documents, "rows": rows}), indent=2))
        return
    paper = PERPLEXITY.get(lm.preset or "", {})
    cells = [
        ["whole" if row.length is None else f"{row.length:,}", *figures(row)]
        + [f"{scores[row.length]:.2f}" if row.length in scores else "" for scores in paper.values()]
        for row in result.rows
    ]
    documents = f"{result.documents:,} document{'s' * (result.documents > 1)}"
    start = f" from {state}" if state else ""
    title = f"{name}{start} on {split}, step {lm.step:,}: {result.tokens:,} tokens of {documents}"
    header = ["length", "perplexity", "± loss", "per word", "bits/byte", *(f"paper, {corpus}" for corpus in paper)]
    caption = "±: standard error of the loss over documents; per word: perplexity per word."
    print_table(title, header, cells, caption)


def figures(row: "LengthResult") -> list[str]:
    """A row of scores as text: perplexity, its standard error, perplexity per word, bits per byte."""
    error = _number(row.standard_error, ".3f")
    return [f"{row.perplexity:.3f}", error, f"{row.word_perplexity:.4g}", f"{row.bits_per_byte:.3f}"]


class _ContextByDefault(TyperGroup):
    """`gss probe RUN …` is `gss probe context RUN …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["context", *args]
        return super().parse_args(ctx, args)


probe_app = typer.Typer(
    help="Measure how much of its context a model uses. `gss probe RUN …` is short for `gss probe context RUN …`.",
    cls=_ContextByDefault,
    no_args_is_help=True,
)


@probe_app.command()
def context(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders made by `gss train`.")],
    data: Annotated[Path, Option(help="A corpus made by `gss prepare` with the runs' vocabulary.")],
    split: Annotated[str, Option(help="The split to score.")] = "valid",
    longest: Annotated[int | None, Option(help="The longest context. Default: one that 8 documents reach.")] = None,
    shortest: Annotated[int, Option(help="The shortest context.")] = 1,
    targets: Annotated[int, Option(help="Consecutive target tokens per block.")] = 512,
    blocks: Annotated[int, Option(help="Maximum number of blocks per document.")] = 2,
    documents: Annotated[int, Option(help="Maximum number of documents.")] = 32,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Score the same target tokens after more and more of the text before them.

    Each result is also saved in the run folder as probe.json, from which `gss report` draws a figure.
    """
    from gss.data import open_dataset
    from gss.io.devices import pick_device
    from gss.probe import probe_context

    dataset, results, kept = open_dataset(data, split), {}, []
    for run in runs:
        lm = gss.load(run, device=pick_device(device))
        with share_bar(f"probing {run}") as show:
            result = probe_context(
                lm, dataset, longest=longest, shortest=shortest, targets=targets, per_document=blocks,
                max_documents=documents, precision=precision,
                report=lambda done, total, run=run, show=show: show(f"probing {run}", done / total),  # type: ignore[misc]
            )  # fmt: skip
        results[str(run)] = result
        kept.append(finite({"run": str(run), "step": lm.step, "data": dataset.hash, **asdict(result)}))
        try:
            write_json(run / "probe.json", kept[-1])
        except OSError as error:
            warnings.warn(f"the result was not saved in the run folder: {error}", stacklevel=1)
    if as_json:
        print(json.dumps(kept, indent=2))
        return
    console, first = Console(), next(iter(results.values()))
    positions = {name: {row.start: f"{row.loss:.4f}" for row in result.by_position} for name, result in results.items()}
    title = "Loss by position, with the state carried (nats per token)"
    rows = [[f"{start:,} – {max(1, 2 * start) - 1:,}", *cells] for start, cells in _cells(positions)]
    print_table(title, ["positions", *positions], rows)
    read = f"{first.documents:,} document{'s' * (first.documents > 1)}"
    caption = (
        "Read from a fresh start, or after another document's tokens up to the longest context (replaced). ±: "
        "standard error, over documents, of the difference between replaced and its last row."
    )
    for name, result in results.items():
        columns = {
            "fresh": {row.context: f"{row.loss:.4f}" for row in result.fresh},
            "replaced": {row.context: f"{row.loss:.4f}" for row in result.replaced},
            "±": {row.context: _number(row.excess_error, ".4f") for row in result.replaced},
        }
        title = f"{name}: loss of the same {first.tokens:,} tokens of {read} by the true tokens before them"
        rows = [[f"{tokens:,}", *cells] for tokens, cells in _cells(columns)]
        print_table(title, ["true tokens", *columns], rows, caption if result is [*results.values()][-1] else "")
    for name, result in results.items():
        before, after = result.replaced[0], result.replaced[-1]
        gain = f"going from {before.context:,} to {after.context:,} true tokens gains {before.excess:.4f} ± "
        gain += f"{before.excess_error:.4f} nats"
        effective = f"no effective context; {gain}"
        if result.effective_context is not None:
            low, high = result.effective_interval
            effective = f"effective context {result.effective_context:,} tokens (95%: {low:,} to {high:,}); {gain}"
        console.print(f"{name}: {effective}", markup=False, highlight=False)


@probe_app.command()
def tasks(
    preset: Annotated[str, Option(help="The model: see `gss presets`.")],
    task: Annotated[str, Option(help="induction, selective-copying, recall or passkey.")] = "recall",
    pairs: Annotated[int | None, Option("--pairs", "--items", help="Pairs, items, or passkey digits.")] = None,
    vocabulary: Annotated[int | None, Option(help="Number of ids. Default: the task's, 8,192 for recall.")] = None,
    length: Annotated[int, Option(help="Tokens per training sequence.")] = 512,
    lengths: Annotated[str, Option(help="More lengths to test at, separated by commas.")] = "",
    width: Annotated[int | None, Option(help="The model's width.")] = None,
    settings: Annotated[list[str] | None, Option("--set", help="A setting of the model, or optimizer.…=…")] = None,
    steps: Annotated[int, Option(help="Training steps, including those of the curriculum.")] = 2000,
    rows: Annotated[int, Option(help="Sequences per step.")] = 64,
    curriculum: Annotated[
        str,
        Option(
            metavar="ITEMS:LENGTH:ROWS:STEPS,...", help="Easier stages to train on first: 4:16:128:100,8:32:64:100."
        ),
    ] = "",
    sequences: Annotated[int, Option(help="New sequences to test on at each length.")] = 64,
    stretch: Annotated[float, Option(help="After training, multiply the time constants of GSS2 layers by this.")] = 1.0,
    optimizer: Annotated[str, Option(help="muon, adamw or adafactor.")] = "muon",
    learning_rate: Annotated[float, Option(help="The base learning rate.")] = 3.2e-3,
    seed: Annotated[int, Option(help="Determines the initial weights and the sequences.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a model on a generated task, and report how often it is right on new sequences."""
    from gss.io.devices import pick_device
    from gss.probe import make_task, task_optimizer, train_on_task

    given = parse_assignments(settings or [])
    rates = {key.partition(".")[2]: given.pop(key) for key in list(given) if key.startswith("optimizer.")}
    config = gss.preset(preset, **({} if width is None else {"width": width}), **given)
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
    print_table(about, ["length", "sequences", "accuracy", "±", "all correct"], rows_shown)


def _stages(text: str) -> list["Stage"]:
    from gss.probe import Stage

    try:
        return [Stage(*map(int, part.split(":"))) for part in text.split(",") if part]
    except (ValueError, TypeError):
        raise ValueError(f"--curriculum must be ITEMS:LENGTH:ROWS:STEPS,..., not {text!r}") from None


def _cells(columns: Mapping[str, Mapping[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """The rows of columns whose cells are by number: the number of each, and its cells."""
    for number in sorted({number for column in columns.values() for number in column}):
        yield number, [column.get(number, "") for column in columns.values()]


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"
