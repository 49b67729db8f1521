"""Errors as OpenAI's clients expect them: a status, and a body that says what was wrong and nothing else."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_PHRASES = {
    400: "the request could not be read",
    404: "there is no such address",
    405: "this address does not answer to this method",
}


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
        self.body = error_body(status, message, code, param)


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: ApiError) -> JSONResponse:
    """The answer to a request that failed so."""
    return JSONResponse(error.body, error.status_code, error.headers)


def install(app: FastAPI) -> None:
    """Answer every kind of failure of an app in the same way."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def theirs(request: Request, error: HTTPException) -> JSONResponse:
        message = _PHRASES.get(error.status_code, "the request was refused")
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # Names of fields come back; values never do.
        place = ".".join(str(part)[:64] for part in first["loc"][1:4] if part not in ("str", "list[str]"))
        kind = first["type"]
        message = "the body is not valid JSON" if kind == "json_invalid" else str(first["msg"])[:300]
        if place and kind != "json_invalid":
            message = f"{place}: {message}"
        return JSONResponse(error_body(400, message, kind, place or None), 400)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, "the server failed; its log says why"), 500)
