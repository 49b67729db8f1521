"""Commands that run a model on text: generate, read."""

import inspect
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from gss.cli.options import Device, Precision, Run, Speculate, State, Step, Weights
from gss.sampling import OPTIONS, Sampling

if TYPE_CHECKING:
    from gss.generate import TextPiece

# Parameters under which a step is too little work to share: with 7M, two threads on two cores are 1.2 times as fast
# as one at best, and many times slower when anything else wants a core.
_SMALL = 16_000_000
_DEFAULTS = {"temperature": 0.8}


def _with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each of the sampler's, after `tokens`, in place of its `**sampling`."""
    own = inspect.signature(command)
    given = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "sampling"]
    place = 1 + [parameter.name for parameter in given].index("tokens")
    given[place:place] = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS.get(name, option.default),
            annotation=Annotated[option.type, Option(help=option.metadata["about"])],
        )
        for name, option in OPTIONS.items()
    ]
    command.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
    return command


@_with_sampling
def generate_command(
    run: Run = None,
    prompt: Annotated[str, Option(help="The text to continue; - reads standard input. Empty: a new document.")] = "",
    prompts: Annotated[Path | None, Option(help='A file of prompts, one to a line: text, or {"prompt": …}.')] = None,
    state: State = None,
    tokens: Annotated[int, Option(min=1, help="Maximum number of tokens to produce.")] = 200,
    seed: Annotated[int, Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, Option(help="Stop before this text; repeatable.")] = None,
    samples: Annotated[int, Option(min=1, help="Number of texts per prompt, from consecutive seeds.")] = 1,
    as_json: Annotated[bool, Option("--json", help="Print a JSON object per text, one to a line.")] = False,
    echo: Annotated[bool, Option(help="Print the prompt before its continuation.")] = True,
    step: Step = None,
    device: Device = "auto",
    precision: Precision = "auto",
    weights: Weights = None,
    speculate: Speculate = True,
    threads: Annotated[
        int | None, Option(min=1, help="CPU threads. Default: one for a small model, else all cores.")
    ] = None,
    **sampling: Any,
) -> None:
    """Continue a prompt, printing the text as it is produced; or many prompts, each printed when it is done."""
    from gss.accounting import account
    from gss.generate import stream_texts
    from gss.io.devices import pick_device
    from gss.lm import load
    from gss.precision import check

    check(precision)
    if prompt and prompts:
        raise ValueError("give --prompt or --prompts, not both")
    given = _prompts_file(prompts) if prompts else [_standard_input() if prompt == "-" else _argument(prompt)]
    drawn = Sampling(**sampling)
    lm = load(run, step=step, device=pick_device(device), state=state, weights=weights)
    small = account(lm.model.config).parameters < _SMALL
    options: dict[str, Any] = {"n": samples, "max_tokens": tokens, "seed": seed, "stop": stop or ()}
    options |= {"precision": precision, "speculate": speculate}
    with _threads(threads or (1 if small else None)):
        texts = stream_texts(lm.model, lm.tokenizer, given, sampling=drawn, **options)
        _print(texts, given, samples, seed, as_json, echo)


def _print(
    texts: "Iterator[TextPiece]", prompts: list[str], samples: int, seed: int, as_json: bool, echo: bool
) -> None:
    """Texts in the order of their prompts, each as soon as those before it are done; one alone as it is produced."""
    from rich.console import Console

    alone = len(prompts) * samples == 1 and not as_json
    if alone and echo:
        print(prompts[0], end="", flush=True)
    started, first, produced, since = time.perf_counter(), 0.0, 0, 0
    written: dict[tuple[int, int], list[TextPiece]] = defaultdict(list)
    order = iter((place, sample) for place in range(len(prompts)) for sample in range(samples))
    waiting = next(order, None)
    for piece in texts:
        if not first:
            first, since = time.perf_counter(), -piece.tokens
        produced += piece.tokens
        if alone:
            print(piece.text, end="" if not piece.finish else "\n", flush=True)
            continue
        written[piece.prompt, piece.sample].append(piece)
        while waiting and (pieces := written[waiting]) and pieces[-1].finish:
            text, prompt = "".join(each.text for each in pieces), prompts[waiting[0]]
            facts = {"prompt": prompt, "text": text, "tokens": sum(each.tokens for each in pieces)}
            facts |= {"finish": pieces[-1].finish, "seed": seed + waiting[1]}
            print(json.dumps(facts, ensure_ascii=False) if as_json else (prompt if echo else "") + text, flush=True)
            waiting = next(order, None)
    now = time.perf_counter()
    speed = f", then {(produced + since) / (now - first):,.0f} tokens/s" if produced + since > 0 else ""
    Console(stderr=True, highlight=False).print(f"[dim]first token after {first - started:.2f} s{speed}[/]")


def read_command(
    book: Annotated[str, Argument(help="A text file; - reads standard input.")],
    run: Run = None,
    out: Annotated[Path, Option(help="The file to write, for --state of generate, eval and serve.")] = Path(
        "state.safetensors"
    ),
    state: State = None,
    int8: Annotated[bool, Option("--int8", help="A quarter of the size, rounded.")] = False,
    step: Step = None,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Read a document once and keep what the model remembers of it: a state, which texts can start from."""
    from gss.cli.show import share_bar
    from gss.io.devices import pick_device
    from gss.io.states import save_state
    from gss.lm import load

    text = _standard_input() if book == "-" else _text_of(Path(book))
    lm = load(run, step=step, device=pick_device(device), state=state)
    with share_bar("reading") as show:
        after = lm.read(text, precision=precision, progress=lambda share: show("reading", share))
    save_state(after, out, int8=int8)
    print(f"read {int(after.position):,} tokens; wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Run on this many threads (None: as many as now), and restore the number afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _argument(prompt: str) -> str:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error}") from None
    return prompt


def _standard_input() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on standard input is not UTF-8 text: {error}") from None
    if not text:
        raise ValueError("standard input is empty: pipe a prompt in, or leave --prompt out to start a new document")
    return text


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def _prompts_file(path: Path) -> list[str]:
    """A prompt from each line that is not empty: an object's `prompt`, or the line as it is."""
    prompts = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            try:
                line = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f'{path}, line {number}: not an object with a "prompt"') from None
        prompts.append(str(line))
    if not prompts:
        raise ValueError(f"{path} has no prompts: write one to a line")
    return prompts
