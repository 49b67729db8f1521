"""`gss bench`: measurements, each beside a peer in the same run."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

bench = typer.Typer(help="Measure speed and memory beside a peer, in one run.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the app."""
    app.add_typer(bench, name="bench")


@bench.command()
def layer(
    peer: Annotated[bool, typer.Option(help="Measure PyPI's gated-state-spaces-pytorch beside it.")] = False,
    width: Annotated[int, typer.Option(help="E, width of the layer.")] = 512,
    gate_width: Annotated[int, typer.Option(help="F, width of the gate.")] = 2048,
    channels: Annotated[int, typer.Option(help="H, channels of the state space.")] = 128,
    modes: Annotated[int, typer.Option(help="N, modes of the state space.")] = 256,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="BATCHxLENGTH", help="Shapes to run; default 2x4096 and 1x65536.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time a GSS layer and its state-space part alone, forward and backward, in float32 on the CPU."""
    from gss.bench.layer import SHAPES, bench_layer

    console = Console(stderr=as_json)
    with console.status("warming up") as status:
        rows = bench_layer(
            width=width,
            gate_width=gate_width,
            channels=channels,
            modes=modes,
            shapes=tuple(_shape(text) for text in shape) if shape else SHAPES,
            peer=peer,
            repeats=repeats,
            report=status.update,
        )
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    table = Table(title=f"Forward + backward, float32, CPU; E={width} F={gate_width} H={channels} N={modes}")
    for column in ("part", "shape", "seconds", "peer", "speed-up", "peak MiB", "peer"):
        table.add_column(column, justify="left" if column == "part" else "right", no_wrap=True)
    for row in rows:
        peer_time = f"{row.peer_seconds:.3f}" if row.peer_seconds else "–"
        peer_size = f"{row.peer_peak_bytes / 2**20:,.0f}" if row.peer_peak_bytes else "–"
        ratio = f"{row.speedup:.2f}×" if row.speedup else "–"
        size = f"{row.peak_bytes / 2**20:,.0f}"
        table.add_row(row.part, f"{row.batch} × {row.length}", f"{row.seconds:.3f}", peer_time, ratio, size, peer_size)
    console.print(table)


@bench.command()
def data(
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", "-t", help="A vocabulary; by default one is trained on the spot.")
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Text to tokenise, in MB.")] = 48,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a row of a batch.")] = 4096,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 32,
    file_gigabytes: Annotated[
        float, typer.Option(min=0, help="Size in GB of the one file whose preparation's memory is watched; 0: none.")
    ] = 0.1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time tokenising beside the bare library and batching on one core; watch the memory of a large file."""
    from gss.bench.data import bench_data

    console = Console(stderr=as_json)
    with console.status("starting") as status:
        rows = bench_data(
            tokenizer=tokenizer,
            megabytes=megabytes,
            length=length,
            batch_size=batch_size,
            file_gigabytes=file_gigabytes,
            repeats=repeats,
            report=status.update,
        )
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    table = Table("what", "value", "unit", "peer", "its value", "ratio")
    for row in rows:
        peer_value = f"{row.peer_value:.1f}" if row.peer_value else "–"
        ratio = f"{row.ratio:.2f}" if row.ratio else "–"
        table.add_row(row.what, f"{row.value:.1f}", row.unit, row.peer or "–", peer_value, ratio)
    console.print(table)


@bench.command()
def decode(
    size: Annotated[str, typer.Option(help="Which presets: tiny or small.")] = "small",
    peer: Annotated[bool, typer.Option(help="Measure PyPI's gated-state-spaces-pytorch, which recomputes.")] = False,
    long: Annotated[int, typer.Option(min=1, help="The longest context; reading it takes most of the time.")] = 65_536,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of 64 tokens; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time decoding a token after contexts of several lengths, beside a Transformer with a cache, on the CPU."""
    from gss.bench.decode import bench_decode

    console = Console(stderr=as_json)
    with console.status("warming up") as status:
        rows = bench_decode(size=size, peer=peer, long_context=long, rounds=rounds, report=status.update)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    table = Table(title="A token, batch 1, float32, CPU")
    for column in ("model", "context", "ms", "tokens/s", "× shortest", "state MiB"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for row in rows:
        state = f"{row.state_bytes / 2**20:,.1f}" if row.state_bytes else "–"
        figures = (f"{row.seconds * 1e3:.2f}", f"{1 / row.seconds:,.1f}", f"{row.times_as_long:.2f}", state)
        table.add_row(row.name, f"{row.context:,}", *figures)
    console.print(table)


def _shape(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise ValueError(f"{text!r} is not a shape: write BATCHxLENGTH, for example 2x4096")
    return int(batch), int(length)
