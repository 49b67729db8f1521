"""Commands that train: train, and quickstart, which does everything once from data to report."""

import math
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

import gss
from gss.cli.evaluate import figures
from gss.cli.models import Set, complete_name, complete_preset, complete_recipe
from gss.cli.shared import print_table
from gss.config import parse_assignments

_RECIPES = "A recipe (tiny, small, pg19, …) or a TOML file. Default: one that suits the model and the machine."


def train_command(
    data: Annotated[Path, Option(help="A corpus made by `gss prepare`.")],
    out: Annotated[Path, Option(help="The run folder. If it holds checkpoints, training continues from the newest.")],
    preset: Annotated[str | None, Option(help="The model: see `gss presets`.", autocompletion=complete_preset)] = None,
    start: Annotated[str | None, Option("--from", help="Weights to start from: a run, an export, or `box`.")] = None,
    lora: Annotated[int | None, Option(min=1, help="Train only low-rank updates of this rank (LoRA).")] = None,
    tune: Annotated[str | None, Option(help="`state`: train only the initial state.")] = None,
    config: Annotated[str | None, Option(help=_RECIPES, autocompletion=complete_recipe)] = None,
    set_: Set = None,
    allow: Annotated[
        list[str] | None,
        Option(help="A setting that may differ from the resumed run's, e.g. `steps`.", autocompletion=complete_name),
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="Show no progress; it is still written to metrics.jsonl.")] = False,
) -> None:
    """Train a model on a prepared corpus, or resume a run from its newest good checkpoint.

    Ctrl-C and SIGTERM save and stop (exit status 130 and 143); run the same command again to continue. For several GPUs
    or machines: `torchrun --nproc-per-node 8 -m gss train …`.
    """
    from gss.training.start import plan

    given = {"start": start, "lora": lora, "tune": tune}
    settings = {name: value for name, value in given.items() if value is not None} | parse_assignments(set_ or ())
    run, chosen = plan(data, out, preset, config, settings)
    if chosen and not quiet and os.environ.get("RANK", "0") == "0":
        print(chosen, flush=True)
    result = gss.train(run, data, out, allow=allow or (), quiet=quiet)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


PRESETS = ("gss2-tiny", "gss-tiny")
LENGTHS = (512, 4096, 16_384)
PROMPT = "def "


def quickstart_command(
    config: Annotated[str, Option(help="The recipe for both runs: a name, or a TOML file.")] = "quickstart",
    data: Annotated[Path, Option(help="Folder for the corpus.")] = Path("data/stdlib"),
    runs: Annotated[Path, Option(help="Folder for the runs.")] = Path("runs"),
    set_: Set = None,
) -> None:
    """Prepare the Python standard library, train a tiny GSS2 and a tiny GSS on it, evaluate, sample, report.

    Each step is a command of its own, which is printed first. A corpus and runs that exist already are reused.
    """
    from gss.data import load_tokenizer, open_dataset, prepare
    from gss.report import write_report
    from gss.report.runs import keep
    from gss.report.theme import MissingMatplotlibError
    from gss.training import resolve

    console = Console(highlight=False, soft_wrap=True)

    def show(command: str) -> None:
        console.print(f"\n[bold]$ {escape(command)}[/]")

    show(f"gss prepare stdlib --out {data} --tokenizer bytes")
    prepare(["stdlib"], data, load_tokenizer("bytes"))
    held_out = open_dataset(data, "valid")
    folders = {name: runs / name for name in PRESETS}
    for name, folder in folders.items():
        show(f"gss train --config {config} --preset {name} --data {data} --out {folder}")
        done = gss.train(resolve(name, config, set_ or (), held_out.vocab_size), data, folder)
        if done.signal is not None:
            raise typer.Exit(128 + done.signal)
    lengths = [length for length in LENGTHS if length <= held_out.lengths.max()]
    # The best guesser that knows only how often each byte occurs scores the same at every length.
    entropy = held_out.unigram_entropy
    rows, losses = [["unigrams", *[f"{math.exp(entropy):.3f}"] * len(lengths), "", "", ""]], {"unigrams": entropy}
    for name, folder in folders.items():
        show(f"gss eval {folder} --data {data} --lengths {','.join(map(str, lengths))}")
        lm = gss.load(folder)
        result = gss.evaluate(lm, held_out, lengths)
        keep(folder, lm.step, held_out, result)
        rows.append([name, *(f"{row.perplexity:.3f}" for row in result.rows), *figures(result.rows[-1])[1:]])
        losses[name] = result.rows[-1].loss
    title = f"Held-out Python code: {len(held_out.tokens):,} tokens of {len(held_out)} documents"
    header = ["perplexity at", *(f"{length:,}" for length in lengths), "± loss", "per word", "bits/byte"]
    caption = "±: standard error of the loss over documents. The last three columns are for the longest length."
    print_table(title, header, rows, caption)
    for name, loss in losses.items():
        console.print(f"{name}: {loss:.3f} nats per byte")
    show(f"gss generate {folders[PRESETS[0]]} --prompt '{PROMPT}' --temperature 0.7")
    text = gss.load(folders[PRESETS[0]]).generate(PROMPT, max_tokens=300, temperature=0.7)
    console.print(escape(PROMPT + text))
    report = runs / "report.html"
    show(f"gss report {' '.join(map(str, folders.values()))} --out {report} --prompt '{PROMPT}'")
    try:
        written = write_report([*folders.values()], report, prompt=PROMPT)
        console.print(escape(f"wrote {written}: open it in a browser"))
    except MissingMatplotlibError as error:
        console.print(escape(f"no report: {error}"))
    console.print(escape(f"\nrun folders: {', '.join(map(str, folders.values()))}; data: {data}"))
