"""The HTTP interface inside this process: what it answers, what it refuses and how."""

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

import gss
from gss.data import load_tokenizer
from gss.data.tokenizer import ByteTokenizer
from gss.generate import Sampling, StopStrings, generate
from gss.nn.quantized import quantize
from gss.serve.about import Limits
from gss.serve.engine import EngineThread
from gss.serve.metrics import Number
from tests.serve.serving import alone, app_of, lively_model, text_of

pytest.importorskip("fastapi")
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from gss.serve.app import PAGE
from gss.serve.completions import Surfaces
from gss.serve.schemas import ChatRequest

LIMITS = Limits(
    body_bytes=20_000, prompt_tokens=600, max_tokens=100, n=4, sequences=6, logprobs=5, stop=2, stop_characters=8
)


@pytest.fixture(scope="module")
def client(model: gss.LanguageModel) -> Iterator[TestClient]:
    with app_of(model, LIMITS, preset="gss-tiny", step=3) as app:
        yield TestClient(app, raise_server_exceptions=False)


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/completions", json={"temperature": 0, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def refused(client: TestClient, status: int, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_completion(client: TestClient, model: gss.LanguageModel) -> None:
    answer = complete(client, prompt="Hello", max_tokens=20, model="tiny")
    (choice,) = answer["choices"]
    expected = alone(model, "Hello", 20)
    assert choice == {"index": 0, "text": text_of(expected), "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26}
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"


def test_a_text_ends_with_its_document(client: TestClient, model: gss.LanguageModel, monkeypatch: Any) -> None:
    expected = alone(model, "Hello", 30)
    monkeypatch.setattr(ByteTokenizer, "eos_id", expected[9])
    ended = expected[: expected.index(expected[9])]
    for ignored, tokens, reason in ((False, ended, "stop"), (True, expected, "length")):
        (choice,) = complete(client, prompt=[256, *b"Hello"], max_tokens=30, ignore_eos=ignored)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text_of(tokens), reason)


