"""The `gss` command: each subcommand parses, calls one function of the library and prints what it returns.

Nothing heavy is imported here or at the top of the command modules, so that `gss --help` answers at once.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from gss.cli import bench, data, evaluate, exchange, models, probe, quickstart, report, reproduce, serve, settings
from gss.cli import text as texts
from gss.cli import train as training

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


COMMANDS: dict[str, Callable[..., None]] = {
    "presets": models.presets,
    "params": models.params,
    "prepare": data.prepare_command,
    "merge": data.merge_command,
    "data": data.data_command,
    "eval": evaluate.evaluate_command,
    "generate": texts.generate_command,
    "serve": serve.serve_command,
    "train": training.train_command,
    "settings": settings.settings_command,
    "read": texts.read_command,
    "bench": bench.bench_command,
    "export": exchange.export_command,
    "import": exchange.import_command,
    "quantize": exchange.quantize_command,
    "quickstart": quickstart.quickstart_command,
    "report": report.report_command,
    "reproduce": reproduce.reproduce_command,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(data.tokenizer_app, name="tokenizer")
app.add_typer(probe.probe, name="probe")


def main() -> None:
    """Run the command; what the user can put right is one line on stderr and exit status 1, never a traceback."""
    warnings.showwarning = lambda message, *where, **more: _say("yellow", "warning", message)
    try:
        app()
    except (ValueError, OSError) as error:
        _say("red", "error", error)
        sys.exit(1)


def _say(colour: str, kind: str, what: Exception | str) -> None:
    """A line on stderr."""
    from rich.markup import escape

    text = escape(str(what) or type(what).__name__)
    Console(stderr=True, highlight=False).print(f"[bold {colour}]{kind}:[/] {text}", soft_wrap=True)
