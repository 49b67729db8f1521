"""What every request passes before a route sees it, and how every failure is answered.

`Guard` is a plain ASGI wrapper, so that streams run through it untouched. Errors look as OpenAI's clients expect them:
a status, and a body that says what was wrong and nothing else.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Collection
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
# Bytes of a body that is let in whatever others hold.
_SMALL_BODY = 1 << 16


def to_json(content: Any) -> bytes:
    """Plain data as JSON. A large answer takes a fifth of the standard library's time, in which nobody is served."""
    return pydantic_core.to_json(content, inf_nan_mode="null")


class ApiError(HTTPException):
    """A request that gets no answer but why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.body = _error_body(status, message, code, param)

    def response(self) -> JSONResponse:
        """The answer to the request."""
        return JSONResponse(self.body, self.status_code, self.headers)


def _error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer_errors(app: FastAPI) -> None:
    """Answer every kind of failure of an app in the same way."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def theirs(request: Request, error: HTTPException) -> JSONResponse:
        message = _PHRASES.get(error.status_code, "the request was refused")
        return JSONResponse(_error_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # Names of fields come back; values never do.
        place = ".".join(str(part)[:64] for part in first["loc"][1:4] if part not in ("str", "list[str]"))
        kind = first["type"]
        message = "the body is not valid JSON" if kind == "json_invalid" else str(first["msg"])[:300]
        if place and kind != "json_invalid":
            message = f"{place}: {message}"
        return JSONResponse(_error_body(400, message, kind, place or None), 400)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(_error_body(500, "the server failed; its log says why"), 500)


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
        self._app, self.limits, self._metrics = app, limits, metrics
        self._key = None if api_key is None else _digest(api_key.encode())
        self._open_paths, self._hosts = open_paths, hosts
        self.held = 0
        """Bytes of the bodies of all requests under way."""

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

        body = _Body(receive, self)
        try:
            self._check(scope)
            await self._app(scope, body.receive, watched)
        except ApiError as error:
            await error.response()(scope, receive, watched)
        finally:
            self.held -= body.size
            self._metrics.requests.add(1, getattr(scope.get("route"), "path", "other"), str(status))

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of those that come twice, the first counts
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
        if not length.isdigit() or len(length) > 18 or int(length) > self.limits.body_bytes:
            raise _too_large(self.limits)


class _Body:
    """A request's body as it arrives, cut off when it is too large, too slow, or one of too many."""

    def __init__(self, receive: Receive, guard: Guard) -> None:
        self._receive, self._guard = receive, guard
        self.size = 0
        self._whole = False
        self._deadline = time.monotonic() + guard.limits.body_seconds

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()  # that the client has gone: waited for as long as it takes
        try:
            message: Any = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise ApiError(408, "the body took too long to arrive", code="body_timeout") from None
        guard, limits, part = self._guard, self._guard.limits, len(message.get("body", b""))
        self.size += part
        guard.held += part
        self._whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self.size > limits.body_bytes:
            raise _too_large(limits)
        if self.size > _SMALL_BODY and guard.held > limits.bodies_bytes:
            raise ApiError(
                503, "too many large bodies at a time: try again", code="overloaded", headers={"Retry-After": "1"}
            )
        return message


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes:,} bytes", code="body_too_large")


def _host_name(value: bytes) -> str:
    text = value.decode("latin-1").strip().lower()
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()  # of one length, whatever the key's
