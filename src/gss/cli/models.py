"""Commands on models without data: presets, params, settings, export, import, quantize; and shell completion."""

import ast
import inspect
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

import gss
from gss.choices import choices_of, nearest
from gss.cli.shared import AsJson, Step, print_table
from gss.config import parse_assignments, to_mapping
from gss.presets import PRESETS
from gss.recipes import recipe_names


class Setting(NamedTuple):
    """A setting as a user meets it."""

    name: str  # dotted, as `--set` takes it
    kind: str
    default: str
    about: str


def settings(config: Any = None, prefix: str = "") -> Iterator[Setting]:
    """All settings of training, or those of a part of its config, with the text under each field there."""
    if config is None:
        from gss.training.config import TrainConfig

        config = TrainConfig()
    # Python itself forgets these texts: they are read from the source.
    body: Any = ast.parse(inspect.getsource(type(config))).body[0]
    texts = {ast.unparse(field.target): text for field, text in pairwise(body.body) if isinstance(field, ast.AnnAssign)}
    for field in fields(config):
        value, kind, text = getattr(config, field.name), field.type, texts.get(field.name)
        if is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
            continue
        about = ast.literal_eval(text.value) if isinstance(text, ast.Expr) else ""
        shown = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")
        choices = " | ".join(map(str, choices_of(field, kind)))
        if choices and get_origin(kind) is tuple:
            choices += ", …"
        default = "none" if value is None else json.dumps(value)
        yield Setting(prefix + field.name, choices or shown, default, " ".join(about.split()))


