"""`gss bench`: measurements, each beside peers in the same run."""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

    from gss.bench.ceilings import Ceilings
    from gss.bench.results import Row

bench = typer.Typer(help="Measure speed, memory and accuracy beside peers, in one run.", no_args_is_help=True)

Report = Callable[[str], None]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Model = Annotated[
    str | None, typer.Option(help="A preset: see `gss presets`. Default: gss on a GPU, gss-small on a CPU.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME",
        help="Measure this beside it, again and again: pypi-gss, hf-gpt2, hf-llama, hf-mamba2, fla-gla, fla-mamba2, "
        "transformer, dss, or any preset. One that is not installed is skipped with a word.",
    ),
]
Shapes = Annotated[list[str] | None, typer.Option("--shape", metavar="BATCHxLENGTH", help="A shape to run; repeat it.")]
Batches = Annotated[list[int] | None, typer.Option(min=1, help="Rows of a batch; repeat it for several.")]
Lengths = Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a row; repeat it for several.")]
Compile = Annotated[bool, typer.Option(help="Compile every layer with torch.compile.")]
Fast = Annotated[bool, typer.Option(help="Use the GPU kernels where there are any.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the app."""
    app.add_typer(bench, name="bench")


@bench.command()
def train(
    device: Device = "auto",
    model: Model = None,
    peer: Peers = None,
    shape: Shapes = None,
    batch: Batches = None,
    length: Lengths = None,
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Default: on a GPU.")] = None,
    fast: Fast = True,
    repeats: Repeats = 10,
    as_json: AsJson = False,
) -> None:
    """Time whole training steps: tokens a second, share of the machine's matrix rate, peak GPU memory.

    The loss and gradients of a small batch are compared with float64 first.
    """
    from gss.bench.train import bench_train

    def measure(where: "torch.device", ceilings: "Ceilings", report: Report) -> list["Row"]:
        gpu = where.type == "cuda"
        return bench_train(
            model=model or ("gss" if gpu else "gss-small"),
            shapes=_shapes(shape, batch, length, [(16, 4096)] if gpu else [(1, 1024)]),
            device=where,
            matmul_rate=ceilings.square,
            peers=peer or (),
            compiled=gpu if compile_ is None else compile_,
            use_fast=fast,
            repeats=repeats,
            report=report,
        )

    _run(device, as_json, measure)


@bench.command()
def prefill(
    device: Device = "auto",
    model: Model = None,
    peer: Peers = None,
    shape: Shapes = None,
    batch: Batches = None,
    length: Lengths = None,
    piece: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens read at a time; repeat it. Default: all at once.")
    ] = None,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile every layer.")] = False,
    fast: Fast = True,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time reading a prompt to the state and the last logits."""
    from gss.bench.prefill import bench_prefill

    def measure(where: "torch.device", ceilings: "Ceilings", report: Report) -> list["Row"]:
        gpu = where.type == "cuda"
        return bench_prefill(
            model=model or ("gss" if gpu else "gss-small"),
            shapes=_shapes(shape, batch, length, [(1, 65_536 if gpu else 4096)]),
            device=where,
            pieces=piece or (),
            peers=peer or (),
            compiled=compile_,
            use_fast=fast,
            repeats=repeats,
            report=report,
        )

    _run(device, as_json, measure)


@bench.command()
def decode(
    device: Device = "auto",
    model: Model = None,
    peer: Peers = None,
    batch: Batches = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of context; repeat it. Default: 1,024 to 65,536, on a GPU to 1,048,576."),
    ] = None,
    peer_context: Annotated[int, typer.Option(min=1, help="Tokens that every peer has read.")] = 4096,
    fast: Fast = True,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time decoding a token, greedily, after contexts of several lengths.

    The decoder's logits are compared with the model's first.
    """
    from gss.bench.decode import bench_decode

    def measure(where: "torch.device", ceilings: "Ceilings", report: Report) -> list["Row"]:
        gpu = where.type == "cuda"
        contexts = [1024, 4096, 16_384, 65_536] + ([1 << 20] if gpu else [])
        return bench_decode(
            model=model or ("gss" if gpu else "gss-small"),
            device=where,
            batches=batch or ([1, 64] if gpu else [1]),
            contexts=length or contexts,
            peers=peer or (),
            peer_context=peer_context,
            use_fast=fast,
            repeats=repeats,
            report=report,
        )

    _run(device, as_json, measure)


@bench.command()
def layer(
    device: Device = "auto",
    model: Model = None,
    peer: Peers = None,
    width: Annotated[int | None, typer.Option(help="E, width of the layer, instead of the preset's.")] = None,
    gate_width: Annotated[int | None, typer.Option(help="F, width of the gate, instead of the preset's.")] = None,
    channels: Annotated[int | None, typer.Option(help="H, channels of the state space, likewise.")] = None,
    modes: Annotated[int | None, typer.Option(help="N, modes of the state space, likewise.")] = None,
    shape: Shapes = None,
    batch: Batches = None,
    length: Lengths = None,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the layer.")] = False,
    fast: Fast = True,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time a GSS layer and its state-space part alone, forward and backward; every path's error against float64."""
    from gss.bench.layer import bench_layer
    from gss.presets import preset

    sizes = {"width": width, "gate_width": gate_width, "channels": channels, "state_space.modes": modes}

    def measure(where: "torch.device", ceilings: "Ceilings", report: Report) -> list["Row"]:
        gpu = where.type == "cuda"
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        return bench_layer(
            config=preset(model or ("gss" if gpu else "gss-small"), **given, norm_epsilon=1e-5),  # the peer's epsilon
            shapes=_shapes(shape, batch, length, [(16 if gpu else 2, 4096), (1, 65_536)]),
            device=where,
            peers=peer or (),
            compiled=compile_,
            use_fast=fast,
            repeats=repeats,
            report=report,
        )

    _run(device, as_json, measure)


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
    as_json: AsJson = False,
) -> None:
    """Time tokenising beside the bare library and batching on one core; watch the memory of a large file."""
    from gss.bench.data import bench_data

    def measure(where: "torch.device", ceilings: "Ceilings", report: Report) -> list["Row"]:
        return bench_data(
            tokenizer=tokenizer,
            megabytes=megabytes,
            length=length,
            batch_size=batch_size,
            file_gigabytes=file_gigabytes,
            repeats=repeats,
            report=report,
        )

    _run("cpu", as_json, measure)


def _run(device: str, as_json: bool, measure: Callable[["torch.device", "Ceilings", Report], Sequence["Row"]]) -> None:
    """Measure the machine, then what was asked for; the table or the JSON comes last."""
    from gss.bench.ceilings import measure_ceilings
    from gss.bench.results import document, number, table
    from gss.train.distributed import pick_device

    where = pick_device(device)
    console = Console(stderr=True)
    with console.status("measuring the machine") as status:
        ceilings = measure_ceilings(where)
        rows = measure(where, ceilings, status.update)
    found = document(rows, where, ceilings.as_dict())
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print(f"{found['hardware']}, torch {found['versions']['torch']}, commit {found['commit'] or 'unknown'}")
    print(", ".join(f"{name} {number(value)}" for name, value in found["ceilings"].items()) + "\n")
    print(table(rows))


def _shapes(
    shapes: Sequence[str] | None,
    batches: Sequence[int] | None,
    lengths: Sequence[int] | None,
    default: list[tuple[int, int]],
) -> list[tuple[int, int]]:
    """The shapes named, and every pair of the batches and lengths named; the default's where one is missing."""
    found = [_shape(text) for text in shapes or ()]
    if batches or lengths:
        found += [(b, n) for n in lengths or [default[0][1]] for b in batches or [default[0][0]]]
    return found or default


def _shape(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise ValueError(f"{text!r} is not a shape: write BATCHxLENGTH, for example 2x4096")
    return int(batch), int(length)
