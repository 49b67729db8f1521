"""Single tokens as text: what a reader sees for one token of a list, apart from the text that it is part of."""

from gss.data import Tokenizer


class Surfaces:
    """Names of tokens by id, found once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}
        # A token's leading space is lost at a text's start: it is decoded after another one.
        anchor = tokenizer.encode("a").tolist()[-1:]
        self._anchor, self._before = anchor, len(tokenizer.decode(anchor))

    def __getitem__(self, token: int) -> str:
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._find(token)
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
