"""Training lossless SentencePiece vocabularies: decoding gives back any text exactly.

Text is sampled from sources into a temporary file, and the library trains on it in a separate process. Spaces, newlines
and tabs are ordinary pieces, and rare characters become bytes. Only splits that files or folders name are known here:
keep other held-out text out of the sources.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gss.data.chunks import Skip
from gss.data.formats import Span, read_span
from gss.data.preparation import usable_cores
from gss.data.sources import SourceOptions, find_spans
from gss.data.tokenizer import DESCRIPTION, SPACE_MARK, SentencePieceTokenizer, load_tokenizer
from gss.io.files import require_name

MODELS = ("unigram", "bpe")
# Given explicitly, because the library's trainer reads lines without their ends.
_SYMBOLS = ["\n", "\n\n", "\t"]
_CONTROL = 2  # unknown (never used, as bytes stand in) and the end of a document
SMALLEST = 256 + _CONTROL + len(_SYMBOLS) + 1
_LINE = 4000  # bytes; the trainer leaves out lines longer than 4192
_TRAINER = "import json, sys, sentencepiece; sentencepiece.SentencePieceTrainer.train(**json.loads(sys.argv[1]))"
# What the trainer reports: how many pieces are left (unigram), how many there are (bpe).
_REPORTED = re.compile(r"EM sub_iter=\d+ size=(\d+)|(?:Added|Merged): freq=\d+ (?:size|merges)=(\d+)")

Progress = Callable[[str, float], None]  # the stage, and the share of it that is done


def train_tokenizer(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 30_000,
    model: str = "unigram",
    options: SourceOptions | None = None,
    max_bytes: int = 200_000_000,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = lambda stage, share: None,
) -> SentencePieceTokenizer:
    """Train a vocabulary on at most `max_bytes` of text, taken evenly from the train split of the sources."""
    if model not in MODELS:
        raise ValueError(f"the model must be one of {', '.join(MODELS)}, not {model!r}")
    if vocab_size < SMALLEST:
        raise ValueError(f"a vocabulary with bytes for rare characters needs at least {SMALLEST} ids, not {vocab_size}")
    target = Path(out)
    require_name(target)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        if not (target / DESCRIPTION).is_file():
            raise ValueError(f"{target} is not empty and holds no vocabulary: choose another --out")
        if not force:
            raise ValueError(f"{target} is not empty: choose another --out, or replace what is there with --force")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(prefix=target.name + ".", suffix=".tmp", dir=target.parent)
    with _ended_by_sigterm(), temporary as folder:
        work = Path(folder)
        _write_sample(sources, options or SourceOptions(), work / "sample.txt", max_bytes, progress)
        arguments = {
            "input": "sample.txt",  # relative, because the model stores the name
            "model_prefix": "trained",
            "vocab_size": vocab_size,
            "model_type": model,
            "normalization_rule_name": "identity",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "byte_fallback": True,
            "allow_whitespace_only_pieces": True,
            "split_digits": True,
            "user_defined_symbols": _SYMBOLS,
            "unk_id": 0,
            "eos_id": 1,
            "bos_id": -1,
            "pad_id": -1,
            # A small corpus may have too few pieces for the size asked for, which the library allows for unigram only.
            "hard_vocab_limit": model == "bpe",
            "character_coverage": 0.9999,
            "num_threads": threads or usable_cores(),
            "train_extremely_large_corpus": max_bytes > 1 << 30,
        }
        _run_trainer(arguments, work, progress)
        tokenizer = load_tokenizer(work / "trained.model")
        assert isinstance(tokenizer, SentencePieceTokenizer)
        if not tokenizer.lossless:
            raise ValueError(f"the trained vocabulary loses {', '.join(tokenizer.losses)}: please report this")
        tokenizer.save(work / "result")
        if target.exists():
            shutil.rmtree(target)
        os.rename(work / "result", target)
    return tokenizer


def _run_trainer(arguments: dict[str, Any], folder: Path, report: Progress) -> None:
    """Train in a process of its own, which a signal can end and whose messages say how far it is and what was wrong."""
    report("training", 0.0)
    command = [sys.executable, "-c", _TRAINER, json.dumps(arguments)]
    pipe: dict[str, Any] = {"stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    wanted, most, messages = arguments["vocab_size"], 0, []
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **pipe) as process:
        try:
            for line in process.stderr or ():
                messages.append(line.strip())
                if not (found := _REPORTED.search(line)):
                    continue
                if left := int(found[1] or 0):
                    most = max(most, left)
                    share = math.log(most / left) / math.log(most / wanted) if most > left > wanted else 0.0
                else:
                    share = int(found[2]) / wanted
                report("training", min(share, 0.99))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        reasons = [line for line in messages if "rror" in line or "high" in line] or ["no reason given"]
        reason = reasons[-1].rpartition("] ")[2]  # after the place in its source
        if needed := re.search(r"required_chars\. \d+ vs (\d+)", reason):
            reason = f"the characters of this text take {needed[1]} ids, so {wanted} are too few"
        raise ValueError(f"SentencePiece could not train this vocabulary: {reason}")
    report("training", 1.0)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise an exception, so that nothing is left behind."""
    settable = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number)) if settable else None
    try:
        yield
    finally:
        if settable:
            signal.signal(signal.SIGTERM, before)


def _write_sample(sources: Sequence[str], options: SourceOptions, path: Path, max_bytes: int, report: Progress) -> None:
    """Write every n-th line of the sources; n doubles, and half of the lines are dropped, whenever there are too many.

    The amount of text, which is unknown for compressed sources, therefore need not be known beforehand. Each line is
    taken once, because the trainer takes forever on text with repeated passages. A corpus's own held-out splits are
    left out; if splits are chosen by hash, some held-out documents are read.
    """
    found, named = find_spans(list(sources), options), ", ".join(sources)
    spans = [span for span in found if span.split in (None, "train")]
    if found and not spans:
        raise ValueError(
            f"all text in {named} is held out, as the names of its files or folders say: rename or move it"
        )
    total = max(1, sum(span.size for span in spans))
    taken: dict[bytes, None] = {}
    offered = size = read = 0
    keep_one_in = 1
    for span in spans:
        for line in _span_lines(span):
            offered += 1
            if offered % keep_one_in or line in taken:
                continue
            taken[line] = None
            size += len(line)
            while size > max_bytes:
                taken = dict.fromkeys(islice(taken, 1, None, 2))
                size, keep_one_in = sum(map(len, taken)), 2 * keep_one_in
        read += span.size
        report("reading", read / total)
    if not taken:
        raise ValueError(f"no text to train on in {named}, or no line within {max_bytes:,} bytes")
    path.write_bytes(b"".join(taken))


def _span_lines(span: Span) -> Iterator[bytes]:
    """The parts of a text that the trainer accepts: short, without tabs, line ends and its reserved characters.

    Anything else is left out silently; `prepare` counts and names it.
    """
    with suppress(Skip):
        for document in read_span(span):
            with suppress(Skip):
                for line in (line for chunk in document.chunks for line in re.split(r"[\n\t]", chunk.text())):
                    for start in range(0, len(line), _LINE // 4):
                        part = line[start : start + _LINE // 4]
                        if part.strip() and SPACE_MARK not in part and "\0" not in part:
                            yield part.encode("utf-8") + b"\n"