def test_defaults_are_openais(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    nothing = dict.fromkeys(("max_tokens", "temperature", "n", "stop", "echo", "stream", "logit_bias", "suffix"))
    assert client.post("/v1/completions", json={"prompt": "a", **nothing}).status_code == 200


def test_defaults_are_within_the_limits(model: gss.LanguageModel) -> None:
    with app_of(model, Limits(max_tokens=10)) as app:
        client = TestClient(app)
        answer = client.post("/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == 10
        messages = [{"role": "user", "content": "Hello"}]
        assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200


def test_prompts_of_every_kind(client: TestClient, model: gss.LanguageModel) -> None:
    texts = ["Hello", "", "naïve — 🙂"]
    expected = [text_of(alone(model, text, 8)) for text in texts]
    ids = [[256, *text.encode()] for text in texts]
    assert [choice["text"] for choice in complete(client, prompt=texts, max_tokens=8)["choices"]] == expected
    assert [choice["text"] for choice in complete(client, prompt=ids, max_tokens=8)["choices"]] == expected
    assert complete(client, prompt=ids[0], max_tokens=8)["choices"][0]["text"] == expected[0]
    assert complete(client, max_tokens=8)["choices"][0]["text"] == expected[1]


def test_several_continuations_and_seeds(client: TestClient, model: gss.LanguageModel) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 12}
    first, second = complete(client, **body), complete(client, **body)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    sampling = Sampling(temperature=0.9, top_p=0.95)
    tokenizer = load_tokenizer("bytes")
    assert texts == [
        generate(model, tokenizer, prompt, max_tokens=12, sampling=sampling, seed=11 + number)
        for number, prompt in enumerate(["a", "a", "b", "b"])
    ]
    different = {complete(client, prompt="a", temperature=1, max_tokens=20)["choices"][0]["text"] for _ in range(4)}
    assert len(different) > 1


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_is_the_answer_in_pieces(client: TestClient, echo: bool) -> None:
    body = {"prompt": ["naïve", "x"], "max_tokens": 30, "logprobs": 2, "n": 2, "echo": echo, "seed": 5}
    body |= {"temperature": 0.8}
    whole = complete(client, **body)
    chunks = streamed(client, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"]
        assert not any(piece["finish_reason"] for piece in pieces[:-1])
        for key, values in choice["logprobs"].items():
            came = [value for piece in pieces for value in piece["logprobs"][key]]
            if key == "top_logprobs":
                assert [list(top or ()) for top in came] == [list(top or ()) for top in values]
            else:
                assert came == (pytest.approx(values, abs=1e-4) if key == "token_logprobs" else values)


def test_scores(client: TestClient) -> None:
    prompt = "Hi — you"
    answer = complete(client, prompt=prompt, max_tokens=10, logprobs=3, echo=True, ignore_eos=True)
    (choice,) = answer["choices"]
    assert choice["text"].startswith(prompt)
    scores = choice["logprobs"]
    size = len(prompt.encode())
    assert {len(values) for values in scores.values()} == {size + 10}
    assert scores["tokens"][:6] == ["H", "i", " ", "bytes:\\xe2", "bytes:\\x80", "bytes:\\x94"]
    assert scores["text_offset"][: size + 1] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8]
    assert all(value <= 0 for value in scores["token_logprobs"])
    for token, own, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert len(top) == 3
        assert own <= max(top.values()) + 1e-6
        assert token not in top or math.isclose(top[token], own)
    only = complete(client, prompt=prompt, max_tokens=0, logprobs=3, echo=True)
    assert only["choices"][0]["text"] == prompt
    assert only["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(scores["token_logprobs"][:size], abs=1e-4)
    ids = complete(client, prompt=[72, 105], max_tokens=0, logprobs=1, echo=True)["choices"][0]["logprobs"]
    assert ids["token_logprobs"][0] is None
    assert ids["top_logprobs"][0] is None


def test_of_tokens_that_look_the_same_the_likeliest_counts() -> None:
    names = Surfaces(load_tokenizer("bytes"))
    names[200] = "a"
    assert names.likeliest([(97, -0.1), (98, -1.0), (200, -9.0)]) == {"a": -0.1, "b": -1.0}


def test_scores_of_a_prompt_with_several_continuations(client: TestClient) -> None:
    """The prompt's scores stand before each continuation's own, and are made once."""
    options = {"prompt": [[72, 105], [33]], "max_tokens": 3, "logprobs": 2, "echo": True, "temperature": 1, "seed": 5}
    choices = complete(client, **options, n=2, ignore_eos=True)["choices"]
    assert [choice["logprobs"]["token_ids"][:-3] for choice in choices] == [[72, 105]] * 2 + [[33]] * 2
    for choice in choices:
        assert {len(values) for values in choice["logprobs"].values()} == {len(choice["logprobs"]["tokens"])}
    first, second = (choice["logprobs"] for choice in choices[:2])
    assert first["top_logprobs"][:2] == second["top_logprobs"][:2]
    assert first["token_ids"] != second["token_ids"]


def test_stops(client: TestClient, model: gss.LanguageModel) -> None:
    text = text_of(alone(model, "stop", 60))
    mark = text[12:14]
    (choice,) = complete(client, prompt="stop", max_tokens=60, stop=mark, logprobs=0)["choices"]
    assert choice["text"] == text[: text.index(mark)]
    assert choice["finish_reason"] == "stop"
    assert max(choice["logprobs"]["text_offset"]) < len(choice["text"])


@pytest.mark.parametrize(
    ("status", "param", "body"),
    [
        (400, "n", {"n": 5}),
        (400, "prompt", {"prompt": ["a"] * 4, "n": 2}),
        (400, "prompt", {"prompt": ["a"] * 7}),
        (400, "max_tokens", {"max_tokens": 101}),
        (400, "max_tokens", {"max_tokens": 0}),
        (400, "max_tokens", {"max_tokens": -1}),
        (400, "logprobs", {"logprobs": 6}),
        (400, "stop", {"stop": ["a", "b", "c"]}),
        (400, "stop", {"stop": "a stop string that is long"}),
        (400, "stop", {"stop": [""]}),
        (400, "prompt", {"prompt": "x" * 600}),
        (400, "prompt", {"prompt": [1] * 601}),
        (400, "prompt", {"prompt": [1] * 301, "n": 2, "echo": True, "logprobs": 0}),
        (400, "prompt", {"prompt": [[1] * 301, [2] * 300], "echo": True, "logprobs": 0}),
        (400, "prompt", {"prompt": []}),
        (400, "prompt", {"prompt": [[]]}),
        (400, "prompt", {"prompt": [257]}),
        (400, "temperature", {"temperature": -0.5}),
        (400, "temperature", {"temperature": "hot"}),
        (400, "top_p", {"top_p": 0}),
        (400, "top_k", {"top_k": 0}),
        (400, "seed", {"seed": 2**63}),
        (400, "best_of", {"best_of": 3}),
        (400, "presence_penalty", {"presence_penalty": 0.5}),
        (400, "suffix", {"suffix": "x"}),
        (400, "logit_bias", {"logit_bias": {"5": 1}}),
        (400, "stream_options", {"stream_options": {"include_usage": True}}),
        (400, "unknown", {"unknown": 1}),
        (404, "model", {"model": "another"}),
        (413, None, {"prompt": "x" * 20_000}),
    ],
)
def test_limits(client: TestClient, status: int, param: str | None, body: dict[str, Any]) -> None:
    error = refused(client, status, **body)
    assert (error["param"] or "").split(".")[0] == (param or "")


def test_what_is_not_supported_says_so(client: TestClient) -> None:
    error = refused(client, 400, frequency_penalty=0.5)
    assert error["message"] == "frequency_penalty is not supported: leave it out, or use repetition_penalty"
    complete(client, frequency_penalty=0, presence_penalty=0.0)
    assert refused(client, 400, frobnicate=1)["message"] == "frobnicate: not known here: leave it out"


def test_a_chat(client: TestClient, model: gss.LanguageModel) -> None:
    """A dialogue in plain words, continued up to where somebody else would speak; whole and as a stream."""
    turns = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."), ("user", "How are you?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 30}
    answer = client.post("/v1/chat/completions", json=body).json()
    prompt = "Be brief.\n\nUser: Hello\n\nAssistant: Hi.\n\nUser: How are you?\n\nAssistant:"
    stop = ["\nUser:"]
    text = complete(client, prompt=prompt, max_tokens=30, stop=stop)["choices"][0]["text"]
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text.lstrip()}
    assert (answer["object"], choice["finish_reason"]) == ("chat.completion", "length")
    events = client.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == text.lstrip()
    first = next(place for place, delta in enumerate(deltas) if delta["content"])
    assert [place for place, delta in enumerate(deltas) if "role" in delta] == list(range(first + 1))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for wrong in ({"messages": []}, {"messages": [{"role": "cat", "content": "x"}]}, {"tools": []}):
        assert client.post("/v1/chat/completions", json={**body, **wrong}).status_code == 400
    most = [chr(0x4E00 + place) for place in range(LIMITS.stop)]
    assert client.post("/v1/chat/completions", json={**body, "stop": most}).status_code == 200
    # What clients send unasked: parts of text, and penalties of nothing.
    parts = [{**turn, "content": [{"type": "text", "text": part} for part in turn["content"]]} for turn in messages]
    plain = {**body, "messages": parts, "frequency_penalty": 0, "presence_penalty": 0.0}
    assert client.post("/v1/chat/completions", json=plain).json()["choices"] == answer["choices"]
    picture = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}
    asked = {"penalty": {"frequency_penalty": 1}, "logit_bias": {"logit_bias": {"5": 1}}, "'text'": picture}
    for said, wrong in asked.items():
        refused = client.post("/v1/chat/completions", json={**body, **wrong})
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]
    short = client.post("/v1/chat/completions", json={**body, "stop": text[2:4], "n": 2}).json()["choices"]
    assert [(each["message"]["content"], each["finish_reason"]) for each in short] == [(text[:2].lstrip(), "stop")] * 2


