"""`gss eval`: perplexity by sequence length."""

import csv
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from gss.cli.options import AsJson, Device, Precision, Run, State, Step, whole_numbers

if TYPE_CHECKING:
    from gss.evaluation import LengthResult


def evaluate_command(
    data: Annotated[Path, Option(help="A corpus that `gss prepare` made, with the run's vocabulary.")],
    run: Run = None,
    split: Annotated[str, Option(help="The split to score.")] = "valid",
    lengths: Annotated[str, Option(help="Sequence lengths, separated by commas.")] = "512,4096,16384,65536",
    carry_state: Annotated[bool, Option("--carry-state", help="Also read every document whole.")] = False,
    state: State = None,
    step: Step = None,
    max_tokens: Annotated[int | None, Option(help="Score at most this many tokens. Default: all.")] = None,
    piece: Annotated[int, Option(help="Tokens read at a time, which bounds memory.")] = 4096,
    batch_tokens: Annotated[int, Option(help="Tokens read side by side when windows are short.")] = 16_384,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
    csv_file: Annotated[Path | None, Option("--csv", help="Also write the rows to a CSV file.")] = None,
) -> None:
    """Score held-out documents at several sequence lengths, with the same target tokens at each.

    Under torchrun, sequences longer than a piece are shared among the processes.
    """
    from rich.console import Console

    from gss.box import NAME
    from gss.cli.show import share_bar, table
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
    rows = [row.facts() for row in result.rows]
    if csv_file:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            columns = [name for name in rows[0] if not name.startswith("by_")]
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    if as_json:
        facts = {"run": name, "step": lm.step, "data": dataset.hash, "split": split}
        print(json.dumps(finite({**facts, "documents": result.documents, "rows": rows}), indent=2))
        return
    paper = PERPLEXITY.get(lm.preset or "", {})
    cells = [
        ["whole" if row.length is None else f"{row.length:,}", *figures(row)]
        + [f"{scores[row.length]:.2f}" if row.length in scores else "" for scores in paper.values()]
        for row in result.rows
    ]
    documents = f"{result.documents:,} document{'s' * (result.documents > 1)}"
    title = f"{name} on {split}, step {lm.step:,}: {result.tokens:,} tokens of {documents}"
    header = ["length", "perplexity", "± loss", "per word", "bits/byte", *(f"paper, {corpus}" for corpus in paper)]
    caption = "±: standard error of the loss over documents; per word: perplexity per word."
    Console().print(table(title, header, cells, caption))


def figures(row: "LengthResult") -> list[str]:
    """A row of scores as text: perplexity, its standard error, perplexity per word, bits per byte."""
    error = "–" if math.isnan(row.standard_error) else f"{row.standard_error:.3f}"
    return [f"{row.perplexity:.3f}", error, f"{row.word_perplexity:.4g}", f"{row.bits_per_byte:.3f}"]
