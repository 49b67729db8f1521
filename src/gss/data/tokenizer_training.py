"""Training SentencePiece vocabularies that lose nothing: any text comes back as it was.

Text is sampled from sources into a temporary file, and the library trains in a process of its own whose log shows
its progress. Spaces, newlines and tabs are pieces like others and bytes stand in for rare characters. Knows nothing of
splits: held-out text should not be among the sources.
"""

import hashlib
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from gss.data.chunks import Chunk, Skip
from gss.data.formats import read_span
from gss.data.preparation import usable_cores
from gss.data.sources import SourceOptions, find_spans
from gss.data.tokenizer import DESCRIPTION, SPACE_MARK, SentencePieceTokenizer, load_tokenizer

MODELS = ("unigram", "bpe")
# Pieces of their own, as the library's trainer reads lines and never sees the ends of them.
_SYMBOLS = ["\n", "\n\n", "\t"]
_CONTROL = 2  # unknown (never used, as bytes stand in) and the end of a document
SMALLEST = 256 + _CONTROL + len(_SYMBOLS) + 1
_LINE = 4000  # bytes; the trainer leaves out longer lines than 4192

Progress = Callable[[str, float], None]  # the stage, and how much of it is done from 0 to 1


def train_tokenizer(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 30_000,
    model: str = "unigram",
    options: SourceOptions | None = None,
    max_bytes: int = 200_000_000,
    character_coverage: float = 0.9999,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> SentencePieceTokenizer:
    """Train a vocabulary on at most `max_bytes` of text, taken evenly from the train split of the sources."""
    if model not in MODELS:
        raise ValueError(f"a model is one of {', '.join(MODELS)}, not {model!r}")
    if vocab_size < SMALLEST:
        raise ValueError(
            f"a vocabulary with bytes for rare characters has at least {SMALLEST} pieces, not {vocab_size}"
        )
    target = Path(out)
    if target.exists() and any(target.iterdir()):
        if not (target / DESCRIPTION).is_file():
            raise ValueError(f"{target} is not empty and holds no vocabulary: choose another --out")
        if not force:
            raise ValueError(f"{target} is not empty: choose another --out, or replace what is there with --force")
    report = progress or (lambda stage, share: None)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(prefix=target.name + ".", suffix=".tmp", dir=target.parent)
    with _ended_by_sigterm(), temporary as folder:
        work = Path(folder)
        _write_sample(sources, options or SourceOptions(), work / "sample.txt", max_bytes, report)
        arguments = {
            "input": "sample.txt",  # from the folder where training runs: the names are kept in the model
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
            # A small corpus has fewer pieces than asked for: take what there is. The library allows it for unigram.
            "hard_vocab_limit": model == "bpe",
            "character_coverage": character_coverage,
            "num_threads": threads or usable_cores(),
            "train_extremely_large_corpus": max_bytes > 1 << 30,
        }
        _train_apart(arguments, vocab_size, work, report)
        tokenizer = load_tokenizer(work / "trained.model")
        assert isinstance(tokenizer, SentencePieceTokenizer)
        if not tokenizer.lossless:
            raise ValueError(f"the trained vocabulary loses {', '.join(tokenizer.losses)}: please report this")
        tokenizer.save(work / "result")
        if target.exists():
            shutil.rmtree(target)
        os.rename(work / "result", target)
    return tokenizer


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the work as an exception does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_sample(sources: Sequence[str], options: SourceOptions, path: Path, max_bytes: int, report: Progress) -> None:
    """Lines of the sources' text, taken evenly from all of it where there is more than wanted.

    A corpus's own held-out splits are left out; where splits go by hash, a few held-out documents are read.
    """
    spans = [span for span in find_spans(list(sources), options) if span.split in (None, "train")]
    total = sum(span.size for span in spans)
    read = 0
    with open(path, "wb") as file:
        sample = _Sample(file, max_bytes)
        for span in spans:
            try:
                for document in read_span(span):
                    for line in _document_lines(document.chunks):
                        sample.offer(line)
            except Skip:
                pass  # unusable for training, too; prepare counts and names it
            read += span.size
            report("reading", read / max(1, total))
    if not sample.size:
        raise ValueError(f"no text to train on in {', '.join(sources)}, or no line within {max_bytes} bytes")


class _Sample:
    """A file of lines, one in so many of all that are offered: whenever it is too large, every second one goes.

    Each line is taken once: the trainer takes for ever over text with repeated passages. How much text there will be
    need not be known, as it is not of compressed sources. More text than `max_bytes` fills the file at least by half.
    """

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._offered, self._keep_one_in = 0, 1
        self._taken: set[bytes] = set()  # digests of the lines in the file
        self.size = 0  # bytes

    def offer(self, line: str) -> None:
        """Take the line if it is its turn."""
        self._offered += 1
        if self._offered % self._keep_one_in:
            return
        data = line.encode("utf-8") + b"\n"
        digest = _line_digest(data)
        if digest not in self._taken:
            self._taken.add(digest)
            self.size += self._file.write(data)
            while self.size > self._max_bytes:
                self._thin()

    def _thin(self) -> None:
        self._keep_one_in *= 2
        self._file.flush()
        with open(self._file.name, "rb") as lines:
            self._file.seek(0)  # what is written back stays behind what was read
            self._taken.clear()
            for line in islice(lines, 1, None, 2):
                self._taken.add(_line_digest(line))
                self._file.write(line)
            self.size = self._file.truncate()


def _line_digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=8).digest()


