"""The process: a socket, an engine in its thread, uvicorn in front, connection limits, and orderly shutdown.

A connection is idle from its start, or the end of a response, until the headers of a request are complete. Idle
connections are closed to make room for new ones. A connection is stalled while it has more unsent data than the
transport wants to buffer; it is closed if its client does not read. A connection that has not sent a byte is a bare
socket, which costs a tenth of one with a transport and a parser, so a flood of them leaves time for others.
"""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gss.data import usable_cores
from gss.lm import LM
from gss.serve.about import Limits
from gss.serve.app import create_app
from gss.serve.engine import EngineThread

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BACKLOG = 1024  # connections that the system holds until they are accepted
RESERVE = 128  # descriptors for everything else, and for connections that are about to be closed
_TURN = 64  # connections accepted in one iteration of the event loop
PROGRESS = 1 << 16  # bytes that a stalled client must read in `send_seconds`


def usable_connections(wanted: int) -> int:
    """Raise the limit on descriptors as far as allowed; returns how many connections it has room for."""
    try:
        import resource
    except ImportError:  # Windows, which has none
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = max(soft, needed if hard == resource.RLIM_INFINITY else min(needed, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - RESERVE))


class Connections:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.idle: dict[Connection | socket.socket, float] = {}  # since when, the oldest first
        self.at_work: set[Connection] = set()  # those with a request in progress
        self.stalled: dict[Connection, tuple[float, int]] = {}  # since when, and the bytes unsent then
        self._next_sweep = self._next_complaint = 0.0
        self._starting: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self.idle) + len(self.at_work)

    def listen(self, listener: socket.socket, make: Callable[[], "Connection"]) -> None:
        """Accept connections at a socket; the first byte of each turns it into a `Connection` made by `make`."""
        if listener.fileno() < 0:  # closed before it could accept again
            return
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, make)

    def stop_listening(self, listener: socket.socket) -> None:
        """Accept nothing more, and close connections that have not sent a byte."""
        asyncio.get_running_loop().remove_reader(listener)
        for accepted in [each for each in self.idle if isinstance(each, socket.socket)]:
            self._close(accepted)

    def _accept(self, listener: socket.socket, make: Callable[[], "Connection"]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_TURN):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors: try again later, and log it once a minute
                if time.monotonic() > self._next_complaint:
                    self._next_complaint = time.monotonic() + 60
                    logging.getLogger("gss.serve").error("no connection can be accepted: %s", error)
                loop.remove_reader(listener)
                loop.call_later(0.5, self.listen, listener, make)
                return
            accepted.setblocking(False)
            self.idle[accepted] = time.monotonic()
            loop.add_reader(accepted, self._readable, accepted, make)
            self.make_room()

    def _readable(self, accepted: socket.socket, make: Callable[[], "Connection"]) -> None:
        """Turn a socket that has sent something into a connection; close it if it was only closed."""
        with contextlib.suppress(OSError):
            if accepted.recv(1, socket.MSG_PEEK):
                loop = asyncio.get_running_loop()
                loop.remove_reader(accepted)
                del self.idle[accepted]
                task = loop.create_task(self._start(make, accepted))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
                return
        self._close(accepted)

    async def _start(self, make: Callable[[], "Connection"], accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone already
            await asyncio.get_running_loop().connect_accepted_socket(make, accepted)

    def make_room(self) -> None:
        """If there are too many, close the one that has been idle longest."""
        if len(self) > self.limits.connections and self.idle:
            self._close(next(iter(self.idle)))

    def _close(self, connection: "Connection | socket.socket") -> None:
        self.forget(connection)
        if isinstance(connection, Connection):
            connection.transport.abort()
        else:
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()

    def sweep(self) -> None:
        """Close connections that have been idle or stalled for too long."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + min(1.0, self.limits.header_seconds / 4, self.limits.send_seconds / 4)
        for connection, since in list(self.idle.items()):
            if now - since < self.limits.header_seconds:
                break
            if connection not in self.stalled:  # its last response is still being read
                self._close(connection)
        for connection, (since, before) in list(self.stalled.items()):
            waiting = connection.transport.get_write_buffer_size()
            if waiting <= before - PROGRESS:
                self.stalled[connection] = (now, waiting)
            elif now - since >= self.limits.send_seconds:
                self._close(connection)
        self.bound_unread()

    def bound_unread(self) -> None:
        """Close the connections with the most unsent data until all of it together is within the limit."""
        waiting = {each: each.transport.get_write_buffer_size() for each in self.stalled}
        total = sum(waiting.values())
        for connection in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if total <= self.limits.unread_bytes:
                return
            total -= waiting[connection]
            self._close(connection)

    def forget(self, connection: Any) -> None:
        self.idle.pop(connection, None)
        self.stalled.pop(connection, None)
        self.at_work.discard(connection)


class Connection(H11Protocol):
    """One connection, which tells `Connections` whether it is idle, at work or stalled."""

    def __init__(self, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connections = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.idle[self] = time.monotonic()
        self._connections.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._connections.idle.pop(self, None)
            self._connections.at_work.add(self)

    def on_response_complete(self) -> None:
        self._connections.at_work.discard(self)
        if not self.transport.is_closing():
            # Before the next request, which may have arrived already, is parsed.
            self._connections.idle[self] = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.stalled[self] = (time.monotonic(), self.transport.get_write_buffer_size())
        self._connections.bound_unread()

    def resume_writing(self) -> None:
        self._connections.stalled.pop(self, None)
        super().resume_writing()


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
    """Serve a model until SIGTERM or SIGINT; requests in progress then have `drain_seconds` to finish.

    threads    CPU threads for the model; None: all cores but one, which is left to the connections
    ready      called with the address when the server accepts requests
    options    further options of `EngineThread`
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
        engine, name=name, preset=loaded.preset, step=loaded.step, limits=limits, api_key=api_key, hosts=own_names
    )
    server = HttpServer(app, engine, limits, drain_seconds)
    if loaded.model.device.type == "cuda":
        engine.core.warm_up()
    with listening(host, port) as listener:
        # For a signal before uvicorn handles it, and because uvicorn raises it again when it has shut down.
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(server, "should_exit", True))
        engine.start()
        gc.collect()
        gc.freeze()  # what is loaded stays; collections that traverse it would only hold up requests
        bound, number = listener.getsockname()[:2]
        ready(f"http://[{bound}]:{number}" if ":" in bound else f"http://{bound}:{number}")
        try:
            with contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[listener])
        finally:
            engine.stop()


class HttpServer(uvicorn.Server):
    """Keeps connections within limits; at shutdown, requests in progress get `drain_seconds` to finish."""

    def __init__(self, app: Any, engine: EngineThread, limits: Limits, drain_seconds: float = 0.0) -> None:
        self.connections = Connections(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, self.connections)),
                log_level="error",  # malformed requests must not fill the log
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
        if sys.platform == "win32":  # whose event loop cannot watch bare sockets
            await super().startup(sockets)
            return
        self.servers = []
        for listener in sockets or ():
            self.connections.listen(listener, partial(Connection, self.connections, self.config, self.server_state, {}))
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        self.connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.servers:
            for listener in sockets or ():
                self.connections.stop_listening(listener)
        self._engine.drain(0)
        asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.abandon)
        await super().shutdown(sockets)


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=BACKLOG)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # by default it is megabytes per client
        # With TCP as its explicit protocol: only then does asyncio send small responses without delay.
        return socket.socket(made.family, made.type, socket.IPPROTO_TCP, fileno=made.detach())
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host} port {port}: {reason}; try another --port or --host") from None
