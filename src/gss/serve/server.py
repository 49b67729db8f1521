"""The process: a socket, an engine in its thread, uvicorn in front, and an orderly end."""

import asyncio
import contextlib
import gc
import math
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import uvicorn

from gss.data import usable_cores
from gss.lm import LM
from gss.serve.about import Limits
from gss.serve.app import create_app
from gss.serve.connections import BACKLOG, Connection, Connections, usable_connections
from gss.serve.engine import EngineThread

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    loaded: LM,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    drain_seconds: float = 30.0,
    ready: Callable[[str], None] = lambda url: None,
    **options: Any,
) -> None:
    """Serve a model until SIGTERM or SIGINT; what is running then has `drain_seconds` to end.

    threads    of the model on a CPU; None: all cores but one, which is left to the connections
    ready      called with the address when requests can come
    options    rows, piece, cache_bytes and precision of `EngineThread`
    """
    if not math.isfinite(drain_seconds):
        raise ValueError(f"the drain must be a number of seconds, not {drain_seconds}")
    limits = limits or Limits()
    limits = replace(limits, connections=usable_connections(limits.connections))
    if loaded.model.device.type == "cpu":
        torch.set_num_threads(threads or max(1, usable_cores() - 1))
    engine = EngineThread(loaded.model, loaded.tokenizer, queue=limits.queue, **options)
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
    server = HttpServer(app, engine, limits, drain_seconds)
    with listening(host, port) as listener:
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


class HttpServer(uvicorn.Server):
    """Keeps its connections within limits, and tells the engine when it shuts down: nothing new from then on, and
    nothing old after a while.
    """

    def __init__(self, app: Any, engine: EngineThread, limits: Limits, drain_seconds: float = 0.0) -> None:
        self.keeper = Connections(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, self.keeper)),
                log_level="error",  # a line for each malformed request would be the client's to write
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                backlog=BACKLOG,
                timeout_graceful_shutdown=math.ceil(drain_seconds) + 10,
            )
        )
        self._engine, self._drain_seconds = engine, drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sys.platform == "win32":  # where the event loop watches no bare sockets
            await super().startup(sockets)
            return
        self.servers = []
        for listener in sockets or ():
            self.keeper.listen(listener, partial(Connection, self.keeper, self.config, self.server_state, {}))
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        self.keeper.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.servers:
            for listener in sockets or ():
                self.keeper.stop_listening(listener)
        self._engine.drain(0)
        asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.abandon)
        await super().shutdown(sockets)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=BACKLOG)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # the system would hold megabytes for each client
        # Of protocol TCP by name, not by default: only then does asyncio send small answers without delay.
        return socket.socket(made.family, made.type, socket.IPPROTO_TCP, fileno=made.detach())
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host} port {port}: {reason}; try another --port or --host") from None


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
