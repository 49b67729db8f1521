"""`gss serve`: a run behind HTTP."""

from typing import Annotated

from typer import Option

from gss.cli.options import Device, Precision, Run, Speculate, State, Step, Weights


def serve_command(
    run: Run = None,
    host: Annotated[str, Option(help="Address to listen on. The default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, Option(envvar="GSS_API_KEY", show_envvar=True, help="Key that clients must send.")
    ] = None,
    name: Annotated[str | None, Option(help="The model's id for clients. Default: the folder's name.")] = None,
    state: State = None,
    step: Step = None,
    device: Device = "auto",
    precision: Precision = "auto",
    weights: Weights = None,
    speculate: Speculate = True,
    threads: Annotated[int | None, Option(min=1, help="CPU threads for the model. Default: all cores but one.")] = None,
    batch: Annotated[int, Option(min=1, help="Maximum number of sequences that run side by side.")] = 64,
    queue: Annotated[int, Option(min=0, help="Maximum number of sequences that wait.")] = 256,
    piece: Annotated[
        int | None, Option(min=1, help="Prompt tokens read per step. Default: 256; on a GPU 4,096.")
    ] = None,
    cache_mib: Annotated[int, Option(min=0, help="Memory for cached states of prompts, in MiB.")] = 256,
    max_prompt: Annotated[int, Option(min=1, help="Longest prompt, in tokens.")] = 131_072,
    max_tokens: Annotated[int, Option(min=1, help="Maximum number of tokens that a request may ask for.")] = 4096,
    max_n: Annotated[int, Option(min=1, help="Maximum number of continuations of a prompt.")] = 16,
    max_body: Annotated[int, Option(min=1, help="Largest body of a request, in bytes.")] = 4 << 20,
    max_seconds: Annotated[float, Option(help="Longest time that a request may take.")] = 300.0,
    drain: Annotated[float, Option(min=0, help="Seconds that running requests get when the server stops.")] = 30.0,
) -> None:
    """Serve a model: OpenAI-compatible completions, and a playground in the browser."""
    from rich.console import Console
    from rich.markup import escape

    from gss.box import NAME
    from gss.io.devices import pick_device
    from gss.lm import load
    from gss.precision import check

    try:
        from gss.serve.about import Limits
        from gss.serve.server import LOOPBACK, serve
    except ImportError as error:
        raise ValueError(f"gss serve needs more packages ({error}): pip install 'gss-lm[serve]'") from None

    check(precision)
    console = Console(stderr=True, highlight=False)
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty: give one, or leave --api-key and GSS_API_KEY out")
    if host not in LOOPBACK and api_key is None:
        console.print(
            f"[bold yellow]warning:[/] {escape(host)} is open to others and no API key is set: whoever reaches it "
            "can use the model. Set one with --api-key or GSS_API_KEY."
        )
    sizes = {"body_bytes": max_body, "prompt_tokens": max_prompt, "max_tokens": max_tokens, "n": max_n}
    limits = Limits(**sizes, seconds=max_seconds, queue=queue)
    with console.status(f"loading {escape(str(run or NAME))}"):
        loaded = load(run, step=step, device=pick_device(device), state=state, weights=weights)
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