def test_an_answer_in_a_chat_ends_before_the_next_turn() -> None:
    """Without the empty line there: what a client sends back as a turn stands in the template as it was written."""
    turns = [{"role": "user", "content": "Hello"}]
    first = ChatRequest(messages=turns).completion()
    said = "Hi.\n\nUser: And you?"
    answer = StopStrings(first.stop).push(" " + said).lstrip()
    assert answer == "Hi."
    assert StopStrings(first.stop).push("Hi.\nUser: And you?") == "Hi."
    turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And you?"}]
    assert ChatRequest(messages=turns).completion().prompt == f"{first.prompt} {said}\n\nAssistant:"


def test_a_state_to_start_from(model: gss.LanguageModel) -> None:
    """Every prompt continues what the state has read, from the cache too; an empty one begins a document after it."""
    started = copy.deepcopy(model)
    lm = gss.LM(model, load_tokenizer("bytes"))
    book = lm.read("A book that was read before. ")
    started.start_from(book)
    with app_of(started) as app, TestClient(app) as client:
        expected = lm.generate("Hello", state=book, max_tokens=12, temperature=0)
        for _ in range(2):
            answer = complete(client, prompt="Hello", max_tokens=12)
            assert answer["choices"][0]["text"] == expected
            assert answer["usage"]["prompt_tokens"] == 5
        echoed = complete(client, prompt="Hello", max_tokens=0, echo=True, logprobs=0)["choices"][0]
        assert echoed["logprobs"]["tokens"] == list("Hello")
        assert complete(client, prompt="", max_tokens=4)["usage"]["prompt_tokens"] == 1


