"""Commands on models without data: presets, params, selfcheck, bench."""

import typer


def register(app: typer.Typer) -> None:
    """Add this module's commands to the app."""
