"""What every request passes before a route sees it: whose it is, whom it was meant for, how much it sends.

A plain ASGI wrapper, so that streams run through it untouched.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gss.serve.errors import ApiError, error_response
from gss.serve.limits import Limits
from gss.serve.metrics import Metrics


class Guard:
    """Refuses requests without the key, for another host, or with too much to say; counts what is answered.

    api_key   asked of everything but `open_paths`; None: of nothing
    hosts     names that a request may address the server by; None: any. A server without a key on this machine only
              answers to its own names, so that no web page can reach it through a name of its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        metrics: Metrics,
        api_key: str | None,
        open_paths: Collection[str],
        hosts: Collection[str] | None,
    ) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._key = None if api_key is None else _digest(api_key.encode())
        self._open_paths, self._hosts = open_paths, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = _headers(scope)
            self._check(scope, headers)
            await self._app(scope, _Body(receive, self._limits).receive, watched)
        except ApiError as error:
            await error_response(error)(scope, receive, watched)
        finally:
            route = scope.get("route")
            self._metrics.requests.add(1, getattr(route, "path", "other"), str(status))

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._hosts is not None and _host_name(headers.get(b"host", b"")) not in self._hosts:
            raise ApiError(403, "this server does not answer to that host name: set an API key to open it to others")
        if self._key is not None and scope["path"] not in self._open_paths:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            matches = hmac.compare_digest(_digest(given.strip()), self._key)
            if scheme.lower() != b"bearer" or not matches:
                raise ApiError(
                    401,
                    "an API key is needed: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._limits.body_bytes:
            raise _too_large(self._limits)


class _Body:
    """A request's body as it arrives, cut off when it is too large or too slow."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits = receive, limits
        self._bytes = 0
        self._whole = False
        self._deadline = time.monotonic() + limits.body_seconds

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()  # that the client has gone: waited for as long as it takes
        try:
            message: Any = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise ApiError(408, "the body took too long to arrive", code="body_timeout") from None
        self._bytes += len(message.get("body", b""))
        self._whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self._bytes > self._limits.body_bytes:
            raise _too_large(self._limits)
        return message


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes:,} bytes", code="body_too_large")


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(reversed(scope["headers"]))  # of those that come twice, the first counts


def _host_name(value: bytes) -> str:
    text = value.decode("latin-1").strip().lower()
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()  # of one length, whatever the key's