def complete_name(incomplete: str) -> list[tuple[str, str]]:
    """For a shell: the names of settings that begin like this, each with the first sentence about it."""
    return [(each.name, _line(each.about)) for each in settings() if each.name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """For a shell: the same, as `name=`."""
    return [(f"{name}=", about) for name, about in complete_name(incomplete)]


_SET = "A setting, e.g. steps=1000 or optimizer.learning_rate=1e-3; repeatable. `gss settings` lists all."
Set = Annotated[list[str] | None, Option("--set", help=_SET, autocompletion=complete_setting)]


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """For a shell: presets."""
    return [(name, preset.about) for name, preset in PRESETS.items() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """For a shell: recipes."""
    return [name for name in recipe_names() if name.startswith(incomplete)]


def settings_command(
    name: Annotated[
        str | None, Argument(help="A setting, or a group such as `optimizer`.", autocompletion=complete_name)
    ] = None,
) -> None:
    """List the settings for `gss train --set` and recipes, with type, default and meaning."""
    every = list(settings())
    chosen = [each for each in every if name is None or each.name == name or each.name.startswith(f"{name}.")]
    if not chosen:
        names = [each.name for each in every]
        groups = sorted({each.rpartition(".")[0] for each in names if "." in each})
        near = nearest(str(name), groups, [*names, *groups], "`gss settings` lists all")
        raise ValueError(f"there is no setting {name!r}{near}")
    console = Console(highlight=False, soft_wrap=True)
    for each in chosen:
        about = each.about if len(chosen) == 1 else _line(each.about)
        console.print(f"[bold]{each.name}[/] [dim]{escape(each.kind)} = {escape(each.default)}[/]\n    {escape(about)}")


def _line(text: str) -> str:
    """The first sentence."""
    return text.partition(". ")[0].removesuffix(".") + "."


def presets_command() -> None:
    """List the named models: the paper's, and tiny and small ones of each family."""
    from gss.accounting import account

    rows = []
    for name, each in PRESETS.items():
        stated = f"{each.paper_parameters}M" if each.paper_parameters else ""
        rows.append([name, _millions(account(each.config).parameters), stated, each.about])
    print_table("Presets", ["name", "parameters", "paper", "what it is"], rows, words=["what it is"])


def params_command(
    preset: Annotated[str, Argument(help="A preset: see `gss presets`.", autocompletion=complete_preset)],
    settings: Annotated[list[str] | None, Option("--set", help="A setting: depth=8, state_space.modes=64.")] = None,
    length: Annotated[int, Option(help="Sequence length at which FLOPs and state are counted.")] = 4096,
    as_json: AsJson = False,
) -> None:
    """Show what a model costs: parameters by part, FLOPs per token, size of the state."""
    from gss.accounting import account

    config = gss.preset(preset, **parse_assignments(settings or []))
    accounts = account(config, length)
    if as_json:
        facts = {
            "preset": preset,
            "parameters": accounts.parameters,
            "parts": [asdict(part) for part in accounts.parts],
            "length": length,
            "flops_per_token": accounts.flops,
            "state_bytes_per_sequence": accounts.state_bytes,
            "config": to_mapping(config),
        }
        print(json.dumps(facts, indent=2))
        return
    state_space = sum(part.state_space for part in accounts.parts)
    rows = [[p.name, str(p.count), f"{p.parameters:,}", f"{p.state_space:,}"] for p in accounts.parts]
    rows.append(["all", "", f"{accounts.parameters:,}", f"{state_space:,}"])
    console = Console()
    print_table(preset, ["part", "count", "parameters", "of which state space"], rows)
    spent = ", ".join(f"{name} {_millions(flops)}" for name, flops in accounts.flops.items() if flops)
    total = _millions(sum(accounts.flops.values()))
    console.print(f"Forward pass at length {length:,}: {total} FLOP per token ({spent}); training: three times that.")
    console.print(f"State of one sequence after {length:,} tokens: {accounts.state_bytes / 2**20:,.2f} MiB.")


def _millions(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number else ""


_TO = "hf: for `transformers`. onnx: one graph for any ONNX runtime. web: a page that runs the model."
_RUNTIME = "With --to web: the `dist` folder of onnxruntime-web, to serve with the page instead of using a CDN."


Target = StrEnum("Target", ("hf", "onnx", "web"))


def export_command(
    run: Annotated[Path, Argument(help="A run folder made by `gss train`, or box.")],
    out: Annotated[Path, Argument(help="The folder to create; it must be new or empty.", metavar="DIR")],
    to: Annotated[Target, Option(help=_TO)] = Target.hf,
    step: Step = None,
    runtime: Annotated[Path | None, Option(help=_RUNTIME)] = None,
) -> None:
    """Export a run's model for use elsewhere: in `transformers`, as ONNX, or as a static page for the browser."""
    if runtime is not None and to is not Target.web:
        raise ValueError("--runtime only works with --to web")
    if to is Target.hf:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one for each file that is written
        from gss.hf import export_run

        folder = export_run(run, out, step=step)
        print(f"wrote {folder}, its weights in float32: to load it in transformers, import gss.hf first")
    elif to is Target.onnx:
        from gss.export import export_onnx

        print(f"wrote {export_onnx(run, out, step=step)}: model.onnx, and model.json with the shapes of its state")
    else:
        from gss.export import export_page

        folder = export_page(run, out, step=step, runtime=runtime)
        print(f"wrote {folder}: to open it at http://localhost:8000, run python -m http.server --directory {folder}")


def import_command(
    folder: Annotated[Path, Argument(help="A folder written by `gss export` or `save_pretrained`.", metavar="DIR")],
    run: Annotated[Path, Argument(help="The run folder to create; it must be new or empty.")],
) -> None:
    """Turn a `transformers` folder into a run folder, for `gss eval`, `gss generate` and `gss.load`."""
    from gss.hf import import_folder

    print(f"wrote {import_folder(folder, run)}")


def quantize_command(
    run: Annotated[Path, Argument(help="A run folder made by `gss train`, or `box`.")],
    out: Annotated[Path | None, Argument(help="The run folder to create. Default: RUN-int8 and so on.")] = None,
    bits: Annotated[int, Option(help="Bits per weight: 16, 8 or 4.")] = 8,
    step: Step = None,
) -> None:
    """Write a run folder with the model's matrices in fewer bits: smaller, and faster to decode on a CPU.

    A run that is quantized already is unpacked and rounded again.
    """
    from gss.lm import quantize_run

    names = {16: "bf16", 8: "int8", 4: "int4"}
    if bits not in names:
        raise ValueError(f"--bits must be 16, 8 or 4, not {bits}")
    target = quantize_run(run, out or run.with_name(f"{run.resolve().name}-{names[bits]}"), names[bits], step=step)
    print(f"wrote {target}: use it like any run, for example gss generate {target}")
