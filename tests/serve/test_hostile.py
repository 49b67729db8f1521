"""Requests that mean no good: generated from the schema, mutated from good ones, and bytes that are no HTTP."""

import contextlib
import copy
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gss.serve.about import Limits
from tests.serve.serving import SMALL, alone, app_of, lively_model, text_of

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")
import hypothesis
import pydantic
import schemathesis
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from gss.serve import schemas

LIMITS = Limits(body_bytes=50_000, prompt_tokens=2000, max_tokens=32, n=4, sequences=8, logprobs=5, stop=4, seconds=20)
GOLDEN = {"prompt": "golden", "max_tokens": 30, "temperature": 0}
MODEL = lively_model(**SMALL)
EXAMPLES, MALFORMED, RAW = 80, 1800, 200


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with app_of(MODEL, LIMITS, rows=16) as app:
        yield app


def check_golden(app: FastAPI) -> None:
    answer = TestClient(app).post("/v1/completions", json=GOLDEN)
    assert answer.json()["choices"][0]["text"] == text_of(alone(MODEL, "golden", 30))


# ---- from the schema


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_what_the_schema_allows_and_what_it_does_not(app: FastAPI, mode: schemathesis.GenerationMode) -> None:
    """No answer is a 5xx, every answer is one that the schema names and looks as it says, and bad data is refused."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/tokenize", "/v1/models/{model}"}
    # What the schema allows may still be beyond a limit of the server's, and a long bad request is refused unread.
    excluded = [schemathesis.checks.positive_data_acceptance]
    rejection = schema.config.checks.negative_data_rejection
    rejection.expected_statuses = [*rejection.expected_statuses, "413"]
    for operation in operations:

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            case.call_and_validate(excluded_checks=excluded, timeout=20)

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # a route without parameters has no bad ones
            run()


def test_the_golden_prompt_after_the_schemas(app: FastAPI) -> None:
    check_golden(app)


# ---- from good requests

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "some words", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "seed": 1}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stop": ["x", "y"], "logprobs": 2}),
    (
        "/v1/completions",
        {"prompt": [1, 2, 3], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/completions",
        {"prompt": [[1], [2, 3]], "max_tokens": 2, "echo": True, "logprobs": 1, "top_k": 3, "min_p": 0.1},
    ),
    ("/v1/tokenize", {"prompt": "naïve — 🙂"}),
    ("/v1/detokenize", {"tokens": [72, 105]}),
]
VALUES = [
    "null", "true", "false", "0", "-1", "1", "2147483648", "9223372036854775808", "1" + "0" * 30, "9" * 5000, "1e400",
    "-0.0", "1e308", "-1e308", "0.5", "NaN", "Infinity", "-Infinity", '""', '"x"', '"\\ud800"', '"\\udc00\\ud800"',
    '"\\u0000"', '"' + "x" * 3000 + '"', "[]", "[[]]", "[null]", "[[null]]", "{}", '{"a": 1}', "[-1]",
    "[1099511627776]",
    '["a", 1]', "[1, [2]]", "[1.5]", "[true]", "[" * 300 + "]" * 300, "[" * 5000, "[0" + ", 0" * 2500 + "]",
    '["\\udfff"]',
    '[""]', '{"include_usage": "yes"}', "01", "+1", "1_000", "0x10", "'x'", "undefined", "\ufeff1", "//", '"\\x41"',
]  # fmt: skip
TYPES = [
    "application/json", "application/json", "application/json", "application/json; charset=latin-1", "text/plain", "",
    "application/xml", "application/jsonx", "multipart/form-data", "application/json, text/html", "APPLICATION/JSON",
    "\x00",
]  # fmt: skip
PATHS = [
    "/v1/completions/", "/v1//completions", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/..%2f..%2fetc",
    "/v1/%2e%2e",
    "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/pyproject.toml", "/app.js/..", "/v1/models/" + "x" * 5000,
    "/v1/completions?x=%",
    "/metrics/../v1/models", "/\\..\\app.py", "/index.html%00.js", "/openapi.json/", "/v1/models?model=%ed%a0%bd",
]  # fmt: skip


def mutated(draw: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """A method, a path, a body and headers, wrong in one way or in several."""
    path, good = draw.choice(GOOD)
    kind = draw.randrange(6)
    method, headers = "POST", {"content-type": "application/json"}
    fields = {name: json.dumps(value) for name, value in copy.deepcopy(good).items()}
    if kind in (0, 1, 2):
        for _ in range(draw.randint(1, 2)):
            others = "stop n logprobs seed max_tokens temperature model repetition_penalty"
            names = [*fields, *others.split()]
            fields[draw.choice(names)] = draw.choice(VALUES)
        if draw.random() < 0.2:
            fields[draw.choice(["", "\\u0000", "__class__", "$ref", "prompt\\ud800", "x" * 500])] = draw.choice(VALUES)
    body = ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode(
        "utf-8", "surrogatepass"
    )
    if kind == 3:  # bytes
        content = bytearray(body)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(content) + 1)
            change = draw.randrange(4)
            if change == 0:
                content[place:place] = draw.randbytes(draw.randint(1, 4))
            elif change == 1:
                del content[place : place + draw.randint(1, 9)]
            elif change == 2:
                content[place:] = b""
            else:
                content[place:place] = content[:place]
        body = bytes(content)
    if kind == 4:  # where and how it is sent
        path = draw.choice([path, *PATHS])
        method = draw.choice(["POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"])
    if kind == 5 or draw.random() < 0.1:
        headers["content-type"] = draw.choice(TYPES).replace("\x00", "application/json\x7f")
        headers |= draw.choice(
            [{}, {"content-encoding": "gzip"}, {"authorization": "Bearer " + "x" * 999}, {"accept": "image/png"},
             {"x-forwarded-for": "1.2.3.4"}, {"expect": "100-continue"}, {"content-length": "99999999999999999999"},
             {"content-length": "-5"}, {"content-length": "x"}, {"host": ""}, {"range": "bytes=0-99999"}]
        )  # fmt: skip
    return method, path, body, headers


def test_malformed_requests(app: FastAPI) -> None:
    client = TestClient(app, raise_server_exceptions=False)
    draw = random.Random(0)
    statuses: dict[int, int] = {}
    for number in range(MALFORMED):
        method, path, body, headers = mutated(draw)
        started = time.monotonic()
        answer = client.request(method, path, content=body, headers=headers)
        said = f"{number}: {method} {path[:80]} {body[:200]!r} {headers} → {answer.status_code} {answer.text[:200]}"
        assert time.monotonic() - started < 30, said
        assert answer.status_code < 500, said
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        if answer.status_code >= 400 and method != "HEAD":
            assert answer.json()["error"]["message"], said
            assert "Traceback" not in answer.text, said
            assert "site-packages" not in answer.text, said
    assert statuses[400] > MALFORMED / 4  # most are what they are meant to be
    assert {404, 405, 413, 415} <= statuses.keys()
    check_golden(app)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [None] * 3000},
        {"prompt": [{}] * 3000},
        {"prompt": [[-1] * 3000]},
        {"prompt": [[-1]] * 3000},
        {"stop": [1] * 3000},
        {"tokens": [-1] * 3000},
        {str(number): 1 for number in range(3000)},
        {"stream_options": {str(number): 1 for number in range(3000)}},
    ],
    ids=lambda body: str(body)[:20],
)
def test_a_body_full_of_mistakes_has_few_errors(body: dict[str, Any]) -> None:
    """One for each of a million would take a minute, in which nobody else is answered."""
    kind = schemas.DetokenizeRequest if "tokens" in body else schemas.CompletionRequest
    with pytest.raises(pydantic.ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 4  # one for each thing that a prompt may be


# ---- no HTTP at all


@pytest.fixture
def port(app: FastAPI) -> Iterator[int]:
    """The app behind a real socket, as `gss serve` puts it there."""
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(30)


def raw(draw: random.Random) -> bytes:
    body = json.dumps(GOLDEN).encode()
    good = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return draw.choice(
        [
            draw.randbytes(draw.randint(1, 300)),
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
            good + b"X: " + b"y" * 70_000 + b"\r\n" + length + body,
            good + b"Content-Length: 5\r\n" + length + body,
            good + b"Content-Length: -1\r\n\r\n" + body,
            good + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
            good + b"Transfer-Encoding: chunked\r\n" + length + body,
            good + b"Transfer-Encoding: gzip\r\n\r\n" + body,
            good + length + body[:-5],
            (good + length + body)[: draw.randrange(1, 120)],
            good + length + body * 3,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        ]
    )


def test_bytes_that_are_no_requests(app: FastAPI, port: int) -> None:
    draw = random.Random(1)
    for _ in range(RAW):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            sent = raw(draw)
            try:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(65_536), b""))
            except ConnectionError:
                continue
            assert not answer.startswith(b"HTTP/1.1 5"), (sent[:200], answer[:200])
    check_golden(app)
