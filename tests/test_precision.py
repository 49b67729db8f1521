"""Text in bfloat16 is near float32's, in `generate` and in the engine, with either decoder; on a CPU float32 stays.

`pytest -m gpu tests/test_precision.py` on a CUDA device.
"""

import importlib.util
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import gss
import gss.decode.engine
from gss.decode import Decoder
from gss.decode.sampler import Sampler
from gss.generate import Sampling, read
from gss.precision import resolved, running
from gss.serve.about import Limits, describe
from gss.serve.engine import EngineThread
from tests.comparing import stream
from tests.conftest import ALL_FAMILIES, small_config
from tests.making import call, save_run
from tests.serve.serving import GREEDY, SMALL, Asked, engine_of, lively_model

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# Of logits of about unit spread: rounding moves them by up to 0.3 in these models, the state of another sequence by 2.
NEAR = 0.6


@torch.no_grad()
def expected_scores(model: gss.LanguageModel, prompt: Sequence[int], tokens: list[int]) -> torch.Tensor:
    """Float32's log-probabilities of greedy tokens, each of which must be almost the likeliest in its place."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.embedding.weight.device)
    logs = model(ids)[0][0, len(prompt) - 1 : -1].log_softmax(-1).cpu()
    own = logs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    assert (logs.amax(-1) - own).max() < NEAR
    return own


def check_engine(model: gss.LanguageModel, tokens: int, precision: str = "bf16") -> EngineThread:
    """Six sequences on four rows, of different lengths, so that they join and leave: each near float32's."""
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(6 + 13 * (i % 2))] for i in range(6)]
    with engine_of(model, rows=4, piece=16, interval=0, precision=precision) as engine:
        asked = [Asked(prompt, tokens * (1 + i % 3), ignore_eos=True) for i, prompt in enumerate(prompts)]
        for each in asked:
            engine.submit([each.job])
        for each in asked:
            assert each.wait().finish() == "length"
            scores = torch.tensor([score.logprob for piece in each.pieces for score in piece.scores])
            assert (scores - expected_scores(model, each.job.prompt, each.tokens())).abs().max() < NEAR
    return engine


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_bfloat16_on_the_cpu(family: str) -> None:
    model = gss.build_model(small_config(family, **{"attention.chunk": 8} if family == "gss-hybrid" else {}))
    prompt = torch.randint(0, 61, (21,)).tolist()
    tokens = []
    for token in stream(model, prompt, max_tokens=12, sampling=GREEDY, precision="bf16"):
        assert not torch.is_autocast_enabled("cpu")  # not in the caller's code
        tokens.append(token)
    expected_scores(model, prompt, tokens)


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_float32_on_the_cpu_is_the_models_own(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; and bfloat16 is not."""
    model, prompt = gss.build_model(small_config("gss")), [1, 2, 3, 4]
    seen: list[torch.Tensor] = []
    draw = Sampler.draw
    monkeypatch.setattr(
        Sampler, "draw", lambda self, logits, *rest: (seen.append(logits), draw(self, logits, *rest))[1]
    )
    tokens = list(stream(model, prompt, max_tokens=10, precision=precision, speculate=False))
    logits, state = read(model, torch.tensor([prompt]))
    steps, expected = Decoder(model, state), [logits]
    expected += [steps.step(torch.tensor([token])) for token in tokens[:-1]]
    assert torch.equal(torch.cat(seen), torch.cat(expected))
    seen.clear()
    list(stream(model, prompt, max_tokens=10, precision="bf16"))
    assert not torch.equal(torch.cat(seen).float(), torch.cat(expected))


@pytest.mark.parametrize("family", ["gss", "transformer"])
def test_the_engine_in_bfloat16_on_the_cpu(family: str) -> None:
    engine = check_engine(lively_model(f"{family}-tiny", **SMALL), tokens=6)
    assert isinstance(engine.core.decoder, Decoder)
    assert not torch.is_autocast_enabled("cpu")


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device")
def test_the_engine_on_the_graph_decoder_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from gss.decode.cuda import GraphDecoder

    monkeypatch.setattr(gss.decode.engine, "decoder", partial(GraphDecoder, block=4))
    engine = check_engine(lively_model(**SMALL), tokens=2)
    assert isinstance(engine.core.decoder, GraphDecoder)


@pytest.mark.gpu
@ON_GPU
@NEEDS_TRITON
@pytest.mark.parametrize("family", ["gss", "gss-hybrid"])
def test_bfloat16_on_the_device(family: str) -> None:
    """By default, as a CUDA graph, in `generate` and in the engine's own thread."""
    from gss.decode.cuda import GraphDecoder

    model, prompt = lively_model(f"{family}-tiny", **SMALL).cuda(), [256, *b"prompt"]
    assert resolved("auto", model) == "bf16"
    expected_scores(model, prompt, list(stream(model, prompt, max_tokens=80, sampling=GREEDY)))
    assert not torch.is_autocast_enabled("cuda")
    assert isinstance(check_engine(model, tokens=30, precision="auto").core.decoder, GraphDecoder)
    assert isinstance(check_engine(model, tokens=4, precision="fp32").core.decoder, Decoder)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("family", ["dss", "transformer"])
def test_bfloat16_on_the_device_without_a_graph(family: str) -> None:
    model = lively_model(f"{family}-tiny", **SMALL).cuda()
    tokens = list(stream(model, [256, *b"prompt"], max_tokens=10, sampling=GREEDY))
    expected_scores(model, [256, *b"prompt"], tokens)
    assert isinstance(check_engine(model, tokens=4).core.decoder, Decoder)


def test_a_model_of_another_precision_is_left_as_it_is() -> None:
    model = gss.build_model(small_config("gss")).double()
    precision = resolved("auto", model)
    with running(model, precision):
        assert not torch.is_autocast_enabled("cpu")
    assert list(stream(model, [1], max_tokens=3)) == list(stream(model, [1], max_tokens=3, precision="fp32"))


def test_facts_name_the_precision() -> None:
    vocabulary = gss.data.load_tokenizer("bytes")
    engines = [EngineThread(lively_model(**SMALL), vocabulary, precision=each) for each in ("bf16", "fp32")]
    half, full = (describe(engine, Limits(), name="x", preset=None, step=0) for engine in engines)
    assert (half["precision"], full["precision"]) == ("bfloat16", "float32")


def test_the_commands(tmp_path: Path) -> None:
    run = save_run(lively_model(**SMALL), tmp_path / "run")
    default, full, half = (
        call("generate", run, "--tokens", 8, "--device", "cpu", *more)
        for more in ([], ["--precision", "fp32"], ["--precision", "bf16"])
    )
    assert default == full
    assert half.strip()


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_unknown_precisions_are_refused(command: str) -> None:
    with pytest.raises(ValueError, match="precision must be auto, fp32 or bf16, not 'fp8'"):
        call(command, "no-run", "--precision", "fp8")
    model = lively_model(**SMALL)
    with pytest.raises(ValueError, match="precision must be"):
        list(stream(model, [1], max_tokens=1, sampling=Sampling(), precision="fp16"))
    with pytest.raises(ValueError, match="precision must be"):
        EngineThread(model, gss.data.load_tokenizer("bytes"), precision="half")
