"""Speculative decoding by lookup: the tokens that followed an earlier occurrence of the last few are the draft.

A draft costs almost nothing, and a decoder verifies it in one step. It keeps exactly the tokens that the sampler would
have drawn anyway, so the output is the same as without drafts. Code and mathematics gain most: they repeat themselves.
"""

from collections.abc import Iterable

_GRAM = 3
# Tokens in which drafts are looked up: enough for most files, few enough to index in a moment.
_HISTORY = 1 << 16
_LONGEST = 7


class Lookup:
    """The tokens of one row, up to the next one that it reads, and drafts of those after."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = [*tokens][-_HISTORY:]
        self._after: dict[tuple[int, ...], int] = {}  # the place after the last occurrence of each run
        self._indexed = _GRAM
        self._length = 2

    def extend(self, tokens: Iterable[int]) -> None:
        self._tokens += tokens

    def draft(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none if the last few have not occurred before."""
        tokens = self._tokens
        if len(tokens) > 2 * _HISTORY:  # forget the beginning
            self._tokens = tokens = tokens[-_HISTORY:]
            self._after, self._indexed = {}, _GRAM
        for end in range(self._indexed, len(tokens)):
            self._after[tuple(tokens[end - _GRAM : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        start = self._after.get(tuple(tokens[-_GRAM:]), len(tokens))
        period = len(tokens) - start  # if the text repeats itself, so does the draft
        return [tokens[start + place % period] for place in range(min(most, self._length) if period else 0)]

    def learn(self, drafted: int, kept: int) -> None:
        """Draft more next time if all tokens were kept, and less if not."""
        if drafted:
            self._length = min(_LONGEST, 2 * self._length + 1) if kept == drafted else kept + 1
