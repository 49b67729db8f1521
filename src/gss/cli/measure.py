"""Commands that measure and compare models: bench, report and reproduce."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from gss.cli.models import Set
from gss.cli.shared import AsJson, Device, share_bar, whole_numbers
from gss.config import parse_assignments

_WHAT = "train (whole training steps), prefill (reading a prompt to its last logits), or decode (greedy decoding)."
_SHAPES = {
    "train": ([(1, 1024)], [(16, 4096)]),
    "prefill": ([(1, 4096)], [(1, 65_536)]),
    "decode": (
        [(1, 1024), (1, 4096), (1, 16_384), (1, 65_536)],
        [(1, 1024), (1, 4096), (1, 16_384), (1, 65_536), (1, 1 << 20), (64, 1024)],
    ),
}
"""What is measured without being asked for: on a CPU, on a GPU."""


def bench_command(
    what: Annotated[str, Argument(metavar="WHAT", help=_WHAT)],
    device: Device = "auto",
    model: Annotated[str | None, Option(help="The preset. Default: gss on a GPU, gss-small on a CPU.")] = None,
    shape: Annotated[
        list[str] | None,
        Option(metavar="BATCHxLENGTH", help="Rows, and tokens per row (decode: of context); repeatable."),
    ] = None,
    piece: Annotated[int | None, Option(min=1, help="Prefill: tokens read at a time. Default: all.")] = None,
    compile_: Annotated[bool | None, Option("--compile/--no-compile", help="Default: to train on a GPU.")] = None,
    repeats: Annotated[int, Option(min=1, help="Number of timed runs; the median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and accuracy on this machine, after checking results against plain arithmetic."""
    import torch

    from gss.bench.machine import provenance
    from gss.bench.models import bench_decode, bench_prefill, bench_train
    from gss.io.devices import pick_device
    from gss.io.files import finite
    from gss.training.progress import matmul_rate

    if what not in _SHAPES:
        raise ValueError(f"there is no benchmark {what!r}; choose from: {', '.join(_SHAPES)}")
    if (piece and what != "prefill") or (compile_ is not None and what == "decode"):
        raise ValueError(f"gss bench {what} has no option {'--piece' if piece else '--compile'}")
    where = pick_device(device)
    gpu = where.type == "cuda"
    shapes = []
    for text in shape or ():
        batch, _, length = text.partition("x")
        if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
            raise ValueError(f"{text!r} is not a shape: write BATCHxLENGTH, for example 2x4096")
        shapes.append((int(batch), int(length)))
    shapes = shapes or _SHAPES[what][gpu]
    name = model or ("gss" if gpu else "gss-small")
    with Console(stderr=True).status("measuring the machine") as status:
        rate = matmul_rate(where, torch.bfloat16)
        if what == "train":
            compiled = gpu if compile_ is None else compile_
            rows = bench_train(name, shapes, where, rate, compiled, repeats, status.update)
        elif what == "prefill":
            rows = bench_prefill(name, shapes, where, bool(compile_), piece, repeats, status.update)
        else:
            rows = bench_decode(name, shapes, where, repeats, status.update)
    found = provenance(where)
    ceilings = {"bf16 matmul 8192³, TFLOP/s": rate / 1e12} if rate else {}
    if as_json:
        document = finite({**found, "ceilings": ceilings, "rows": [asdict(row) for row in rows]})
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    machine = "".join(f", {name} {value:.1f}" for name, value in ceilings.items())
    print(f"{found['hardware']}, torch {found['versions']['torch']}, commit {found['commit'] or 'unknown'}{machine}\n")
    width = max(len(row.name) for row in rows)
    for row in rows:
        value = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.3g}"
        limit = "" if row.limit is None else f"at most {row.limit:.3g}"
        print(f"{row.name:<{width}}  {value:>9} {row.unit}  {'; '.join(filter(None, (limit, row.note)))}".rstrip())


