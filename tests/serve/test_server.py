"""`gss serve` as a process of its own, with the clients that people use."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gss
from tests.conftest import Command
from tests.making import call
from tests.serve.serving import Server, alone, lively_model, serving, text_of

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

KEY = "a key of the tests"


@pytest.fixture(scope="module")
def model() -> gss.LanguageModel:
    return lively_model()


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with serving(run, "--api-key", KEY) as server:
        yield server


def test_the_openai_client(server: Server, model: gss.LanguageModel) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    (card,) = client.models.list()
    assert card.id == client.models.retrieve("tiny").id == "tiny"
    expected = text_of(alone(model, "Hello", 40))
    options: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 40, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**options)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 40
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == answer.usage
    # A client that lags gets more text in an event; hundreds of tokens outlast any lag.
    long = {**options, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    assert sum(bool(chunk.choices) for chunk in client.completions.create(**long, stream=True)) > 3
    sampled = client.completions.create(model="tiny", prompt=["a", "b"], n=2, seed=3, extra_body={"top_k": 5})
    assert len(sampled.choices) == 4
    said = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5)
    assert said.choices[0].message.role == "assistant"
    assert said.usage is not None
    assert said.usage.completion_tokens <= 5
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(server: Server, model: gss.LanguageModel) -> None:
    def curl(body: dict[str, Any]) -> str:
        command = ["curl", "-sSN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json"]
        command += ["-H", f"Authorization: Bearer {KEY}", "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    body = {"prompt": "Hello", "max_tokens": 20, "temperature": 0}
    expected = text_of(alone(model, "Hello", 20))
    assert json.loads(curl(body))["choices"][0]["text"] == expected
    events = [line.removeprefix("data: ") for line in curl({**body, "stream": True}).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected


def ask(server: Server, **body: Any) -> http.client.HTTPConnection:
    """A completion of this body; without one, the metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    where = ("POST", "/v1/completions", json.dumps(body)) if body else ("GET", "/metrics", None)
    connection.request(*where, headers)
    return connection


def running(server: Server) -> float:
    page = ask(server).getresponse().read().decode()
    return float(page.partition("\ngss_running_sequences ")[2].split()[0])


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_forgotten(server: Server, stream: bool) -> None:
    connection = ask(server, prompt="x", max_tokens=4096, ignore_eos=True, stream=stream, n=8)
    if stream:
        connection.getresponse().readline()
    wait_for(lambda: running(server) == 8)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_for(lambda: running(server) == 0)


def test_sigterm_drains(run: Path, model: gss.LanguageModel) -> None:
    """What is running ends as it should, nothing new is taken, and the process leaves with status 0."""
    with serving(run, "--drain", "60") as server:
        response = ask(server, prompt="drain", max_tokens=600, temperature=0, stream=True).getresponse()
        first = response.readline()
        server.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
            except OSError:
                return True
            return False

        wait_for(refused)
        rest = response.read()
        events = (first + rest).decode().split("data: ")
        assert events[-1].strip() == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[1:-1])
        assert text == text_of(alone(model, "drain", 600))
        assert server.process.wait(60) == 0


def test_a_drain_does_not_wait_for_ever(run: Path) -> None:
    with serving(run, "--drain", "1", "--max-tokens", "1000000") as server:
        ask(server, prompt="x", max_tokens=10**6, ignore_eos=True, stream=True).getresponse().readline()
        started = time.monotonic()
        status, said = server.stop()
        assert time.monotonic() - started < 20
        assert status == 0
        assert "Traceback" not in said


def test_others_are_warned_of(run: Path, monkeypatch: pytest.MonkeyPatch, command_line: Command) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr("gss.serve.server.serve", lambda loaded, **options: served.append(options))
    warned = [
        "no API key is set" in " ".join(command_line("serve", run, *options)[2].split())
        for options in ((), ("--host", "0.0.0.0"), ("--host", "0.0.0.0", "--api-key", "x"), ("--host", "::1"))
    ]
    assert warned == [False, True, False, False]
    assert [options["api_key"] for options in served] == [None, None, "x", None]
    monkeypatch.setenv("GSS_API_KEY", "from the environment")
    call("serve", run)
    assert served[-1]["api_key"] == "from the environment"
    assert served[-1]["host"] == "127.0.0.1"


def test_brackets_in_a_path_are_no_markup(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr("gss.serve.server.serve", lambda loaded, **options: served.append(options))
    odd = tmp_path / "a[" / "b]"  # with [/b] in it, which would end a style
    odd.parent.mkdir()
    odd.symlink_to(run)
    call("serve", odd)
    assert served[-1]["name"] == "tiny"


def test_bad_calls(run: Path, server: Server, tmp_path: Path) -> None:
    for arguments, reason in (
        ((tmp_path,), "is not a run folder"),
        ((run, "--port", server.port), "cannot listen on 127.0.0.1"),
        ((run, "--api-key", " "), "the API key is empty"),
        ((run, "--max-seconds", 0), "must be over 0"),
        ((run, "--drain", "inf"), "the drain must be a number of seconds, not inf"),
        ((run, "--device", "foo"), "device cannot be 'foo'; choose from: auto, cpu, cuda"),
    ):
        with pytest.raises((ValueError, OSError), match=reason):
            call("serve", *arguments)
