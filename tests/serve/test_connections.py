"""Clients that are silent, slow, many or do not read: each is bounded, and others are served meanwhile."""

import asyncio
import contextlib
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gss
from gss.serve.about import Limits
from tests.serve.serving import app_of, engine_of, serving

pytest.importorskip("fastapi")
from gss.serve import completions
from gss.serve.app import create_app
from gss.serve.server import HttpServer, listening


@contextmanager
def served(model: gss.LanguageModel, **limits: Any) -> Iterator[tuple[int, HttpServer]]:
    """A server in this process, as `gss serve` sets it up: its port and itself."""
    bounds = Limits(**limits)
    with engine_of(model) as engine, listening("127.0.0.1", 0) as listener:
        server = HttpServer(create_app(engine, name="tiny", limits=bounds), engine, bounds)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        yield listener.getsockname()[1], server
        server.should_exit = server.force_exit = True
        thread.join(30)


def connect(port: int, send: bytes = b"") -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", port))
    connection.sendall(send)
    return connection


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, once all that was sent is read."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return True


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


def healthy(port: int) -> bool:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    client.request("GET", "/health")
    return client.getresponse().status == 200


def test_answers_on_a_kept_connection_are_not_delayed(model: gss.LanguageModel) -> None:
    with served(model) as (port, _):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            client.request("GET", "/health")
            client.getresponse().read()
            times.append(time.perf_counter() - started)
    assert statistics.median(times[1:]) < 0.02  # 0.04 and more where small answers wait for an acknowledgement


def test_silent_and_dribbling_connections_are_closed(model: gss.LanguageModel) -> None:
    with served(model, header_seconds=0.4) as (port, server):
        silent, dribbling = connect(port), connect(port, b"GET /health HTTP/1.1\r\n")
        again = connect(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 8:
                dribbling.sendall(b"X: y\r\n")
                again.sendall(b"G" if time.monotonic() - started < 0.1 else b"")
                time.sleep(0.05)
        assert time.monotonic() - started < 8
        assert is_closed(silent)
        assert is_closed(again)
        assert eventually(lambda: not server.connections.idle)


def test_a_request_under_way_is_not_idle(model: gss.LanguageModel) -> None:
    with served(model, header_seconds=0.2) as (port, _):
        asked = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}
        connection = connect(port, request("/v1/completions", asked))
        answer = b""
        while b"[DONE]" not in answer:
            answer += connection.recv(65_536)
        assert b"200 OK" in answer


def test_silent_connections_make_room_for_new_ones(model: gss.LanguageModel) -> None:
    with served(model, connections=20) as (port, server):
        silent = [connect(port) for _ in range(60)]
        assert all(healthy(port) for _ in range(3))
        assert eventually(lambda: len(server.server_state.connections) <= 20)
        assert sum(is_closed(connection) for connection in silent[:30]) == 30


