"""Commands on models without data: presets, params."""

import json
from dataclasses import asdict
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from gss.cli.options import AsJson
from gss.cli.settings import complete_preset
from gss.cli.show import table


def presets() -> None:
    """List the named models: the paper's, and tiny and small ones of each family."""
    from gss.accounting import account
    from gss.presets import PRESETS

    rows = []
    for name, each in PRESETS.items():
        stated = f"{each.paper_parameters}M" if each.paper_parameters else ""
        rows.append([name, _millions(account(each.config).parameters), stated, each.about])
    Console().print(table("Presets", ["name", "parameters", "paper", "what it is"], rows, words=["what it is"]))


def params(
    preset: Annotated[str, Argument(help="A preset: see `gss presets`.", autocompletion=complete_preset)],
    settings: Annotated[
        list[str] | None, Option("--set", help="Change a field: depth=8, state_space.modes=64.")
    ] = None,
    length: Annotated[int, Option(help="Sequence length for which FLOPs and state are counted.")] = 4096,
    as_json: AsJson = False,
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
    state_space = sum(part.state_space for part in accounts.parts)
    rows = [[p.name, str(p.count), _millions(p.parameters), _millions(p.state_space)] for p in accounts.parts]
    rows.append(["all", "", _millions(accounts.parameters), _millions(state_space)])
    console = Console()
    console.print(table(preset, ["part", "count", "parameters", "of which state space"], rows))
    spent = ", ".join(f"{name} {_millions(flops)}" for name, flops in accounts.flops.items() if flops)
    total = _millions(sum(accounts.flops.values()))
    console.print(
        f"Forward pass at length {length:,}: {total}FLOP per token ({spent}); training costs three times that."
    )
    console.print(f"State of one sequence after {length:,} tokens: {accounts.state_bytes / 2**20:,.2f} MiB.")


def _millions(number: int) -> str:
    return f"{number / 1e6:,.2f}M" if number else ""
