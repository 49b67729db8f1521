"""Commands that measure trained models: eval. What they all take: a run, a precision, a state."""

import csv
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from gss.evaluation import Evaluation, LengthResult

Run = Annotated[Path | None, typer.Argument(help="A run folder that `gss train` made. Default: the model in the box.")]
Precision = Annotated[str, typer.Option(help="fp32, bf16 (autocast), or auto: bf16 on a GPU, else fp32.")]
Weights = Annotated[str | None, typer.Option(help="Pack the weights: bf16, int8 or int4. Default: as they are.")]
Speculate = Annotated[bool, typer.Option(help="Draft by lookup in what was read where that is faster; same text.")]
State = Annotated[
    Path | None, typer.Option(help="A state that `gss read` or `gss train --tune state` made: every text starts there.")
]


def evaluate_command(
    data: Annotated[Path, typer.Option(help="A corpus that `gss prepare` made, with the run's vocabulary.")],
    run: Run = None,
    split: Annotated[str, typer.Option(help="The split to score.")] = "valid",
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths, separated by commas; those that no document reaches are left out.")
    ] = "512,4096,16384,65536",
    carry_state: Annotated[
        bool, typer.Option("--carry-state", help="Also read every document whole, with its state carried.")
    ] = False,
    state: State = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint's step. Default: the newest good one.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Score at most this many tokens. Default: all.")] = None,
    piece: Annotated[int, typer.Option(help="Tokens read at a time, which bounds memory.")] = 4096,
    batch_tokens: Annotated[int, typer.Option(help="Tokens read side by side when windows are short.")] = 16_384,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    precision: Precision = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Also write the rows to a CSV file.")] = None,
) -> None:
    """Score held-out documents at several sequence lengths, with the same target tokens at each.

    Under torchrun, sequences longer than a piece are shared among the processes.
    """
    from rich.console import Console

    from gss.box import NAME
    from gss.cli.progress import share_bar
    from gss.data import open_dataset
    from gss.evaluation import evaluate, longest_document
    from gss.io.files import finite
    from gss.lm import load
    from gss.paper import PERPLEXITY
    from gss.training.distributed import joined

    asked = whole_numbers(lengths)
    dataset = open_dataset(data, split)
    longest = longest_document(dataset, max_tokens)
    wanted: list[int | None] = [length for length in asked if length <= longest]
    if not wanted and not carry_state:
        wanted = [*asked]  # which is refused, with the reason
    elif len(wanted) < len(asked):
        beyond = ", ".join(f"{length:,}" for length in asked if length > longest)
        print(f"not scored at {beyond}: the longest document has {longest:,} tokens", file=sys.stderr)
    with joined(device) as world, share_bar("scoring") as show:
        lm, name = load(run, step=step, device=world.device, state=state), str(run or NAME)
        result = evaluate(
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
    rows = [{**asdict(row), "perplexity": row.perplexity} for row in result.rows]
    if csv_file:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            columns = [name for name in rows[0] if not name.startswith("by_")]
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    if as_json:
        facts = {"run": name, "step": lm.step, "data": dataset.hash, "split": split}
        print(json.dumps(finite({**facts, "documents": result.documents, "rows": rows}), indent=2))
    else:
        Console().print(
            _score_table(result, f"{name} on {split}, step {lm.step:,}", PERPLEXITY.get(lm.preset or "", {}))
        )


def _score_table(result: "Evaluation", title: str, paper: "Mapping[str, Mapping[int, float]]") -> "Table":
    """A row for each length, which fits into 80 columns; the paper's perplexities beside ours."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{escape(title)}: {_amount(result)}")
    for column in ("length", "perplexity", "± loss", "per word", "bits/byte", *(f"paper, {name}" for name in paper)):
        table.add_column(column, justify="right")
    for row in result.rows:
        found = [scores.get(row.length or 0) for scores in paper.values()]
        theirs = ["" if score is None else f"{score:.2f}" for score in found]
        table.add_row("whole" if row.length is None else f"{row.length:,}", *_figures(row), *theirs)
    table.caption = "±: standard error of the loss over documents; per word: perplexity per word."
    return table


def _amount(result: "Evaluation") -> str:
    return f"{result.tokens:,} tokens of {result.documents:,} document{'' if result.documents == 1 else 's'}"


def _figures(row: "LengthResult") -> tuple[str, str, str, str]:
    error = "–" if math.isnan(row.standard_error) else f"{row.standard_error:.3f}"
    return f"{row.perplexity:.3f}", error, f"{row.word_perplexity:.4g}", f"{row.bits_per_byte:.3f}"


def length_table(results: "dict[str, Evaluation]", title: str) -> "Table":
    """Perplexity by length, one row per model, with other figures for the longest length."""
    from rich.markup import escape
    from rich.table import Table

    first = next(iter(results.values()))
    table = Table(title=f"{escape(title)}: {_amount(first)}")
    table.add_column("perplexity at", no_wrap=True)
    for row in first.rows:
        table.add_column("whole" if row.length is None else f"{row.length:,}", justify="right", no_wrap=True)
    for column in ("± loss", "per word", "bits/byte"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        last = result.rows[-1]
        scores = [f"{row.perplexity:.3f}" for row in result.rows]
        table.add_row(name, *scores, *_figures(last)[1:])
    table.caption = "±: standard error of the loss over documents. The last three columns are for the longest length."
    return table


def whole_numbers(text: str, what: str = "lengths", example: str = "512,4096") -> list[int]:
    """The numbers of an option that takes several."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is not a list of {what}: write whole numbers with commas, for example {example}")
    return [int(part) for part in parts]