def test_connections_fit_the_descriptors(run: Path) -> None:
    script = (
        "import resource, sys; from gss.serve.server import usable_connections as usable, RESERVE\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))\n"
        "assert usable(100) == 100 and usable(2048) == 1024 - RESERVE, usable(2048)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    with serving(run, descriptors=400) as server:
        silent = [connect(server.port) for _ in range(600)]
        assert healthy(server.port)
        for connection in silent:
            connection.close()
        status, said = server.stop()
    assert status == 0
    assert len(said) < 1000, said


def test_who_does_not_read_is_closed(model: gss.LanguageModel) -> None:
    with served(model, send_seconds=0.5) as (port, server):
        connection = connect(port, request("/v1/tokenize", {"prompt": "word " * 20_000}))
        assert eventually(lambda: bool(server.connections.stalled))
        assert healthy(port)
        assert eventually(lambda: not server.server_state.connections)
        connection.close()


def test_what_waits_to_be_read_is_bounded_in_all(model: gss.LanguageModel) -> None:
    with served(model, unread_bytes=3 << 20) as (port, server):
        asked = request("/v1/tokenize", {"prompt": "word " * 25_000})
        silent = [connect(port, asked) for _ in range(12)]
        assert eventually(lambda: server.server_state.total_requests == 12, 30)
        assert eventually(lambda: 0 < len(server.server_state.connections) < 12)
        waiting = sum(each.transport.get_write_buffer_size() for each in list(server.connections.stalled))
        assert 0 < waiting <= 3 << 20
        for connection in silent:
            connection.close()


def test_what_bodies_hold_is_bounded_in_all(model: gss.LanguageModel) -> None:
    with served(model, bodies_bytes=1 << 20) as (port, _):
        large = b" " * (1 << 19)
        head = request("/v1/tokenize", {"prompt": "x"}).partition(b"\r\n\r\n")[0].rpartition(b" ")[0]
        start = head + b" %d\r\n\r\n" % (len(large) + 1) + large  # without its last byte
        waiting = [connect(port, start) for _ in range(2)]
        time.sleep(0.3)
        refused = connect(port, start)
        assert refused.recv(65_536).startswith(b"HTTP/1.1 503")
        assert connect(port, request("/v1/tokenize", {"prompt": "x"})).recv(65_536).startswith(b"HTTP/1.1 200")
        for connection in (*waiting, refused):
            connection.close()
        time.sleep(0.3)
        body = request("/v1/tokenize", {"prompt": "x" * (1 << 17)})
        assert connect(port, body).recv(65_536).startswith(b"HTTP/1.1 200")


Message = dict[str, Any]


async def post(app: Any, asked: Message, send: Callable[[Message], Awaitable[None]]) -> None:
    """A request for a completion, without a network: the app is given what it sends by `send`."""
    body = json.dumps(asked).encode()
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return received.pop() if received else await asyncio.sleep(60) or {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await app(scope, receive, send)


def test_nothing_is_produced_for_who_does_not_read(model: gss.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_UNREAD", 3)
    asked = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 4}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def ask(app: Any) -> None:
        task = asyncio.create_task(post(app, asked, send))
        idle = 0
        for _ in range(1000):  # until the engine has produced something and stood idle for a while
            await asyncio.sleep(0.01)
            idle = idle + 1 if engine.metrics.generated_tokens.value and not engine.metrics.running.value else 0
            if idle == 20:
                break
        assert not engine.metrics.running.value
        task.cancel()

    with engine_of(model) as engine:
        asyncio.run(ask(create_app(engine, name="tiny")))
        assert 0 < engine.metrics.generated_tokens.value < 8000


def test_who_lags_gets_more_text_at_a_time(model: gss.LanguageModel) -> None:
    """A stream of two continuations whose first event is read only when the others have come."""
    asked = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 2, "seed": 3, "logprobs": 1}
    events: list[Message] = []

    async def send(message: Message) -> None:
        content = message.get("body", b"").removeprefix(b"data: ").strip()
        if content and content != b"[DONE]":
            events.append(json.loads(content))
            for _ in range(1000 if len(events) == 1 else 0):
                await asyncio.sleep(0.01)
                if not engine.outstanding:
                    break

    with engine_of(model, interval=0) as engine:
        asyncio.run(post(create_app(engine, name="tiny"), asked, send))
        streamed, events[:] = [event["choices"] for event in events], []
        asyncio.run(post(create_app(engine, name="tiny"), {**asked, "stream": False}, send))
    assert len(streamed) <= 4  # with one event per step and continuation, 400
    for whole in events[0]["choices"]:
        own = [choice for choices in streamed for choice in choices if choice["index"] == whole["index"]]
        assert "".join(choice["text"] for choice in own) == whole["text"]
        tokens = [token for choice in own for token in choice["logprobs"]["token_ids"]]
        assert tokens == whole["logprobs"]["token_ids"]
        assert own[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_what_scores_hold_is_bounded_in_all(model: gss.LanguageModel) -> None:
    """64 requests of 100 bytes for 86,016 log-probabilities each would hold 1 GB, read or not."""
    asked = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "logprobs": 3}
    with served(model, all_scores=40_000, scores=20_000, send_seconds=1) as (port, _):
        waiting = [connect(port, request("/v1/completions", {**asked, "stream": stream})) for stream in (True, False)]
        assert waiting[0].recv(12) == b"HTTP/1.1 200"
        third, refused = connect(port, request("/v1/completions", asked)), b""
        while b"}}" not in refused:  # headers and body may come apart
            refused += third.recv(65_536)
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"log-probabilities are in progress" in refused
        few = connect(port, request("/v1/completions", {**asked, "max_tokens": 4}))
        assert few.recv(65_536).startswith(b"HTTP/1.1 200")
        waiting[0].close()

        def is_let_in() -> bool:
            waiting.append(connect(port, request("/v1/completions", asked)))
            return waiting[-1].recv(12) == b"HTTP/1.1 200"

        assert eventually(is_let_in, 60)
        for connection in waiting:
            connection.close()


def test_the_largest_answer_holds_nobody_up(model: gss.LanguageModel) -> None:
    """The event loop's own time between two beats of a clock: over 2 s where answers of any size were allowed."""
    most = Limits().scores // 21
    body = json.dumps({"prompt": [7] * most, "max_tokens": 0, "echo": True, "logprobs": 20}).encode()
    sent = bytearray()

    async def ask(app: Any) -> float:
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return received.pop() if received else await asyncio.sleep(600) or {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.extend(message.get("body", b""))

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        task = asyncio.create_task(app(scope, receive, send))
        longest, last = 0.0, time.thread_time()
        while not task.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
        await task
        return longest

    with engine_of(model) as engine:
        longest = asyncio.run(ask(create_app(engine, name="tiny")))
    assert len(json.loads(sent)["choices"][0]["logprobs"]["top_logprobs"]) == most
    assert longest < 0.12


def test_answers_too_large_are_refused(model: gss.LanguageModel) -> None:
    from starlette.testclient import TestClient

    with app_of(model, Limits(prompt_tokens=1000, scores=5000)) as app:
        client = TestClient(app)
        for path, param, body in (
            ("/v1/tokenize", "prompt", {"prompt": "x" * 1001}),
            ("/v1/completions", "logprobs", {"prompt": "x", "max_tokens": 80, "n": 4, "logprobs": 20}),
            ("/v1/completions", "logprobs", {"prompt": "x" * 900, "max_tokens": 0, "echo": True, "logprobs": 5}),
            ("/v1/completions", "repetition_penalty", {"prompt": "x", "repetition_penalty": 1e-308}),
        ):
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        body = {"prompt": "x" * 900, "max_tokens": 0, "echo": True, "logprobs": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/tokenize", json={"prompt": "x" * 1000}).json()["count"] == 1000
