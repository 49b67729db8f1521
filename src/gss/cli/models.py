"""Commands on models without data: presets, params."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gss.cli.settings import complete_preset


def presets() -> None:
    """List the named models: the paper's, and tiny and small ones of each family."""
    from gss.accounting import account
    from gss.presets import PRESETS

    table = Table(title="Presets")
    for column, justify in (("name", "left"), ("parameters", "right"), ("paper", "right"), ("what it is", "left")):
        table.add_column(column, justify=justify, no_wrap=column == "name")  # type: ignore[arg-type]
    for name, preset in PRESETS.items():
        stated = f"{preset.paper_parameters}M" if preset.paper_parameters else ""
        table.add_row(name, _millions(account(preset.config).parameters), stated, preset.about)
    Console().print(table)


def params(
    preset: Annotated[
        str, typer.Argument(help="Name of a preset; `gss presets` lists them.", autocompletion=complete_preset)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field, e.g. depth=8 or state_space.modes=64."),
    ] = None,
    length: Annotated[int, typer.Option(help="Sequence length for which FLOPs and state are counted.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what a model costs: parameters by part, FLOPs per token, state bytes per sequence."""
    from gss.accounting import account
    from gss.config import parse_assignments, to_mapping
    from gss.presets import preset as named

    config = named(preset, **parse_assignments(settings or []))
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
    table = Table(title=preset)
    for column in ("part", "count", "parameters", "of which state space"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in accounts.parts:
        table.add_row(part.name, str(part.count), _millions(part.parameters), _millions(part.state_space))
    table.add_section()
    state_space = sum(part.state_space for part in accounts.parts)
    table.add_row("all", "", _millions(accounts.parameters), _millions(state_space), style="bold")
    console = Console()
    console.print(table)
    spent = ", ".join(f"{name} {_millions(flops)}" for name, flops in accounts.flops.items() if flops)
    total = _millions(sum(accounts.flops.values()))
    console.print(
        f"Forward pass at length {length:,}: {total}FLOP per token ({spent}); training costs three times that."
    )
    console.print(f"State of one sequence after {length:,} tokens: {accounts.state_bytes / 2**20:,.2f} MiB.")


def _millions(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number else ""
