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

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Model = Annotated[
    str | None, typer.Option(help="A preset: see `gss presets`. Default: gss on a GPU, gss-small on a CPU.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="NAME", help="Also measure this: transformer, dss, or any preset; repeatable."),
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", metavar="BATCHxLENGTH", help="Rows and tokens per row; repeatable.")
]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile every layer. Default: only for training on a GPU."),
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@bench.command()
def train(
    device: Device = "auto",
    model: Model = None,
    peer: Peers = None,
    shape: Shapes = None,
    compile_: Compile = None,
    repeats: Repeats = 10,
    as_json: AsJson = False,
) -> None:
    """Time whole training steps: tokens per second; on a GPU also the share of its matrix rate, and peak memory.

    The loss and gradients of a small batch are compared with float64 first.
    """
    from gss.bench.models import bench_train, presets_of

    def measure(where: "torch.device", gpu: bool, **options: Any) -> list["Measurement"]:
        names = presets_of(model or _default(gpu), peer or ())
        compiled = gpu if compile_ is None else compile_
        return bench_train(
            names, _shapes(shape, [(16, 4096) if gpu else (1, 1024)]), where, compiled=compiled, **options
        )

    _run(device, as_json, measure, repeats=repeats, with_rate=True)


@bench.command()
def prefill(
    device: Device = "auto",
    model: Model = None,
    peer: Peers = None,
    shape: Shapes = None,
    piece: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens read at a time; repeatable. Default: all at once.")
    ] = None,
    compile_: Compile = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time reading a prompt to the state and the last logits, which are compared with plain float32 first."""
    from gss.bench.models import bench_prefill, presets_of

    def measure(where: "torch.device", gpu: bool, **options: Any) -> list["Measurement"]:
        names, shapes = presets_of(model or _default(gpu), peer or ()), _shapes(shape, [(1, 65_536 if gpu else 4096)])
        return bench_prefill(names, shapes, where, pieces=piece or (), compiled=bool(compile_), **options)

    _run(device, as_json, measure, repeats=repeats)


@bench.command()
def decode(
    device: Device = "auto",
    model: Model = None,
    peer: Peers = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences side by side; repeatable.")] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of context; repeatable. Default: 1,024 to 65,536, on a GPU to 1,048,576."),
    ] = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time greedy decoding after contexts of several lengths.

    The decoder's logits are compared with the model's first.
    """
    from gss.bench.models import bench_decode, presets_of

    def measure(where: "torch.device", gpu: bool, **options: Any) -> list["Measurement"]:
        contexts = length or [1024, 4096, 16_384, 65_536, *([1 << 20] if gpu else [])]
        names = presets_of(model or _default(gpu), peer or ())
        return bench_decode(names, where, batches=batch or ([1, 64] if gpu else [1]), contexts=contexts, **options)

    _run(device, as_json, measure, repeats=repeats)


@bench.command()
def layer(
    device: Device = "auto",
    model: Model = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A size instead of the preset's, `width=256`; repeatable.")
    ] = None,
    shape: Shapes = None,
    compile_: Compile = None,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time a GSS layer and its state-space part alone, forward and backward; every path's error against float64."""
    from gss.bench.layer import bench_layer
    from gss.config import parse_assignments
    from gss.presets import preset

    def measure(where: "torch.device", gpu: bool, **options: Any) -> list["Measurement"]:
        config = preset(model or _default(gpu), **parse_assignments(set_ or ()))
        shapes = _shapes(shape, [(16 if gpu else 2, 4096), (1, 65_536)])
        return bench_layer(config, shapes, where, compiled=bool(compile_), **options)

    _run(device, as_json, measure, repeats=repeats)


@bench.command()
def data(
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", "-t", help="A vocabulary; by default one is trained on the spot.")
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Text to tokenize, in MB.")] = 48,
    length: Annotated[int, typer.Option(min=1, help="Tokens per row of a batch.")] = 4096,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 32,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Time tokenizing beside the bare library, and batching on one core."""
    from gss.bench.data import bench_data

    def measure(where: "torch.device", gpu: bool, **options: Any) -> list["Measurement"]:
        return bench_data(tokenizer, megabytes, length, batch_size, **options)

    _run("cpu", as_json, measure, repeats=repeats)


def _run(
    device: str,
    as_json: bool,
    measure: Callable[..., Sequence["Measurement"]],
    *,
    repeats: int,
    with_rate: bool = False,
) -> None:
    """Measure a GPU's matrix rate, then what was asked for; the table or the JSON comes last."""
    import torch

    from gss.bench.results import document, number, table
    from gss.io.devices import pick_device
    from gss.training.progress import matmul_rate

    where = pick_device(device)
    with Console(stderr=True).status("measuring the machine") as status:
        rate = matmul_rate(where, torch.bfloat16)
        options = {"repeats": repeats, "report": status.update, **({"matmul_rate": rate} if with_rate else {})}
        rows = measure(where, where.type == "cuda", **options)
    found = document(rows, where, {"bf16 matmul 8192³, TFLOP/s": rate / 1e12} if rate else {})
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    ceilings = "".join(f", {name} {number(value)}" for name, value in found["ceilings"].items())
    print(f"{found['hardware']}, torch {found['versions']['torch']}, commit {found['commit'] or 'unknown'}{ceilings}\n")
    print(table(rows))


def _default(gpu: bool) -> str:
    return "gss" if gpu else "gss-small"


def _shapes(texts: Sequence[str] | None, default: list[tuple[int, int]]) -> list[tuple[int, int]]:
    shapes = []
    for text in texts or ():
        batch, _, length = text.partition("x")
        if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
            raise ValueError(f"{text!r} is not a shape: write BATCHxLENGTH, for example 2x4096")
        shapes.append((int(batch), int(length)))
    return shapes or default
