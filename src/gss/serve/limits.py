"""What a server allows: every number that bounds what one request, or all of them together, may take."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on requests. A request beyond one of them gets an answer that names it, and costs next to nothing."""

    body_bytes: int = 4 << 20
    """Largest body of a request (413)."""
    prompt_tokens: int = 131_072
    """Longest prompt, and most tokens of prompts times `n` that are echoed with logprobs (400)."""
    max_tokens: int = 4096
    """Most tokens that may be asked for (400)."""
    n: int = 16
    """Most continuations of one prompt (400)."""
    sequences: int = 64
    """Most continuations in one request: prompts times `n`, and no more than run and wait at a time (400)."""
    logprobs: int = 20
    """Most alternatives a token (400)."""
    stop: int = 8
    """Most stop strings (400)."""
    stop_characters: int = 256
    """Longest stop string (400)."""
    seconds: float = 300.0
    """Longest time from a request's arrival to its end (408)."""
    body_seconds: float = 30.0
    """Longest time that a body may take to arrive (408)."""
    queue: int = 256
    """Sequences that may wait for a place in the batch (429)."""
    connections: int = 2048
    """Connections at a time, those that wait included (503)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_none = getattr(self, field.name), field.name in ("queue", "logprobs", "stop")
            if not (value > 0 or (may_be_none and value == 0)):
                raise ValueError(
                    f"the limit {field.name} must be {'at least' if may_be_none else 'over'} 0, not {value}"
                )
