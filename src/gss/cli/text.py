"""Commands that run a model on text: generate, read and serve."""

import inspect
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

import gss
from gss.box import NAME
from gss.cli.shared import Device, Precision, Run, Speculate, State, Step, Weights, share_bar
from gss.io.files import file_to_be
from gss.sampling import OPTIONS, Sampling

if TYPE_CHECKING:
    from gss.generate import TextPiece

# Bytes of weights under which a step is too little work to share: with 16 MB, two threads on two cores are 1.4 times
# as fast as one at best, and many times slower when anything else wants a core.
_SMALL = 32_000_000
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
    prompts: Annotated[
        Path | None, Option(help='A file with one prompt per line (- for standard input): text, or {"prompt": …}.')
    ] = None,
    state: State = None,
    tokens: Annotated[int, Option(min=1, metavar="N", help="Maximum number of tokens to produce.")] = 200,
    seed: Annotated[int, Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, Option(help="Stop before this text; repeatable.")] = None,
    samples: Annotated[int, Option(min=1, metavar="N", help="Number of texts per prompt, from consecutive seeds.")] = 1,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per text, each on its own line.")] = False,
    echo: Annotated[bool, Option(help="Print the prompt before its continuation.")] = True,
    step: Step = None,
    device: Device = "auto",
    precision: Precision = "auto",
    weights: Weights = None,
    speculate: Speculate = None,
    threads: Annotated[
        int | None, Option(min=1, metavar="N", help="CPU threads. Default: all; 1 for a small model.")
    ] = None,
    **sampling: Any,
) -> None:
    """Continue a prompt, printing the text as it is produced; or many prompts, printing each text when it is done."""
    from gss.generate import stream_texts
    from gss.io.devices import pick_device
    from gss.precision import check

    check(precision)
    if prompt and prompts:
        raise ValueError("give --prompt or --prompts, not both")
    given = _prompts_file(prompts) if prompts else [_standard_input() if prompt == "-" else _utf8(prompt, "the prompt")]
    drawn = Sampling(**sampling)
    lm = gss.load(run, step=step, device=pick_device(device), state=state, weights=weights)
    small = sum(tensor.nbytes for tensor in lm.model.state_dict().values()) < _SMALL
    options: dict[str, Any] = {"n": samples, "max_tokens": tokens, "seed": seed, "stop": stop or ()}
    options |= {"precision": precision, "speculate": speculate}
    with _threads(threads or (1 if small else None)):
        texts = stream_texts(lm.model, lm.tokenizer, given, sampling=drawn, **options)
        _print(texts, given, samples, seed, as_json, echo)


def _print(
    texts: "Iterator[TextPiece]", prompts: list[str], samples: int, seed: int, as_json: bool, echo: bool
) -> None:
    """Texts in the order of their prompts, each as soon as those before it are done; one alone as it is produced.

    A blank line stands between two.
    """
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
            if waiting and not as_json:
                print()
    now = time.perf_counter()
    speed = f", then {(produced + since) / (now - first):,.0f} tokens/s" if produced + since > 0 else ""
    Console(stderr=True, highlight=False).print(f"[dim]first token after {first - started:.2f} s{speed}[/]")


def read_command(
    book: Annotated[Path, Argument(help="A text file; - reads standard input.")],
    run: Run = None,
    out: Annotated[Path, Option(help="The state file to write.")] = Path("state.safetensors"),
    state: State = None,
    int8: Annotated[bool, Option("--int8", help="Round the state to a quarter of the size.")] = False,
    step: Step = None,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Read a document once and save the model's state, from which generate, eval and serve can start (--state)."""
    from gss.io.devices import pick_device

    text, out = _text_of(book), file_to_be(out)
    lm = gss.load(run, step=step, device=pick_device(device), state=state)
    with share_bar("reading") as show:
        after = lm.read(text, precision=precision, progress=lambda share: show("reading", share))
    gss.save_state(after, out, int8=int8)
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


def _utf8(text: str, what: str) -> str:
    """Refuse a text that was not UTF-8, which Python and the reading below show by lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not UTF-8 text, from character {error.start + 1:,} on") from None
    return text


def _text_of(path: Path) -> str:
    """The text of a file, or of standard input, with line ends as everywhere and without a byte-order mark."""
    if str(path) == "-":
        return _standard_input()
    text = _utf8(path.read_text("utf-8-sig", "surrogateescape"), str(path))
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def _standard_input() -> str:
    text = _utf8(sys.stdin.buffer.read().decode("utf-8", "surrogateescape"), "the prompt on standard input")
    if not text:
        raise ValueError("standard input is empty: pipe a text into it, or name a file or prompt instead of -")
    return text


def _prompts_file(path: Path) -> list[str]:
    """A prompt from each line that is not empty: an object's `prompt`, or the line as it is."""
    prompts = []
    for number, line in enumerate(_text_of(path).split("\n"), 1):  # an object may hold other line ends
        if not line.strip():
            continue
        prompt: Any = line
        if line.lstrip().startswith("{"):
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError):
                prompt = None
        if not isinstance(prompt, str):
            raise ValueError(f'{path}, line {number}: not a JSON object with a "prompt" that is a text')
        prompts.append(_utf8(prompt, f"{path}, line {number}"))
    if not prompts:
        raise ValueError(f"{path} has no prompts: write one per line")
    return prompts


