"""Commands on trained models: eval, generate."""

import csv
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from gss.evaluation import Evaluation

Run = Annotated[Path | None, typer.Argument(help="A run folder that `gss train` made. Default: the model in the box.")]
Precision = Annotated[str, typer.Option(help="fp32, bf16 (autocast), or auto: bf16 on a GPU, else fp32.")]
Weights = Annotated[str | None, typer.Option(help="Pack the weights: bf16, int8 or int4. Default: as they are.")]
Speculate = Annotated[bool, typer.Option(help="Draft by lookup in what was read where that is faster; same text.")]
# Parameters under which a step is too little work to share: with 7M, two threads on two cores are 1.2 times as fast
# as one at best, and many times slower when anything else wants a core.
_SMALL = 16_000_000


def evaluate_command(
    data: Annotated[Path, typer.Option(help="A corpus that `gss prepare` made, with the run's vocabulary.")],
    run: Run = None,
    split: Annotated[str, typer.Option(help="The split to score.")] = "valid",
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "512,4096,16384,65536",
    carry_state: Annotated[
        bool, typer.Option("--carry-state", help="Also read every document whole, with its state carried.")
    ] = False,
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
    from gss.evaluation import evaluate
    from gss.io.files import finite
    from gss.lm import load
    from gss.paper import PERPLEXITY
    from gss.training.distributed import joined

    wanted: list[int | None] = [*whole_numbers(lengths)]
    dataset = open_dataset(data, split)
    with joined(device) as world, share_bar("scoring") as show:
        lm, name = load(run, step=step, device=world.device), str(run or NAME)
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
        table = length_table({f"step {lm.step:,}": result}, f"{name} on {split}")
        for corpus, scores in PERPLEXITY.get(lm.preset or "", {}).items():
            columns = [f"{scores[row.length]:.2f}" if row.length in scores else "" for row in result.rows]
            table.add_row(f"paper, {corpus}", *columns, style="dim")
        Console().print(table)


def length_table(results: "dict[str, Evaluation]", title: str) -> "Table":
    """Perplexity by length, one row per model, with other figures for the longest length."""
    from rich.markup import escape
    from rich.table import Table

    first = next(iter(results.values()))
    table = Table(title=f"{escape(title)}: {first.tokens:,} tokens of {first.documents} documents")
    table.add_column("perplexity at", no_wrap=True)
    for row in first.rows:
        table.add_column("whole" if row.length is None else f"{row.length:,}", justify="right", no_wrap=True)
    for column in ("± loss", "per word", "bits/byte"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        last = result.rows[-1]
        scores = [f"{row.perplexity:.3f}" for row in result.rows]
        error = "–" if math.isnan(last.standard_error) else f"{last.standard_error:.3f}"
        table.add_row(name, *scores, error, f"{last.word_perplexity:.4g}", f"{last.bits_per_byte:.3f}")
    table.caption = "±: standard error of the loss over documents. The last three columns are for the longest length."
    return table


def generate_command(
    run: Run = None,
    prompt: Annotated[
        str, typer.Option(help="The text to continue; - reads standard input. Empty: a new document.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to produce.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 samples as the model says.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Keep only this many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep only the likeliest tokens that reach this total probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep only tokens at least this fraction as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Over 1: tokens that have occurred become less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of texts to produce, from consecutive seeds.")] = 1,
    step: Annotated[int | None, typer.Option(help="The checkpoint's step. Default: the newest good one.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    precision: Precision = "auto",
    weights: Weights = None,
    speculate: Speculate = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads on a CPU. Default: one for a small model, else all cores.")
    ] = None,
) -> None:
    """Continue a prompt, printing the text as it is produced."""
    from rich.console import Console

    from gss.accounting import account
    from gss.io.devices import pick_device
    from gss.lm import load
    from gss.precision import check

    check(precision)
    text = _standard_input() if prompt == "-" else _argument(prompt)
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or (),
        "precision": precision,
        "speculate": speculate,
    }
    lm = load(run, step=step, device=pick_device(device), weights=weights)
    small = account(lm.model.config).parameters < _SMALL
    with _threads(threads or (1 if small else None)):
        for number in range(samples):
            pieces = lm.stream(text, max_tokens=tokens, seed=seed + number, **options)
            print(text, end="", flush=True)
            started, produced = time.perf_counter(), 0
            for piece in pieces:
                print(piece, end="", flush=True)
                produced += len(lm.tokenizer.encode(piece))
            print()
            speed = produced / (time.perf_counter() - started)
            Console(stderr=True, highlight=False).print(f"[dim]about {speed:,.0f} tokens/s, prompt included[/]")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Run on this many threads (None: as many as now), and restore the number afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _argument(prompt: str) -> str:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error}") from None
    return prompt


def _standard_input() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on standard input is not UTF-8 text: {error}") from None
    if not text:
        raise ValueError("standard input is empty: pipe a prompt in, or leave --prompt out to start a new document")
    return text


def whole_numbers(text: str, what: str = "lengths", example: str = "512,4096") -> list[int]:
    """The numbers of an option that takes several."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r} is not a list of {what}: write whole numbers with commas, for example {example}")
    return [int(part) for part in parts]
