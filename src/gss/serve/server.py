"""The process: a socket, an engine in its thread, uvicorn in front, and an orderly end."""

import asyncio
import contextlib
import gc
import math
import signal
import socket
from collections.abc import Callable

import torch
import uvicorn

from gss.data import usable_cores
from gss.loading import Loaded
from gss.serve.about import Limits
from gss.serve.app import create_app
from gss.serve.completions import post_to_loops
from gss.serve.engine import Engine

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    loaded: Loaded,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    limits: Limits | None = None,
    rows: int = 64,
    piece: int | None = None,
    cache_bytes: int = 256 << 20,
    precision: str = "auto",
    threads: int | None = None,
    drain_seconds: float = 30.0,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a model until SIGTERM or SIGINT; what is running then has `drain_seconds` to end.

    precision  auto, fp32 or bf16, as `Engine` has it
    threads    of the model on a CPU; None: all cores but one, which is left to the connections
    ready      called with the address when requests can come
    """
    if not math.isfinite(drain_seconds):
        raise ValueError(f"the drain must be a number of seconds, not {drain_seconds}")
    limits = limits or Limits()
    if loaded.model.embedding.weight.device.type == "cpu":
        torch.set_num_threads(threads or max(1, usable_cores() - 1))
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        rows=rows,
        queue=limits.queue,
        piece=piece,
        cache_bytes=cache_bytes,
        precision=precision,
        post=post_to_loops,
    )
    own_names = {"127.0.0.1", "localhost", "[::1]"} if host in LOOPBACK and api_key is None else None
    app = create_app(
        engine,
        name=name,
        preset=loaded.preset,
        step=loaded.step,
        limits=limits,
        api_key=api_key,
        hosts=own_names,
    )
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=math.ceil(drain_seconds) + 10,
    )
    server = _Server(config, engine, drain_seconds)
    with _listening(host, port) as listener:
        # For a signal before uvicorn listens to it, and for its raising it again when it has shut down.
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(server, "should_exit", True))
        engine.start()
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it again would only hold requests up
        ready(_address(listener))
        try:
            with contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[listener])
        finally:
            engine.stop()


class _Server(uvicorn.Server):
    """Tells the engine when it shuts down: nothing new from then on, and nothing old after a while."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine, self._drain_seconds = engine, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain(0)
        asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.abandon)
        await super().shutdown(sockets)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host} port {port}: {reason}; try another --port or --host") from None


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
