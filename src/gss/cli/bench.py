"""`gss bench`: measurements on this machine, several models in one run."""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

    from gss.bench.results import Measurement

bench = typer.Typer(help="Measure speed, memory and accuracy on this machine.", no_args_is_help=True)

Report = Callable[[str], None]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Model = Annotated[
    str | None, typer.Option(help="A preset: see `gss presets`. Default: gss on a GPU, gss-small on a CPU.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="NAME", help="Measure this beside it: transformer, dss, or any preset; repeatable."),
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", metavar="BATCHxLENGTH", help="A shape to run; repeatable.")
]
Batches = Annotated[list[int] | None, typer.Option(min=1, help="Rows of a batch; repeatable.")]
Lengths = Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a row; repeatable.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile every layer.")]
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
    repeats: Repeats = 10,
    as_json: AsJson = False,
) -> None:
    """Time whole training steps: tokens per second; on a GPU also the share of its matrix rate, and peak memory.

    The loss and gradients of a small batch are compared with float64 first.
    """
    from gss.bench.models import bench_train, presets_of

    def measure(where: "torch.device", rate: float | None, report: Report) -> list["Measurement"]:
        gpu = where.type == "cuda"
        shapes = _shapes(shape, batch, length, [(16, 4096)] if gpu else [(1, 1024)])
        compiled = gpu if compile_ is None else compile_
        names = presets_of(_model(model, where), peer or ())
        return bench_train(names, shapes, where, matmul_rate=rate, compiled=compiled, repeats=repeats, report=report)

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
        list[int] | None, typer.Option(min=1, help="Tokens read at a time; repeatable. Default: all at once.")
    ] = None,
    compile_: Compile = False,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time reading a prompt to the state and the last logits, which are compared with plain float32 first."""
    from gss.bench.models import bench_prefill, presets_of

    def measure(where: "torch.device", rate: float | None, report: Report) -> list["Measurement"]:
        shapes = _shapes(shape, batch, length, [(1, 65_536 if where.type == "cuda" else 4096)])
        names = presets_of(_model(model, where), peer or ())
        return bench_prefill(
            names, shapes, where, pieces=piece or (), compiled=compile_, repeats=repeats, report=report
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
        typer.Option(min=1, help="Tokens of context; repeatable. Default: 1,024 to 65,536, on a GPU to 1,048,576."),
    ] = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time decoding a token, greedily, after contexts of several lengths.

    The decoder's logits are compared with the model's first.
    """
    from gss.bench.models import bench_decode, presets_of

    def measure(where: "torch.device", rate: float | None, report: Report) -> list["Measurement"]:
        gpu = where.type == "cuda"
        contexts = length or [1024, 4096, 16_384, 65_536] + ([1 << 20] if gpu else [])
        batches = batch or ([1, 64] if gpu else [1])
        names = presets_of(_model(model, where), peer or ())
        return bench_decode(names, where, batches=batches, contexts=contexts, repeats=repeats, report=report)

    _run(device, as_json, measure)


@bench.command()
def layer(
    device: Device = "auto",
    model: Model = None,
    width: Annotated[int | None, typer.Option(help="E, width of the layer, instead of the preset's.")] = None,
    gate_width: Annotated[int | None, typer.Option(help="F, width of the gate, instead of the preset's.")] = None,
    channels: Annotated[int | None, typer.Option(help="H, channels of the state space, likewise.")] = None,
    modes: Annotated[int | None, typer.Option(help="N, modes of the state space, likewise.")] = None,
    shape: Shapes = None,
    batch: Batches = None,
    length: Lengths = None,
    compile_: Compile = False,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time a GSS layer and its state-space part alone, forward and backward; every path's error against float64."""
    from gss.bench.layer import bench_layer
    from gss.presets import preset

    sizes = {"width": width, "gate_width": gate_width, "channels": channels, "state_space.modes": modes}
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}

    def measure(where: "torch.device", rate: float | None, report: Report) -> list["Measurement"]:
        config = preset(_model(model, where), **given)
        shapes = _shapes(shape, batch, length, [(16 if where.type == "cuda" else 2, 4096), (1, 65_536)])
        return bench_layer(config, shapes, where, compiled=compile_, repeats=repeats, report=report)

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

    def measure(where: "torch.device", rate: float | None, report: Report) -> list["Measurement"]:
        sizes = {"megabytes": megabytes, "length": length, "batch_size": batch_size, "repeats": repeats}
        return bench_data(tokenizer=tokenizer, file_gigabytes=file_gigabytes, report=report, **sizes)

    _run("cpu", as_json, measure)


def _run(
    device: str, as_json: bool, measure: Callable[["torch.device", float | None, Report], Sequence["Measurement"]]
) -> None:
    """Measure a GPU's matrix rate, then what was asked for; the table or the JSON comes last."""
    import torch

    from gss.bench.results import document, number, table
    from gss.train.distributed import pick_device
    from gss.train.progress import matmul_rate

    where = pick_device(device)
    with Console(stderr=True).status("measuring the machine") as status:
        rate = matmul_rate(where, torch.bfloat16)
        rows = measure(where, rate, status.update)
    found = document(rows, where, {"bf16 matmul 8192³, TFLOP/s": rate / 1e12} if rate else {})
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    ceilings = "".join(f", {name} {number(value)}" for name, value in found["ceilings"].items())
    print(f"{found['hardware']}, torch {found['versions']['torch']}, commit {found['commit'] or 'unknown'}{ceilings}\n")
    print(table(rows))


def _model(name: str | None, device: "torch.device") -> str:
    return name or ("gss" if device.type == "cuda" else "gss-small")


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