def test_bodies_that_are_none(client: TestClient) -> None:
    as_json = {"content-type": "application/json"}
    for content in (
        b"",
        b"{",
        b"[1",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\x00",
        b"1",
    ):
        answer = client.post("/v1/completions", content=content, headers=as_json)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "invalid_request_error"
    deep = b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}"
    assert client.post("/v1/completions", content=deep, headers=as_json).status_code == 400
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert answer.status_code == 415, kind

    def chunks() -> Iterator[bytes]:  # no Content-Length: counted as it comes
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"x" * 1000

    assert client.post("/v1/completions", content=chunks(), headers=as_json).status_code == 413


def test_errors_say_nothing_of_values_or_places(client: TestClient) -> None:
    secret = "a secret that must not come back"
    for body in ({"prompt": {"x": secret}}, {"temperature": secret}, {"stop": [1, secret]}, {"model": secret}):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code in (400, 404)
        assert secret not in answer.text
        assert "/" not in answer.text.replace("/v1/models", "")
    assert client.get("/no/such/place").json()["error"]["message"] == "there is no such address"
    assert client.post("/v1/models").status_code == 405


def test_models(client: TestClient) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models/tiny").json() == card
    assert card["id"] == "tiny"
    assert client.get("/v1/models/another").status_code == 404


def test_a_name_with_a_slash(model: gss.LanguageModel) -> None:
    with app_of(model, name="group/tiny") as app:
        client = TestClient(app)
        assert client.get("/v1/models/group/tiny").json()["id"] == "group/tiny"


