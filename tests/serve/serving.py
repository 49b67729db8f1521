"""Models, runs and servers for the tests of serving."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gss
from gss.data import Tokenizer, load_tokenizer
from gss.generate import Sampling
from gss.serve.about import Limits
from gss.serve.engine import EngineThread, Job, Piece
from tests.comparing import stream

GREEDY = Sampling(temperature=0)
SMALL = {"width": 16, "depth": 2, "gate_width": 24, "channels": 4, "state_space.modes": 4}


def lively_model(preset: str = "gss-tiny", **sizes: Any) -> gss.LanguageModel:
    torch.manual_seed(0)
    return lively(gss.build_model(gss.preset(preset, **{"vocab_size": 257, **sizes})))


def lively(model: gss.LanguageModel) -> gss.LanguageModel:
    """An untrained model whose greedy text is not one letter again and again, and whose choices are no close calls.

    A fresh model mostly repeats its last token, since the head is the embedding. Layers that speak louder, and a head
    that reads what they say more sharply, give text that depends on everything before it. An end whose embedding is 0
    has a middling logit, never the likeliest of 257, so texts are as long as they are asked to be.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("output.weight", "output.bias")):
                parameter.mul_(30)
        model.embedding.weight[256].zero_()
    return model.eval()


def alone(model: gss.LanguageModel, prompt: str, tokens: int, **options: Any) -> list[int]:
    """What the model gives for a prompt with nothing beside it."""
    ids = [256, *prompt.encode()]
    return list(stream(model, ids, max_tokens=tokens, sampling=GREEDY, eos_id=256, **options))


def text_of(tokens: Sequence[int]) -> str:
    """The text of byte tokens."""
    return load_tokenizer("bytes").decode(tokens)


@contextmanager
def engine_of(model: gss.LanguageModel, tokenizer: Tokenizer | None = None, **options: Any) -> Iterator[EngineThread]:
    """A running engine."""
    engine = EngineThread(model, tokenizer or load_tokenizer("bytes"), **options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


class Asked:
    """A job and what has come of it."""

    def __init__(
        self, prompt: str | Sequence[int], max_tokens: int = 16, *, ignore_eos: bool = False, **options: Any
    ) -> None:
        ids = [256, *prompt.encode()] if isinstance(prompt, str) else prompt
        self.pieces: list[Piece] = []
        self._changed = threading.Condition()
        options = {"sampling": GREEDY, "logprobs": 0, "eos_id": None if ignore_eos else 256, **options}
        self.job = Job(prompt=ids, max_tokens=max_tokens, sink=self._take, **options)

    def _take(self, piece: Piece) -> None:
        with self._changed:
            self.pieces.append(piece)
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool] | None = None, seconds: float = 60) -> "Asked":
        """Wait for the job's end, or for something else."""
        with self._changed:
            assert self._changed.wait_for(until or (lambda: self.over), seconds), "it did not come"
        return self

    @property
    def over(self) -> bool:
        """Whether all continuations have ended, or the job has failed."""
        return sum(bool(p.finish) for p in self.pieces) == self.job.n or any(p.failure for p in self.pieces)

    def text(self, index: int = 0) -> str:
        """The text of a continuation so far."""
        return "".join(piece.text for piece in self.pieces if piece.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        """The tokens of a continuation so far."""
        return [score.token for piece in self.pieces if piece.index == index for score in piece.scores]

    def finish(self, index: int = 0) -> str | None:
        """Why a continuation ended."""
        return next((piece.finish for piece in self.pieces if piece.index == index and piece.finish), None)


@contextmanager
def app_of(model: gss.LanguageModel, limits: Limits | None = None, **options: Any) -> Iterator[Any]:
    """An app on a running engine, for requests inside this process."""
    limits = limits or Limits()
    names = ("rows", "piece", "cache_bytes")
    of_engine = {name: options.pop(name) for name in names if name in options}
    # Not above: engines alone are tested on machines without a web server.
    from gss.serve.app import create_app

    with engine_of(model, queue=limits.queue, **of_engine) as engine:
        yield create_app(engine, limits=limits, **{"name": "tiny", **options})


class Server:
    """`gss serve` as a process of its own, of a run or of the model in the box."""

    def __init__(self, run: Path | None, *options: str, descriptors: int | None = None) -> None:
        settings = ["--port", "0", "--device", "cpu", "--threads", "1", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gss", "serve", *([str(run)] if run else []), *settings],
            env={**{k: v for k, v in os.environ.items() if k != "GSS_API_KEY"}, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(_allow_descriptors, descriptors) if descriptors else None,
        )
        assert self.process.stdout is not None
        found = re.search(r"at (http://\S+)", self.process.stdout.readline())
        assert found, self.process.stderr.read() if self.process.stderr else ""
        self.url = found[1]
        self.port = int(self.url.rpartition(":")[2])

    def stop(self) -> tuple[int, str]:
        """End it; its exit status and what it said on stderr."""
        self.process.terminate()
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


class Bystanders:
    """How much of this machine's processor time is taken by programs that are not ours (this process and its children).

    What a measurement of wall-clock time says is only about a server while they take little.
    """

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._machine, self._spent = psutil.cpu_times(), self._ours()

    def _ours(self) -> dict[int, float]:
        """Seconds that each of our processes has used; those that have ended are in their parent's count."""
        me = self._psutil.Process()
        found = {}
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(self._psutil.Error):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system + times.children_user + times.children_system
        return found

    def share(self) -> float:
        """Of all processors since the start: 0.1 on two of them is a fifth of one."""
        now = self._psutil.cpu_times()
        total, idle = sum(now[:8]) - sum(self._machine[:8]), sum(now[3:5]) - sum(self._machine[3:5])
        ours = sum(self._ours().values()) - sum(self._spent.values())
        return max(0.0, 1 - (idle + ours) / total)


def _allow_descriptors(count: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@contextmanager
def serving(run: Path | None, *options: str, descriptors: int | None = None) -> Iterator[Server]:
    """A server, ended in the end."""
    server = Server(run, *options, descriptors=descriptors)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
