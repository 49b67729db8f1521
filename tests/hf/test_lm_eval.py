"""lm-eval on our models: tasks made here, with log-likelihoods that a plain forward gives as well."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gss
from gss.data import load_tokenizer
from gss.generate import Sampling, generate
from tests.conftest import ALL_FAMILIES, small_config

lm_eval = pytest.importorskip("lm_eval")
adapter = pytest.importorskip("gss.lm_eval")

DOCUMENTS = [
    {"text": "the quick brown fox", "question": "the quick", "choices": [" brown", " fox", "é"], "answer": 0},
    {"text": "naïve 🙂 text\n\nof two parts", "question": "naïve", "choices": [" 🙂", " x", "yz"], "answer": 2},
    {"text": "a", "question": "", "choices": ["a", "bc", "def"], "answer": 1},
]


def dataset(**kwargs: Any) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(DOCUMENTS)}


def task(name: str, **settings: Any) -> Any:
    from lm_eval.api.task import ConfigurableTask

    common = {"task": name, "custom_dataset": dataset, "test_split": "test", "doc_to_text": "{{question}}"}
    return ConfigurableTask(config={**common, **settings})


def plain(model: gss.LanguageModel, context: str, continuation: str) -> tuple[float, bool]:
    """The log-probability of a continuation by one whole forward over bytes."""
    before, after = ([256, *context.encode()], list(continuation.encode()))
    logs = model(torch.tensor([before + after]))[0][0].double().log_softmax(-1)[len(before) - 1 : -1]
    likeliest = logs.argmax(-1).tolist() == after
    return sum(logs[index, token].item() for index, token in enumerate(after)), likeliest


@pytest.fixture
def model() -> gss.LanguageModel:
    return gss.build_model(small_config("gss-hybrid", vocab_size=257, **{"attention.chunk": 8})).eval()


def test_a_local_task_from_a_run(run: Path) -> None:
    model = gss.load(run).model
    tasks = [
        task(
            "choice",
            output_type="multiple_choice",
            doc_to_choice="choices",
            doc_to_target="answer",
            target_delimiter="",
        ),
        task("rolling", output_type="loglikelihood_rolling", doc_to_target="{{text}}"),
        task(
            "writing",
            output_type="generate_until",
            doc_to_target="{{text}}",
            generation_kwargs={"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        ),
    ]
    found = lm_eval.simple_evaluate(
        model="gss", model_args={"run": str(run), "piece": 5}, tasks=tasks, batch_size=2, bootstrap_iters=0
    )
    right = 0
    for sample, document in zip(found["samples"]["choice"], DOCUMENTS, strict=True):
        expected = [plain(model, document["question"], choice)[0] for choice in document["choices"]]
        scores = [response[0][0] for response in sample["resps"]]
        assert scores == pytest.approx(expected, abs=1e-4)
        right += max(range(3), key=expected.__getitem__) == document["answer"]
    assert found["results"]["choice"]["acc,none"] == pytest.approx(right / 3)
    nats = -sum(plain(model, "", document["text"])[0] for document in DOCUMENTS)
    size = sum(len(document["text"].encode()) for document in DOCUMENTS)
    assert found["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(nats / size / math.log(2), rel=1e-4)
    for sample, document in zip(found["samples"]["writing"], DOCUMENTS, strict=True):
        expected = generate(
            model,
            load_tokenizer("bytes"),
            document["question"],
            max_tokens=12,
            sampling=Sampling(temperature=0),
            stop=["\n"],
        )
        assert sample["resps"] == [[expected]]


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=argument) for argument in arguments]


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("piece", [3, 4096])
def test_likelihoods_are_those_of_a_plain_forward(family: str, piece: int) -> None:
    model = gss.build_model(small_config(family, vocab_size=257)).double().eval()
    lm = adapter.GSSLM(model=model, tokenizer=load_tokenizer("bytes"), batch_size=4, piece=piece)
    pairs = [(document["question"], choice) for document in DOCUMENTS for choice in document["choices"]]
    for (score, greedy), pair in zip(lm.loglikelihood(requests(*pairs), disable_tqdm=True), pairs, strict=True):
        expected, likeliest = plain(model, *pair)
        assert score == pytest.approx(expected, abs=1e-9)
        assert greedy == likeliest
    texts = [("x" * 50,), ("",), ("é",)]
    rolling = lm.loglikelihood_rolling(requests(*texts), disable_tqdm=True)
    assert rolling == pytest.approx([plain(model, "", text)[0] for (text,) in texts], abs=1e-9)


def test_greedy_continuations_are_known_as_such(model: gss.LanguageModel) -> None:
    lm = adapter.GSSLM(model=model, tokenizer=load_tokenizer("bytes"))
    model.embedding.weight.data[128:] = 0  # bytes of ASCII only, so that the text comes back as it was
    text = generate(model, load_tokenizer("bytes"), "ab", max_tokens=6, sampling=Sampling(temperature=0))
    (_, greedy), (_, other) = lm.loglikelihood(requests(("ab", text), ("ab", text + "\x00q")), disable_tqdm=True)
    assert greedy
    assert not other


def test_sampled_generation(model: gss.LanguageModel) -> None:
    lm = adapter.GSSLM(model=model, tokenizer=load_tokenizer("bytes"), max_gen_toks=5)
    sampled = lm.generate_until(
        requests(("ab", {"do_sample": True, "temperature": 1.0, "top_k": 5}), ("ab", {"until": ""})), disable_tqdm=True
    )
    expected = [
        generate(model, load_tokenizer("bytes"), "ab", max_tokens=5, sampling=sampling)
        for sampling in (Sampling(top_k=5), Sampling(temperature=0))
    ]
    assert sampled == expected


def test_cached_results(model: gss.LanguageModel, tmp_path: Path) -> None:
    lm = adapter.GSSLM(model=model, tokenizer=load_tokenizer("bytes"))
    cached = lm_eval.api.model.CachingLM(lm, str(tmp_path / "cache.db"))
    first = cached.loglikelihood(requests(("a", "b")))
    assert json.dumps(cached.loglikelihood(requests(("a", "b")))) == json.dumps(first)
    assert lm.tokenizer_name.startswith("gss-")


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("either a run folder", {}),
        ("either a run folder", {"run": "x", "model": 1}),
        ("not a run folder", {"run": "missing"}),
        ("batch_size must be", {"batch_size": "auto"}),
        ("piece must be", {"piece": 0}),
    ],
)
def test_bad_arguments(message: str, options: dict, model: gss.LanguageModel) -> None:
    given = {"model": model, "tokenizer": load_tokenizer("bytes")} if options.keys() & {"batch_size", "piece"} else {}
    with pytest.raises(ValueError, match=message):
        adapter.GSSLM(**given, **options)
