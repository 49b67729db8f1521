"""The `gss` command: each subcommand parses its arguments, calls one library function and prints the result.

Nothing heavy is imported here or at the top of the command modules, so that `gss --help` answers at once.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from gss.cli import data, evaluate, measure, models, text, train

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")

app = typer.Typer(
    name="gss",
    help="Long-range language models built on Gated State Spaces.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from gss import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Long-range language models built on Gated State Spaces."""


COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Start here": {"quickstart": train.quickstart_command},
    "Data": {
        "tokenizer": data.tokenizer_app,
        "prepare": data.prepare_command,
        "merge": data.merge_command,
        "data": data.data_command,
    },
    "Training": {
        "presets": models.presets_command,
        "params": models.params_command,
        "settings": models.settings_command,
        "train": train.train_command,
    },
    "Using a model (without a run: the bundled one)": {
        "generate": text.generate_command,
        "serve": text.serve_command,
        "read": text.read_command,
        "export": models.export_command,
        "import": models.import_command,
        "quantize": models.quantize_command,
    },
    "Measuring": {
        "eval": evaluate.evaluate_command,
        "probe": evaluate.probe_app,
        "report": measure.report_command,
        "reproduce": measure.reproduce_command,
        "bench": measure.bench_command,
    },
}
"""The commands by the part of the help that lists them."""
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def main() -> None:
    """Run the command. An error that the user can fix is one line on stderr and exit status 1, never a traceback."""

    def say(kind: str, what: Exception | str) -> None:
        if isinstance(what, OSError) and what.filename and what.strerror:
            what = f"{what.filename}: {what.strerror}"  # without the number of the error
        said = escape(str(what) or type(what).__name__)
        Console(stderr=True, highlight=False).print(f"{kind} {said}", soft_wrap=True)

    warnings.showwarning = lambda message, *where, **more: say("[bold yellow]warning:[/]", message)
    try:
        app()
    except (ValueError, OSError, ImportError) as error:  # an extra that is missing says how to install it
        say("[bold red]error:[/]", error)
        sys.exit(1)
    except (RuntimeError, MemoryError) as error:  # torch has no type of its own for memory that a CPU lacks
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        reason = next(iter(str(error).splitlines()), "")
        say("[bold red]error:[/]", f"out of memory; use fewer tokens at a time ({reason or type(error).__name__})")
        sys.exit(1)
