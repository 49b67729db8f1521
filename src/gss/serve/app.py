"""The HTTP interface: OpenAI's completions and models, tokenizing, facts about the model, health, metrics, the page."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute

from gss import __version__
from gss.serve import schemas
from gss.serve.about import Limits, describe
from gss.serve.completions import ActiveCompletion, Service, offloaded
from gss.serve.engine import EngineThread
from gss.serve.http import ApiError, Guard, answer_errors, to_json

PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(
    engine: EngineThread,
    *,
    name: str,
    preset: str | None = None,
    step: int = 0,
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """The app in front of an engine, which the caller starts and stops.

    name      the model's id for clients
    api_key   required by every route except health and the page; None: by none. White space around it is dropped
    hosts     names by which requests may address the server; None: any
    """
    limits = limits or Limits()
    if api_key is not None:
        api_key = api_key.strip()  # headers have none: a key read from a file, with its line end, would never match
        if not api_key:
            raise ValueError("the API key is empty: give one, or leave it out")
    app = FastAPI(
        title="gss",
        version=__version__,
        description="A language model built on Gated State Spaces, behind OpenAI's completions interface.",
        docs_url=None,  # it loads scripts from elsewhere
        redoc_url=None,
    )
    app.router.route_class = _JsonRoute
    answer_errors(app)
    pages = {f"/{path.relative_to(PAGE).as_posix()}": path for path in sorted(PAGE.rglob("*")) if path.is_file()}
    pages["/"] = PAGE / "index.html"
    free = {"/health", *pages}
    app.add_middleware(Guard, limits=limits, metrics=engine.metrics, api_key=api_key, open_paths=free, hosts=hosts)
    service = Service(engine, name, limits)
    _add_posts(app, service)
    _add_facts(app, service, describe(engine, limits, name=name, preset=preset, step=step))
    for address, path in pages.items():
        _add_page(app, address, path)
    return app


def _add_posts(app: FastAPI, service: Service) -> None:
    tokenizer = service.engine.tokenizer

    def post(path: str, answer: type, **content: Any) -> Callable[..., Any]:
        """A route whose function makes the response itself; the schema describes the response and the errors."""
        return app.post(path, response_model=None, responses={200: {"model": answer, **content}, **schemas.ERRORS})

    async def answer(body: schemas.CompletionRequest, request: Request, chat: bool) -> Response:
        completion = ActiveCompletion(body, service, chat)
        await completion.start()
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(completion.events(), media_type="text/event-stream", headers=headers)
        whole = await completion.whole(request)
        return Response(status_code=499) if whole is None else Response(whole, media_type="application/json")

    @post("/v1/completions", schemas.Completion, content={"text/event-stream": {}})
    async def completions(body: schemas.CompletionRequest, request: Request) -> Response:
        """Continue a prompt; see OpenAI's reference. With `stream`, chunks come as server-sent events."""
        return await answer(body, request, chat=False)

    @post("/v1/chat/completions", schemas.ChatCompletion, content={"text/event-stream": {}})
    async def chat(body: schemas.ChatRequest, request: Request) -> Response:
        """Continue a dialogue, written out in plain words: the model was not trained to follow instructions."""
        return await answer(body.completion(), request, chat=True)

    @post("/v1/tokenize", schemas.Tokens)
    async def tokenize(body: schemas.TokenizeRequest) -> Response:
        """The tokens of a text."""
        service.check_model(body.model)

        def work() -> bytes:
            ids = tokenizer.encode(body.prompt).tolist()
            service.check_length(len(ids))
            return to_json({"tokens": ids, "pieces": [service.surfaces[token] for token in ids], "count": len(ids)})

        return Response(await offloaded(len(body.prompt), work), media_type="application/json")

    @post("/v1/detokenize", schemas.Text)
    async def detokenize(body: schemas.DetokenizeRequest) -> Response:
        """The text of tokens."""
        service.check_model(body.model)
        if max(body.tokens, default=0) >= tokenizer.vocab_size:
            raise ApiError(400, "a token id is outside the vocabulary", param="tokens", code="invalid_value")
        return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})


def _add_facts(app: FastAPI, service: Service, facts: dict[str, Any]) -> None:
    engine = service.engine
    card = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "gss"}
    engine.metrics.state_bytes.set(facts["state"]["bytes_per_sequence"])

    @app.get("/v1/models", response_model=schemas.ModelList, responses=schemas.ERRORS)
    async def models() -> Any:
        """The models that are served: one."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}", response_model=schemas.ModelCard, responses=schemas.ERRORS)
    async def model(model: str) -> Any:
        """The model that is served."""
        service.check_model(model)
        return card

    @app.get("/v1/model", responses=schemas.ERRORS)
    async def about() -> dict[str, Any]:
        """What the model is: sizes, what a sequence costs, how long its layers remember, the server's limits."""
        return facts

    @app.get("/metrics", response_class=PlainTextResponse, responses=schemas.ERRORS)
    async def metrics() -> PlainTextResponse:
        """Counts, for Prometheus."""
        return PlainTextResponse(engine.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/health", responses={503: {"model": schemas.Health, "description": "The server is stopped."}})
    async def health() -> Response:
        """Whether the server works."""
        return JSONResponse({"status": "ok" if engine.alive else "stopped"}, 200 if engine.alive else 503)


def _add_page(app: FastAPI, address: str, path: Path) -> None:
    async def page() -> FileResponse:
        return FileResponse(path, headers=_PAGE_HEADERS)

    app.add_api_route(address, page, methods=["GET", "HEAD"], include_in_schema=False, response_class=FileResponse)


class _JsonRoute(APIRoute):
    """Accepts only strict JSON in UTF-8 as a body: no NaN, no half characters, no hundreds of nested levels."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if self.body_field is not None:
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(415, "send the body as application/json", code="unsupported_media_type")
                request = _JsonRequest(request.scope, request.receive)
            return await handle(request)

        return strict


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError:
            raise ApiError(400, "the body is not valid JSON", code="json_invalid") from None
