"""The library as a person types it: every public name has an example that runs, and docs/api.md is made from them."""

import doctest
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gss
from gss.cli.text import generate_command
from gss.sampling import OPTIONS, Sampling, SamplingOptions
from tests.making import make_corpus

ROOT = Path(__file__).parents[1]
RUN = ROOT / "tests" / "fixtures" / "run"


def _documented() -> Iterator[tuple[str, Any]]:
    """Every public name, and the public functions of public classes."""
    yield "gss", gss
    for name in gss.__all__:
        value = getattr(gss, name)
        if callable(value):
            yield name, value
    yield from ((f"LM.{name}", getattr(gss.LM, name)) for name in ("generate", "stream", "read", "score"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = (f"document {number} has few words. " * 20 for number in range(10))
    return make_corpus(tmp_path_factory.mktemp("api"), texts, valid=0.3)


@pytest.mark.parametrize(("name", "value"), [*_documented()], ids=lambda value: value if isinstance(value, str) else "")
def test_the_examples_run(name: str, value: Any, corpus: Path, tmp_path: Path) -> None:
    names = {"gss": gss, "run": RUN, "corpus": corpus, "folder": tmp_path, "tokens": torch.randint(0, 257, (2, 20))}
    examples = doctest.DocTestParser().get_doctest(value.__doc__, names, name, None, None)
    assert examples.examples, f"gss.{name} has no example"
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples)
    assert result.failed == 0


def test_the_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "experiments" / "api_page.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run python experiments/api_page.py"


def test_sampling_options_are_offered_everywhere() -> None:
    schemas = pytest.importorskip("gss.serve.schemas")
    command = inspect.signature(generate_command).parameters
    assert list(SamplingOptions.__annotations__) == list(OPTIONS)
    for name, option in OPTIONS.items():
        assert schemas.CompletionRequest.model_fields[name].description == option.metadata["about"]
        assert command[name].annotation.__metadata__[0].help == option.metadata["about"]
    assert schemas.CompletionRequest().sampling() == Sampling()


def test_generation_is_checked_before_it_starts() -> None:
    lm = gss.load(RUN)
    assert re.fullmatch(r"<LM [a-z0-9-]+: [\d,]+ parameters, 257 ids, step \d+>", repr(lm))
    for options, message in (
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"precision": "fp8"}, "auto, fp32 or bf16"),
        ({"prompt": "", "state": lm.read("a")}, "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.stream(**options)
    with pytest.raises(TypeError, match="no option 'temprature' of generated text; did you mean temperature"):
        lm.generate("a", temprature=1)
    with pytest.raises(ValueError, match="cannot be combined with a recipe or settings"):
        gss.train(gss.TrainConfig(), "data", "out", steps=3)


def test_states_and_stop_strings_are_what_one_prompt_gives() -> None:
    lm = gss.load(RUN)
    whole = lm.generate("abc def", max_tokens=40, temperature=0)
    assert lm.generate(" def", state=lm.read("c", lm.read("ab")), max_tokens=40, temperature=0) == whole
    assert lm.generate(" def", state=lm.read("", lm.read("abc")), max_tokens=40, temperature=0) == whole
    mark = whole[7:9]
    assert lm.generate("abc def", max_tokens=40, temperature=0, stop=[mark]) == whole[: whole.index(mark)]
    assert lm.generate("abc def", max_tokens=40, temperature=0, stop=mark) == whole[: whole.index(mark)]
    model, tokenizer, step, preset = lm
    assert (model, tokenizer, step, preset) == (lm.model, lm.tokenizer, 12, "gss-hybrid-tiny")
    assert lm.score("").log_probability == 0
