"""Texts of the model in the box: books as prompts are typed, and what the model makes of prompts.

Project Gutenberg breaks lines at some 70 characters; who types a prompt does not. A model that has seen only broken
lines is lost after one that is longer, so some books are read a second time with the lines of each paragraph joined.
"""

import math
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gss
from experiments.box_card import LOOP_TIMES, LOOP_WORDS
from gss.data import Document

EVERY = 3
"""Every so many-th book is also read with its lines joined: a quarter of all tokens."""
SHORTEST = 50
"""A line that was broken because it was full has so many characters; verses and tables have fewer."""
LOOKED_AT = 3000
"""Tokens in the middle of a held-out book that are scored with and without their line breaks."""
PROMPT = "It was a dark and stormy night"
PROMPTS = (
    PROMPT,
    "The old man looked at",
    "She opened the letter and read",
    "In the year 1845,",
    '"My dear sir," said the captain,',
    "The king of France",
    "Once upon a time",
    "He had never before seen",
    "The ship was",
    "Chapter I",
    "On the morning of the third day",
    "There was no doubt that",
    "The doctor shook his head",
    "Two women were walking",
    "London, in those days,",
    "I was born in",
)
ROOT = Path(__file__).parents[1]
TRIAL_DOCUMENTS = 6
COOL, TOKENS = 0.6, 150
"""How the texts that are looked through for blank lines and loops are sampled."""


def unpack(books: Path | None, target: Path, trial: bool) -> Path:
    """Text in TARGET/train and TARGET/valid; only a few documents of each in a trial."""
    if books is not None and (books / "train").is_dir():
        return books
    if (target / "complete").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if books is None:
        documents = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
        for number, path in enumerate(documents):
            split = target / ("valid" if number % 4 == 0 else "train")
            split.mkdir(exist_ok=True)
            shutil.copyfile(path, split / f"{path.stem}.txt")
    else:
        archives = [*sorted(books.glob("books-train-*.tar.xz")), books / "books-valid.tar.xz"]
        if len(archives) < 2 or not archives[-1].is_file():
            raise ValueError(f"{books} holds no books-train-*.tar.xz and books-valid.tar.xz")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda archive: _unpack_one(archive, target, trial), archives))
    (target / "complete").touch()
    return target


def _unpack_one(path: Path, target: Path, trial: bool) -> None:
    def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        taken = 0
        for member in archive:
            if member.isfile() and member.name.endswith(".txt"):
                yield member
                taken += 1
                if trial and taken == TRIAL_DOCUMENTS:
                    return

    with tarfile.open(path) as archive:
        archive.extractall(target, members=members(archive), filter="data")


def unwrap(text: str) -> str:
    """The text with the lines of each paragraph of prose joined."""
    return "\n\n".join(map(_joined, text.split("\n\n")))


def _joined(paragraph: str) -> str:
    lines = paragraph.split("\n")
    flush = all(line and not line[0].isspace() for line in lines)
    prose = flush and all(len(line) >= SHORTEST for line in lines[:-1])
    return " ".join(lines) if prose else paragraph


def unwrap_books(folder: Path, target: Path) -> int:
    """Write every third book of a folder with its lines joined to another folder; gives how many there are."""
    target.mkdir(parents=True, exist_ok=True)
    books = sorted(folder.glob("*.txt"))[::EVERY]
    for book in books:
        joined = unwrap(book.read_text(encoding="utf-8"))
        (target / f"{book.stem}-unwrapped.txt").write_text(joined, encoding="utf-8")
    return len(books)


def line_breaks(lm: gss.LM, documents: Iterable[Document]) -> dict[str, float]:
    """Bits per byte on pieces of held-out books, as they are and with their lines joined."""
    bits, size = {"broken": 0.0, "joined": 0.0}, {"broken": 0, "joined": 0}
    for document in documents:
        middle = max(0, len(document.tokens) // 2 - LOOKED_AT // 2)
        text = lm.tokenizer.decode(document.tokens[middle : middle + LOOKED_AT].tolist())
        for kind, given in (("broken", text), ("joined", unwrap(text))):
            bits[kind] -= lm.score(given).log_probability / math.log(2)
            size[kind] += len(given.encode())
    return {kind: bits[kind] / size[kind] for kind in bits}


def samples(lm: gss.LM, tokens: int = TOKENS) -> dict[str, Any]:
    """How many continuations of PROMPTS run into blank lines or into a loop."""
    texts = [lm.generate(prompt, max_tokens=tokens, temperature=COOL, seed=i) for i, prompt in enumerate(PROMPTS)]
    return {"tokens": tokens, "temperature": COOL, **faults(texts)}


def faults(texts: Sequence[str]) -> dict[str, int]:
    """How many texts there are, how many of them run into blank lines, and how many into a loop."""
    blank = sum(re.search(r"(\n\s*){5}", text) is not None for text in texts)
    return {"texts": len(texts), "blank": blank, "loops": sum(map(in_a_loop, texts))}


def in_a_loop(text: str) -> bool:
    """Whether the same few words stand in the text again and again."""
    words = text.split()
    runs = Counter(tuple(words[i : i + LOOP_WORDS]) for i in range(len(words) - LOOP_WORDS + 1))
    return max(runs.values(), default=0) >= LOOP_TIMES