def _document_lines(chunks: Iterable[Chunk]) -> Iterator[str]:
    """What the trainer can take of a document: lines without tabs, not too long, without its reserved characters."""
    try:
        for chunk in chunks:
            for line in re.split(r"[\n\t]", chunk.text()):
                for start in range(0, len(line), _LINE // 4):
                    part = line[start : start + _LINE // 4]
                    if part.strip() and SPACE_MARK not in part and "\0" not in part:
                        yield part
    except Skip:
        return


def _train_apart(arguments: dict[str, Any], vocab_size: int, work: Path, report: Progress) -> None:
    """Run the trainer in a process whose standard error goes to a file that is watched for progress."""
    log = work / "log.txt"
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(arguments, str(work)), daemon=True)
    report("training", 0.0)
    process.start()
    share = 0.0
    try:
        while process.is_alive():
            process.join(timeout=0.2)
            share = max(share, _share_done(log, vocab_size))
            report("training", share)
    finally:
        process.kill()
        process.join()
    if process.exitcode:
        last = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line or "high" in line]
        raise ValueError(f"SentencePiece could not train this vocabulary: {(last or ['no reason given'])[-1].strip()}")
    report("training", 1.0)


def _train(arguments: dict[str, Any], work: str) -> None:
    os.chdir(work)
    descriptor = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    import sentencepiece

    try:
        sentencepiece.SentencePieceTrainer.train(**arguments)
    except Exception as error:  # told to the parent through the log
        os.write(2, f"\nError: {error}\n".encode())
        os._exit(1)


def _share_done(log: Path, vocab_size: int) -> float:
    """How far training is: unigram shrinks a large vocabulary to the wanted size, bpe grows a small one."""
    if not log.is_file():
        return 0.0
    text = log.read_text(errors="replace")
    shrinking = [int(size) for size in re.findall(r"EM sub_iter=\d+ size=(\d+)", text)]
    if shrinking and shrinking[0] > vocab_size:
        wanted = math.log(shrinking[0] / vocab_size)
        return min(0.99, math.log(shrinking[0] / max(vocab_size, shrinking[-1])) / wanted)
    grown = re.findall(r"Added: freq=\d+ size=(\d+)", text)
    # Before that, each message is a little progress.
    return min(0.99, int(grown[-1]) / vocab_size) if grown else min(0.05, text.count("\n") / 1000)
