"""`gss bench`: how fast a model is on this machine."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

from gss.cli.options import AsJson, Device

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
        Option(metavar="BATCHxLENGTH", help="Rows and tokens per row (decode: of context); repeatable."),
    ] = None,
    piece: Annotated[int | None, Option(min=1, help="Prefill: tokens read at a time. Default: all.")] = None,
    compile_: Annotated[
        bool | None, Option("--compile/--no-compile", help="Default: only when training on a GPU.")
    ] = None,
    repeats: Annotated[int, Option(min=1, help="Timed runs; the median counts.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and accuracy on this machine; what is measured is compared with plain arithmetic first."""
    import torch
    from rich.console import Console

    from gss.bench.machine import provenance
    from gss.bench.models import bench_decode, bench_prefill, bench_train
    from gss.io.devices import pick_device
    from gss.io.files import finite
    from gss.training.progress import matmul_rate

    if what not in _SHAPES:
        raise ValueError(f"there is nothing to measure named {what!r}; choose from: {', '.join(_SHAPES)}")
    if (piece and what != "prefill") or (compile_ is not None and what == "decode"):
        raise ValueError(f"gss bench {what} has no option {'--piece' if piece else '--compile'}")
    where = pick_device(device)
    gpu = where.type == "cuda"
    shapes = _shapes(shape) or _SHAPES[what][gpu]
    name = model or ("gss" if gpu else "gss-small")
    with Console(stderr=True).status("measuring the machine") as status:
        rate = matmul_rate(where, torch.bfloat16)
        if what == "train":
            compiled = gpu if compile_ is None else compile_
            rows = bench_train(name, shapes, where, rate, compiled, repeats, status.update)
        elif what == "prefill":
            rows = bench_prefill(name, shapes, where, piece, bool(compile_), repeats, status.update)
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


def _shapes(texts: Sequence[str] | None) -> list[tuple[int, int]]:
    shapes = []
    for text in texts or ():
        batch, _, length = text.partition("x")
        if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
            raise ValueError(f"{text!r} is not a shape: write BATCHxLENGTH, for example 2x4096")
        shapes.append((int(batch), int(length)))
    return shapes
