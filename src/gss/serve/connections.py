"""Connections: who may stay. Silent clients make room for new ones, and who does not read is closed.

A connection is idle from its start, or the end of an answer, until the headers of a request are complete. It is stalled
while more is waiting to be sent to it than the transport holds willingly. One that has not said a word is a bare
socket, a tenth of the work of one with a transport and a parser: a flood of them leaves the time to others.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from gss.serve.about import Limits

BACKLOG = 1024  # connections that the system holds until they are accepted
RESERVE = 128  # descriptors for everything else, and for those that are closed at the end of a turn
_TURN = 64  # connections accepted in one turn of the event loop
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
        self.idle: dict[Connection | socket.socket, float] = {}  # since when, the oldest first
        self.at_work: set[Connection] = set()  # those with a request under way
        self.stalled: dict[Connection, tuple[float, int]] = {}  # since when, and the bytes that waited then
        self._next_sweep = self._next_complaint = 0.0
        self._starting: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self.idle) + len(self.at_work)

    def listen(self, listener: socket.socket, make: Callable[[], "Connection"]) -> None:
        """Accept what comes at a socket; who has something to say gets a connection that `make` makes."""
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, make)

    def stop_listening(self, listener: socket.socket) -> None:
        """Accept nothing more, and close those who have said nothing."""
        asyncio.get_running_loop().remove_reader(listener)
        for silent in [each for each in self.idle if isinstance(each, socket.socket)]:
            self._close(silent)

    def _accept(self, listener: socket.socket, make: Callable[[], "Connection"]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_TURN):
            try:
                silent, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors: try again later, with a line per minute about it
                if time.monotonic() > self._next_complaint:
                    self._next_complaint = time.monotonic() + 60
                    logging.getLogger("gss.serve").error("no connection can be accepted: %s", error)
                loop.remove_reader(listener)
                loop.call_later(0.5, self._resume, listener, make)
                return
            silent.setblocking(False)
            self.idle[silent] = time.monotonic()
            loop.add_reader(silent, self._speaks, silent, make)
            self.make_room()

    def _resume(self, listener: socket.socket, make: Callable[[], "Connection"]) -> None:
        if listener.fileno() >= 0:
            self.listen(listener, make)

    def _speaks(self, silent: socket.socket, make: Callable[[], "Connection"]) -> None:
        """Make a connection of a socket that has something to read; one that was only closed goes."""
        with contextlib.suppress(OSError):
            if silent.recv(1, socket.MSG_PEEK):
                loop = asyncio.get_running_loop()
                loop.remove_reader(silent)
                del self.idle[silent]
                task = loop.create_task(_start(make, silent))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
                return
        self._close(silent)

    def make_room(self) -> None:
        """Where there are too many, close the one that has been idle for the longest."""
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
        """Close who has been idle or stalled for too long, and who has most to read where that is too much in all."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + min(1.0, self.limits.header_seconds / 4, self.limits.send_seconds / 4)
        for connection, since in list(self.idle.items()):
            if now - since < self.limits.header_seconds:
                break
            if connection not in self.stalled:  # its last answer is still being read
                self._close(connection)
        for connection, (since, before) in list(self.stalled.items()):
            waiting = connection.transport.get_write_buffer_size()
            if waiting <= before - PROGRESS:
                self.stalled[connection] = (now, waiting)
            elif now - since >= self.limits.send_seconds:
                self._close(connection)
        self.bound_unread()

    def bound_unread(self) -> None:
        """Close those with most to read until all that waits to be sent is within its limit."""
        waiting = {each: each.transport.get_write_buffer_size() for each in self.stalled}
        total = sum(waiting.values())
        for connection in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if total <= self.limits.unread_bytes:
                return
            total -= waiting[connection]
            self._close(connection)

    def forget(self, connection: Any) -> None:
        """It is closed."""
        self.idle.pop(connection, None)
        self.stalled.pop(connection, None)
        self.at_work.discard(connection)


class Connection(H11Protocol):
    """One connection, which tells the others' keeper what it is about."""

    def __init__(self, keeper: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._keeper = keeper

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._keeper.idle[self] = time.monotonic()
        self._keeper.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeper.forget(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._keeper.idle.pop(self, None)
            self._keeper.at_work.add(self)

    def on_response_complete(self) -> None:
        self._keeper.at_work.discard(self)
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


async def _start(make: Callable[[], Connection], accepted: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has gone already
        await asyncio.get_running_loop().connect_accepted_socket(make, accepted)
