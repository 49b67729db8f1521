"""Fills the marked parts of a hand-written Markdown page and leaves the prose around them alone.

<!-- results: models -->
whatever was here is replaced
<!-- end -->
"""

import re
from collections.abc import Callable, Mapping

_MARKED = re.compile(r"(<!-- results: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """The text with the parts between markers replaced; ValueError for an unknown marker."""

    def part(match: re.Match[str]) -> str:
        if match[2] not in parts:
            raise ValueError(f"there are no results named {match[2]!r}; there are: {', '.join(parts)}")
        return f"{match[1]}\n{parts[match[2]]().strip()}\n\n{match[3]}"

    if text.count("<!-- results:") != len(_MARKED.findall(text)):
        raise ValueError("a marker <!-- results: NAME --> is misspelt or has no <!-- end -->")
    return _MARKED.sub(part, text)