def test_tokens(client: TestClient) -> None:
    answer = client.post("/v1/tokenize", json={"prompt": "é!"}).json()
    assert answer == {"tokens": [0xC3, 0xA9, 33], "pieces": ["bytes:\\xc3", "bytes:\\xa9", "!"], "count": 3}
    assert client.post("/v1/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "é!"}
    assert client.post("/v1/detokenize", json={"tokens": [999]}).status_code == 400
    assert client.post("/v1/detokenize", json={"tokens": [-1]}).status_code == 400


def test_what_the_model_is(client: TestClient, model: gss.LanguageModel) -> None:
    facts = client.get("/v1/model").json()
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["state"] == {"bounded": True, "bytes_per_sequence": 8 + 2 * 4 * 4 * 2 * 4, "bytes_per_token": 0}
    assert facts["transformer"]["kv_cache_bytes_per_token"] == 2 * 2 * 16 * 4
    layers = facts["time_constants"]["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    for layer in layers:
        assert sum(layer["histogram"]) == layer["modes"] == 4
        assert len(layer["histogram"]) == len(facts["time_constants"]["edges"]) - 1
        levels = list(layer["quantiles"].values())
        assert levels == sorted(levels)
    assert facts["limits"]["n"] == 4
    assert facts["preset"] == "gss-tiny"
    packed = copy.deepcopy(model)
    quantize(packed, "bf16")
    with app_of(packed) as app:
        assert TestClient(app).get("/v1/model").json()["parameters"] == facts["parameters"]


def test_a_transformers_state_grows() -> None:
    model = lively_model("transformer-tiny", width=16, depth=2, feedforward_width=24, **{"attention.heads": 2})
    with app_of(model) as app:
        facts = TestClient(app).get("/v1/model").json()
    assert not facts["state"]["bounded"]
    assert facts["state"]["bytes_per_token"] == facts["transformer"]["kv_cache_bytes_per_token"] == 2 * 2 * 16 * 4
    assert facts["time_constants"]["layers"] == []


def test_metrics(client: TestClient) -> None:
    def read() -> dict[str, float]:
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = read()
    complete(client, prompt="count me", max_tokens=10, ignore_eos=True)
    after = read()
    assert after["gss_generated_tokens_total"] - before["gss_generated_tokens_total"] == 10
    assert after["gss_prompt_tokens_total"] - before["gss_prompt_tokens_total"] == 9
    completed = 'gss_requests_total{route="/v1/completions",status="200"}'
    assert after[completed] - before.get(completed, 0) == 1
    assert after['gss_step_seconds_bucket{le="+Inf"}'] == after["gss_step_seconds_count"]


def test_counts_are_exact() -> None:
    counter = Number("counter", "requests", "Requests.", ("route",))
    counter.add(1_234_567, "/v1/completions")
    assert list(counter.lines())[-1] == 'requests{route="/v1/completions"} 1234567'


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        for method in sorted(getattr(route, "methods", ["GET"])):
            yield method, getattr(route, "path", "").replace("{model}", "tiny")


def test_every_route_asks_for_the_key(model: gss.LanguageModel) -> None:
    page = {"/", *(f"/{path.relative_to(PAGE).as_posix()}" for path in PAGE.rglob("*") if path.is_file())}
    with app_of(model, api_key="the key") as app:
        client = TestClient(app)
        asked = list(routes(app))
        assert any(isinstance(route, APIRoute) for route in app.routes)
        assert {"/v1/completions", "/v1/models", "/v1/model", "/v1/tokenize", "/metrics", "/openapi.json"} <= {
            path for _, path in asked
        }
        for method, path in [*asked, ("GET", "/no/such/place"), ("GET", "/health/")]:
            wrong = (
                {},
                {"authorization": "Bearer another key"},
                {"authorization": "the key"},
                {"authorization": b"Bearer \xe9"},
            )
            statuses = {client.request(method, path, headers=headers).status_code for headers in wrong}
            if path == "/health" or path in page:
                assert statuses == {200}, path
            else:
                assert statuses == {401}, path
                answer = client.request(method, path, headers={"authorization": "Bearer the key"})
                assert answer.status_code != 401
        error = client.get("/v1/models")
        assert error.json()["error"]["code"] == "invalid_api_key"
        assert error.headers["www-authenticate"] == "Bearer"


def test_other_host_names_are_refused(model: gss.LanguageModel) -> None:
    """Without a key, a page that resolves its own name to this machine gets nothing."""
    with app_of(model, hosts={"127.0.0.1", "localhost", "[::1]"}) as app:
        client = TestClient(app)
        for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example:8000"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 403, host


def test_a_key_has_no_white_space_around_it(model: gss.LanguageModel) -> None:
    with app_of(model, api_key=" the key\n") as app:
        assert TestClient(app).get("/v1/models", headers={"authorization": "Bearer the key"}).status_code == 200
        assert TestClient(app).get("/v1/models", headers={"authorization": "Bearer "}).status_code == 401
    with pytest.raises(ValueError, match="API key is empty"), app_of(model, api_key="\n"):
        pass


def test_a_full_queue(model: gss.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with app_of(model, Limits(queue=0), rows=2) as app:
        monkeypatch.setattr(EngineThread, "outstanding", 1)
        error = refused(TestClient(app), 429, prompt=["a", "b"])
        assert error["code"] == "queue_full"
        monkeypatch.undo()
        assert complete(TestClient(app), prompt=["a", "b"])["usage"]["prompt_tokens"] == 4
        error = refused(TestClient(app), 400, prompt=["a", "b", "c"])  # never: there is no use in trying again
        assert "3 continuations in one request is more than the 2 that are allowed" in error["message"]
        assert TestClient(app).get("/v1/model").json()["limits"]["sequences"] == 2
        assert refused(TestClient(app), 400, prompt="a", n=3)["param"] == "n"


def test_time_is_limited(model: gss.LanguageModel) -> None:
    with app_of(model, Limits(seconds=0.3, max_tokens=10**6)) as app:
        client = TestClient(app)
        body = {"prompt": "x", "max_tokens": 10**6, "ignore_eos": True}
        assert refused(client, 408, **body)["code"] == "request_timeout"
        answer = client.post("/v1/completions", json={**body, "stream": True})
        assert json.loads(answer.text.split("data: ")[-1])["error"]["code"] == "request_timeout"


def test_the_page(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert client.get("/../app.py").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}
