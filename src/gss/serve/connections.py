"""Connections: who may stay. Silent clients make room for new ones, and who does not read is closed.

A connection is idle from its start, or the end of an answer, until the headers of a request are complete. It is stalled
while more is waiting to be sent to it than the transport holds willingly.
"""

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from gss.serve.about import Limits

BACKLOG = 128  # connections accepted in one turn of the event loop, before any can be closed
RESERVE = 64 + 2 * BACKLOG  # descriptors for everything else
PROGRESS = 1 << 16  # bytes that a stalled client must read in `send_seconds`


def usable_connections(wanted: int) -> int:
    """How many connections the limit on descriptors has room for, which is raised as far as it may be."""
    try:
        import resource
    except ImportError:  # Windows, which has none
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVE
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        soft = max(soft, raised)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(wanted, soft - RESERVE))
    return wanted


class Connections:
    """All connections of a server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.idle: dict[Connection, float] = {}  # since when, the oldest first
        self.stalled: dict[Connection, tuple[float, int]] = {}  # since when, and the bytes that waited then
        self._next_sweep = 0.0

    def make_room(self, new: "Connection") -> None:
        """Where there are too many, close the one that has been idle for the longest."""
        if len(new.connections) > self.limits.connections:
            oldest = next(iter(self.idle))
            oldest.transport.abort()
            self.forget(oldest)

    def sweep(self) -> None:
        """Close who has been idle or stalled for too long, and who has most to read where that is too much in all."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + min(1.0, self.limits.header_seconds / 4, self.limits.send_seconds / 4)
        for connection, since in list(self.idle.items()):
            if now - since < self.limits.header_seconds:
                break
            if connection not in self.stalled:  # its last answer is still being read
                connection.transport.abort()
        for connection, (since, before) in list(self.stalled.items()):
            waiting = connection.transport.get_write_buffer_size()
            if waiting <= before - PROGRESS:
                self.stalled[connection] = (now, waiting)
            elif now - since >= self.limits.send_seconds:
                connection.transport.abort()
        self.bound_unread()

    def bound_unread(self) -> None:
        """Close those with most to read until all that waits to be sent is within its limit."""
        waiting = {each: each.transport.get_write_buffer_size() for each in self.stalled}
        total = sum(waiting.values())
        for connection in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if total <= self.limits.unread_bytes:
                return
            total -= waiting[connection]
            connection.transport.abort()
            self.forget(connection)

    def forget(self, connection: "Connection") -> None:
        """It is closed."""
        self.idle.pop(connection, None)
        self.stalled.pop(connection, None)


class Connection(H11Protocol):
    """One connection, which tells the others' keeper what it is about."""

    def __init__(self, keeper: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._keeper = keeper

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._keeper.idle[self] = time.monotonic()
        self._keeper.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeper.forget(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._keeper.idle.pop(self, None)

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._keeper.idle[self] = time.monotonic()  # before the next request, which may be here already
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._keeper.stalled[self] = (time.monotonic(), self.transport.get_write_buffer_size())
        self._keeper.bound_unread()

    def resume_writing(self) -> None:
        self._keeper.stalled.pop(self, None)
        super().resume_writing()


def quiet_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """One line per minute, instead of a traceback each, where the system has no descriptor for a new connection."""
    last = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if "out of system resource" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif time.monotonic() - last > 60:
            last = time.monotonic()
            logging.getLogger("gss.serve").error("no connection can be accepted: %s", context.get("exception"))

    loop.set_exception_handler(handle)
