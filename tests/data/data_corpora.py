"""What several data tests share: texts, and comparing folders."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gss.data import SourceOptions, load_tokenizer, open_dataset, prepare, read_manifest

WORDS = ["state", "space", "gate", "the", "a", "long", "range", "model", "été", "größer", "données", "文字", "of", "x"]


def make_text(seed: int, words: int) -> str:
    """Lines of words with indentation, blank lines and tabs; the same for the same seed."""
    chooser = random.Random(seed)
    lines, line = [], []
    for _ in range(words):
        line.append(chooser.choice(WORDS) + str(chooser.randrange(40)))
        if chooser.random() < 0.12:
            lines.append(chooser.choice(["", "", "    ", "\t"]) + " ".join(line))
            if chooser.random() < 0.2:
                lines.append("")
            line = []
    return f"document {seed}\n" + "\n".join([*lines, " ".join(line)]) + "\n"


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Files by their names, which may have folders in them."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, to compare two folders byte by byte."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def prepared(source: Path | str, out: Path, **options: Any) -> dict[str, dict[str, str]]:
    """The contents of a corpus of bytes, prepared with these options of its sources."""
    prepare([str(source)], out, load_tokenizer("bytes"), options=SourceOptions(**options), workers=1)
    return contents(out)


def contents(folder: Path) -> dict[str, dict[str, str]]:
    """Each split's documents by name, decoded."""
    found = {}
    for split in read_manifest(folder).splits:
        dataset = open_dataset(folder, split)
        tokenizer = dataset.tokenizer()
        found[split] = {document.name: tokenizer.decode(document.tokens) for document in dataset.documents()}
    return found