def serve_command(
    run: Run = None,
    host: Annotated[str, Option(help="Address to listen on. The default serves this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    api_key: Annotated[str | None, Option(envvar="GSS_API_KEY", help="API key that clients must send.")] = None,
    name: Annotated[str | None, Option(help="The model's id for clients. Default: the folder's name.")] = None,
    state: State = None,
    step: Step = None,
    device: Device = "auto",
    precision: Precision = "auto",
    weights: Weights = None,
    speculate: Speculate = None,
    threads: Annotated[int | None, Option(min=1, help="CPU threads for the model. Default: all cores but one.")] = None,
    batch: Annotated[int, Option(min=1, help="Maximum number of sequences running at once.")] = 64,
    queue: Annotated[int, Option(min=0, help="Maximum number of waiting sequences.")] = 256,
    piece: Annotated[int | None, Option(min=1, help="Prompt tokens per step. Default: 256; 4,096 on a GPU.")] = None,
    cache_mib: Annotated[int, Option(min=0, help="Memory for cached prompt states, in MiB.")] = 256,
    max_prompt: Annotated[int, Option(min=1, help="Maximum prompt length, in tokens.")] = 131_072,
    max_tokens: Annotated[int, Option(min=1, help="Maximum number of tokens that a request may ask for.")] = 4096,
    max_n: Annotated[int, Option(min=1, help="Maximum number of continuations per prompt.")] = 16,
    max_body: Annotated[int, Option(min=1, help="Maximum size of a request body, in bytes.")] = 4 << 20,
    max_seconds: Annotated[float, Option(help="Maximum time per request, in seconds.")] = 300.0,
    drain: Annotated[float, Option(min=0, help="Seconds that running requests get when the server stops.")] = 30.0,
) -> None:
    """Serve a model over HTTP: OpenAI-compatible completions, and a playground in the browser."""
    from gss.io.devices import pick_device
    from gss.precision import check

    try:
        from gss.serve.about import Limits
        from gss.serve.server import LOOPBACK, serve
    except ImportError as error:
        raise ValueError(f"gss serve needs more packages ({error}): pip install 'gss-lm[serve]'") from None

    check(precision)
    console = Console(stderr=True, highlight=False)
    if host not in LOOPBACK and api_key is None:
        console.print(
            f"[bold yellow]warning:[/] {escape(host)} is open to other machines and no API key is set: anyone who can "
            "reach it can use the model. Set a key with --api-key or GSS_API_KEY."
        )
    sizes = {"body_bytes": max_body, "prompt_tokens": max_prompt, "max_tokens": max_tokens, "n": max_n}
    limits = Limits(**sizes, seconds=max_seconds, queue=queue)
    with console.status(f"loading {escape(str(run or NAME))}"):
        loaded = gss.load(run, step=step, device=pick_device(device), state=state, weights=weights)
    if loaded.model.device.type == "cuda":
        console.print("[dim]warming up with batches of every size; the first time, this compiles kernels[/]")
    served_as = name or (run.resolve().name if run else NAME)
    serve(
        loaded,
        name=served_as,
        host=host,
        port=port,
        api_key=api_key,
        limits=limits,
        rows=batch,
        piece=piece,
        cache_bytes=cache_mib << 20,
        precision=precision,
        speculate=speculate,
        threads=threads,
        drain_seconds=drain,
        ready=lambda url: print(f"Serving {served_as} (step {loaded.step}) at {url}", flush=True),
    )
