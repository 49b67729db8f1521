"""Checks that every request passes before it reaches a route, and the responses to failures.

`Guard` is a plain ASGI wrapper, so streams pass through it untouched.
"""

import asyncio
import hashlib
import hmac
import re
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gss.serve.about import Limits
from gss.serve.metrics import Metrics

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_PHRASES = {
    400: "the request could not be read",
    404: "there is no such address",
    405: "this address does not answer to this method",
}
_SMALL_BODY = 1 << 16  # bytes of a body that is accepted however many others are in progress
_HOST = re.compile(r"\[[^]]*\]?|[^:]*")  # a host's name, or its address in brackets, without the port


def to_json(content: Any) -> bytes:
    """Plain data as JSON, in a fifth of the standard library's time: the event loop waits for it."""
    return pydantic_core.to_json(content, inf_nan_mode="null")


class ApiError(HTTPException):
    """An error response in the form that OpenAI's clients expect."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def answer_errors(app: FastAPI) -> None:
    """Make every kind of failure an error response of the same form."""

    async def answer(request: Request, error: Any) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            # Names fields, never values.
            place = ".".join(str(part)[:64] for part in first["loc"][1:4] if part not in ("str", "list[str]"))
            said = "not known here: leave it out" if first["type"] == "extra_forbidden" else str(first["msg"])[:300]
            message = f"{place}{place and ': '}{said}"
            error = ApiError(400, message, code=first["type"], param=place or None)
        elif not isinstance(error, HTTPException):
            error = ApiError(500, "the server failed; its log says why")
        elif not isinstance(error, ApiError):
            message = _PHRASES.get(error.status_code, "the request was refused")
            error = ApiError(error.status_code, message, headers=error.headers)
        return error.response()

    for kind in (HTTPException, RequestValidationError, Exception):
        app.exception_handler(kind)(answer)


class Guard:
    """Refuses requests without the key, for another host, or with too large a body; counts responses.

    api_key   required for everything except `open_paths`; None: for nothing
    hosts     names by which a request may address the server; None: any. Without a key, a server on the loopback
              interface answers only to its own names, so that no web page can reach it through another name.
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
        self._held = 0  # bytes of the bodies of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        status, size, whole = 500, 0, False
        deadline = time.monotonic() + self._limits.body_seconds

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def bounded() -> Message:
            """The body as it arrives, cut off when it is too large, too slow, or one of too many."""
            nonlocal size, whole
            if whole:
                return await receive()  # the disconnect, however long it takes to come
            try:
                message: Any = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise ApiError(408, "the body took too long to arrive", code="body_timeout") from None
            part = len(message.get("body", b""))
            size += part
            self._held += part
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            self._check_size(size)
            if size > _SMALL_BODY and self._held > self._limits.bodies_bytes:
                busy = "too many large bodies at a time: try again later"
                raise ApiError(503, busy, code="overloaded", headers={"Retry-After": "1"})
            return message

        try:
            self._check(scope)
            await self._app(scope, bounded, watched)
        except ApiError as error:
            await error.response()(scope, receive, watched)
        finally:
            self._held -= size
            self._metrics.requests.add(1, getattr(scope.get("route"), "path", "other"), str(status))

    def _check_size(self, size: int) -> None:
        if size > self._limits.body_bytes:
            message = f"the body is larger than {self._limits.body_bytes:,} bytes"
            raise ApiError(413, message, code="body_too_large")

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of repeated headers counts
        host = _HOST.match(headers.get(b"host", b"").decode("latin-1").strip().lower())
        if self._hosts is not None and host and host[0] not in self._hosts:
            raise ApiError(403, "this server does not answer to that host name: set an API key to open it to others")
        if self._key is not None and scope["path"] not in self._open_paths:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            matches = hmac.compare_digest(_digest(given.strip()), self._key)
            if scheme.lower() != b"bearer" or not matches:
                message = "an API key is needed: send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        self._check_size(int(length) if length.isdigit() and len(length) <= 18 else sys.maxsize)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()  # of one length for every key
