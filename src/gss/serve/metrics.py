"""Counts for Prometheus, in its text format: numbers that one thread writes and any may read."""

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
        """Count."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + amount

    def set(self, value: float, *labels: str) -> None:
        """Say what it is now."""
        self._values[labels] = value

    @property
    def value(self) -> float:
        """What it is now, where it has no labels."""
        return self._values[()]

    def lines(self) -> Iterator[str]:
        """Its part of the page."""
        with self._lock:
            values = list(self._values.items())
        yield from self._head()
        for held, value in values:
            named = ",".join(f'{name}="{text}"' for name, text in zip(self.labels, held, strict=True))
            shown = int(value) if value == int(value) else f"{value:.9g}"
            yield f"{self.name}{f'{{{named}}}' if named else ''} {shown}"

    def _head(self) -> tuple[str, str]:
        return f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"


class Histogram(Number):
    """How often a duration fell below each of some bounds."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        super().__init__("histogram", name, about)
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one."""
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._values[()] += seconds

    def lines(self) -> Iterator[str]:
        """Its part of the page."""
        with self._lock:
            counts, total = list(self._counts), self._values[()]
        yield from self._head()
        below = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], counts, strict=True):
            below += count
            yield f'{self.name}_bucket{{le="{bound}"}} {below}'
        yield from (f"{self.name}_sum {total:.9g}", f"{self.name}_count {below}")


class Metrics:
    """Everything that a server counts."""

    def __init__(self) -> None:
        def counter(name: str, about: str, labels: Sequence[str] = ()) -> Number:
            return Number("counter", f"gss_{name}_total", about, labels)

        self.requests = counter("requests", "Requests by route and status.", ("route", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.prompt_tokens_read = counter("prompt_tokens_read", "Of those, read by the model.")
        self.prompt_tokens_reused = counter("prompt_tokens_reused", "Of those, spared by states that were kept.")
        self.generated_tokens = counter("generated_tokens", "Tokens produced.")
        self.running = Number("gauge", "gss_running_sequences", "Sequences in the batch.")
        self.waiting = Number("gauge", "gss_waiting_jobs", "Prompts that wait or are being read.")
        self.cache_bytes = Number("gauge", "gss_prefix_cache_bytes", "Memory of states that are kept.")
        self.state_bytes = Number("gauge", "gss_state_bytes_per_sequence", "Memory of one new sequence's state.")
        self.step_seconds = Histogram("gss_step_seconds", "A token for every running sequence.", _STEPS)
        self.first_token_seconds = Histogram("gss_first_token_seconds", "From arrival to the first text.", _SECONDS)
        self.request_seconds = Histogram("gss_completion_seconds", "From arrival to the end.", _SECONDS)

    def page(self) -> str:
        """All of it, as Prometheus reads it."""
        return "\n".join(line for metric in vars(self).values() for line in metric.lines()) + "\n"
