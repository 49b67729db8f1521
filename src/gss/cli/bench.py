"""`gss bench`: measurements, each beside a peer in the same run."""

import typer

bench = typer.Typer(help="Measure speed and memory beside a peer, in one run.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add this module's commands to the app."""
    app.add_typer(bench, name="bench")
