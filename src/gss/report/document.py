"""A report as plain data: sections of cards, tables, pictures and texts. How it looks is `page`'s and `markdown`'s."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gss.report.curves import Picture


@dataclass(frozen=True)
class Card:
    """A run in a few figures."""

    name: str
    colour: str
    """The name of the run's colour."""
    about: str
    facts: list[tuple[str, str]]
    """(what, how much)."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: list[Sequence[str]]
    quiet: frozenset[int] = frozenset()
    """Rows that are there to compare with."""
    words: bool = False
    """Columns hold words, not numbers."""


@dataclass(frozen=True)
class Sample:
    """Text that a model wrote."""

    name: str
    colour: str
    text: str


@dataclass(frozen=True)
class Note:
    """A sentence; something that is missing, as a rule."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A run's name over its part of a section."""

    name: str
    colour: str


Block = Card | Table | Picture | Sample | Note | Heading


@dataclass
class Section:
    """A heading and what is under it."""

    title: str
    intro: str = ""
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Document:
    """A report."""

    title: str
    about: str
    """When and with what it was made."""
    findings: list[str]
    """What the figures say, a sentence each."""
    sections: list[Section]