def report_command(
    runs: Annotated[list[Path], Argument(help="Run folders made by `gss train`.", metavar="RUN...")],
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    data: Annotated[Path | None, Option(help="A corpus to score on. Default: each run's own validation data.")] = None,
    max_tokens: Annotated[int, Option(help="Tokens to score per length if no scores are stored; 0: none.")] = 131_072,
    lengths: Annotated[str | None, Option(help="Lengths, separated by commas. Default: the paper's.")] = None,
    again: Annotated[bool, Option("--again", help="Score again, even if scores are stored.")] = False,
    device: Device = "auto",
    prompt: Annotated[str | None, Option(help="Prompt for samples. Default: show each run's newest sample.")] = None,
) -> None:
    """Write a report on one or more runs: curves, scores by length, how far back models look, sample text."""
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


STDLIB = Path("data/stdlib")
_DATA = "A prepared corpus, or a folder of several; repeatable. Default at the tiny scale: data/stdlib."
_TARGETS = (
    "table1 (Transformer, DSS, GSS), table2 (block-recurrent, GSS, GSS-L, GSS-Hybrid-L), or lengths (GSS and "
    "GSS-Hybrid by evaluation length)."
)
_SCALES = (
    "tiny: minutes on a CPU. small: 45M to 80M parameters and 105M tokens, minutes per run on a GPU. paper: the full "
    "recipe, for many GPUs; prints the training commands, and scores the runs that have been trained."
)


def reproduce_command(
    target: Annotated[str, Argument(help=_TARGETS)],
    out: Annotated[Path, Option(help="Folder for the runs; finished ones are not run again.")] = Path("runs/reproduce"),
    data: Annotated[list[Path] | None, Option(help=_DATA)] = None,
    corpus: Annotated[list[str] | None, Option(help="Only the corpus with this folder name; repeatable.")] = None,
    scale: Annotated[str, Option(help=_SCALES)] = "tiny",
    only: Annotated[list[str] | None, Option(help="Only this system; repeatable. A wrong name lists them.")] = None,
    tokens: Annotated[int | None, Option(help="Training tokens per run. Default: the scale's.")] = None,
    seeds: Annotated[str, Option(help="Seeds, separated by commas.")] = "0",
    evaluate_tokens: Annotated[int | None, Option(help="Tokens to score at each length. Default: the scale's.")] = None,
    set_: Set = None,
    device: Device = "auto",
    quiet: Annotated[bool, Option("--quiet", help="Print only the table at the end.")] = False,
) -> None:
    """Train and score the systems of one of the paper's tables on equal tokens, and compare with the paper's figures.

    Run the command again with the same --out to resume: finished runs, which have a result.json, are not run again, and
    interrupted ones continue from their checkpoint. docs/reproducing.md says what is fixed, and why.
    """
    from gss.data import load_tokenizer, prepare
    from gss.reproduce import SCALES, TARGETS, find_corpora, planned, reproduce

    for name, value, known in (("target", target, TARGETS), ("scale", scale, SCALES)):
        if value not in known:
            raise ValueError(f"there is no {name} {value!r}; choose from: {', '.join(known)}")
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    if not data:
        if scale != "tiny":
            raise ValueError("no data: add --data FOLDER, a corpus made by gss prepare or a folder of several")
        prepare(["stdlib"], STDLIB, load_tokenizer("bytes"))
    trials = planned(
        TARGETS[target],
        SCALES[scale],
        find_corpora(data or [STDLIB], corpus or []),
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
    print(outcome.text)
    print(f"{len(outcome.done)} results in {out}")
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)
    if outcome.commands:
        print(f"\n{len(outcome.commands)} runs need many GPUs. Train them as follows, then run this command again:\n")
        print("\n".join(outcome.commands))
    if outcome.failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in outcome.failed.items())
        raise ValueError(f"{len(outcome.failed)} runs failed, the others are saved: {reasons}")
