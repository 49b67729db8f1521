"""What every route works with: an engine under its name, its limits, and what answers under way hold."""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from gss.data import Tokenizer
from gss.serve.about import Limits
from gss.serve.engine import EngineThread


class Surfaces(dict[int, str]):
    """Single tokens as text, by id: what a reader sees for one of a list, apart from the text that it is part of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        # A token's leading space is lost at a text's start: it is decoded after another one.
        self._anchor = tokenizer.encode("a").tolist()[-1:]
        self._before = len(tokenizer.decode(self._anchor))

    def __missing__(self, token: int) -> str:
        name = self[token] = self._find(token)
        return name

    def _find(self, token: int) -> str:
        if token == self._tokenizer.eos_id:
            return "<|end|>"
        if not 0 <= token < self._tokenizer.vocab_size:
            return f"token_id:{token}"
        text = self._tokenizer.decode([*self._anchor, token])[self._before :]
        if self._tokenizer.kind == "bytes" and token > 127:
            return f"bytes:\\x{token:02x}"  # as OpenAI writes tokens that are part of a character
        return text if text and "\ufffd" not in text else f"token_id:{token}"


@dataclass
class Service:
    """A model that is served."""

    engine: EngineThread
    name: str
    """The model's id for clients."""
    limits: Limits
    surfaces: Surfaces = field(init=False)
    scores: WeakKeyDictionary[object, int] = field(init=False, default_factory=WeakKeyDictionary)
    """Log-probabilities that answers under way hold, or will, at most. One that is forgotten holds none."""

    def __post_init__(self) -> None:
        self.surfaces = Surfaces(self.engine.tokenizer)
