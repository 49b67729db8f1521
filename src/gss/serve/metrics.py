"""Prometheus metrics in the text format. Each is written by one thread and may be read by any."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence

_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Number:
    """A counter or a gauge, with a value for each combination of its labels."""

    def __init__(self, kind: str, name: str, about: str, labels: Sequence[str] = ()) -> None:
        self.kind, self.name, self.about, self.labels = kind, name, about, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        self._lock = threading.Lock()

    def add(self, amount: float = 1, *labels: str) -> None:
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + amount

    def set(self, value: float) -> None:
        """Set the value of a number without labels."""
        self._values[()] = value

    @property
    def value(self) -> float:
        return self._values[()]

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} {self.kind}"
        with self._lock:
            samples = list(self._samples())
        for name, value in samples:
            yield f"{name} {int(value) if value == int(value) else f'{value:.9g}'}"

    def _samples(self) -> Iterator[tuple[str, float]]:
        for held, value in self._values.items():
            named = ",".join(f'{name}="{text}"' for name, text in zip(self.labels, held, strict=True))
            yield f"{self.name}{{{named}}}" if named else self.name, value


class Histogram(Number):
    """Counts durations by upper bound."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        super().__init__("histogram", name, about)
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._values[()] += seconds

    def _samples(self) -> Iterator[tuple[str, float]]:
        for number, bound in enumerate([*self._bounds, "+Inf"]):
            yield f'{self.name}_bucket{{le="{bound}"}}', sum(self._counts[: number + 1])
        yield f"{self.name}_sum", self.value
        yield f"{self.name}_count", sum(self._counts)


class Metrics:
    """Everything that a server counts."""

    def __init__(self) -> None:
        self.requests = Number("counter", "gss_requests_total", "Requests by route and status.", ("route", "status"))
        self.prompt_tokens = Number("counter", "gss_prompt_tokens_total", "Tokens of prompts.")
        self.prompt_tokens_read = Number("counter", "gss_prompt_tokens_read_total", "Of those, read by the model.")
        self.prompt_tokens_reused = Number("counter", "gss_prompt_tokens_reused_total", "Of those, from the cache.")
        self.generated_tokens = Number("counter", "gss_generated_tokens_total", "Tokens produced.")
        self.running = Number("gauge", "gss_running_sequences", "Sequences in the batch.")
        self.waiting = Number("gauge", "gss_waiting_jobs", "Prompts that wait or are being read.")
        self.cache_bytes = Number("gauge", "gss_prefix_cache_bytes", "Memory of the states in the prefix cache.")
        self.state_bytes = Number("gauge", "gss_state_bytes_per_sequence", "Memory of one new sequence's state.")
        self.step_seconds = Histogram("gss_step_seconds", "A token for every running sequence.", _STEPS)
        self.first_token_seconds = Histogram("gss_first_token_seconds", "From arrival to the first text.", _SECONDS)
        self.request_seconds = Histogram("gss_completion_seconds", "From arrival to the end.", _SECONDS)

    def page(self) -> str:
        """All metrics in Prometheus' text format."""
        return "\n".join(line for metric in vars(self).values() for line in metric.lines()) + "\n"
