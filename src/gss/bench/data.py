"""The data pipeline measured: tokenising beside the bare library, batching on one core, peak memory of a large file.

The text is the standard library of the Python at hand, as often as wanted; the vocabulary is the user's, or one that
is trained on it first. Everything is written to a temporary folder and removed.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gss.bench.measure import median_seconds
from gss.bench.results import Row
from gss.data import Batches, Lanes, Packed, Segments, Tokenizer, load_tokenizer, open_dataset, prepare
from gss.data.blocks import cut_blocks
from gss.data.readers import read_piece
from gss.data.recipes import RECIPES
from gss.data.sources import SourceOptions
from gss.data.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer
from gss.data.tokenizer_training import train_tokenizer

WAYS: dict[str, type[Segments] | type[Lanes] | type[Packed]] = {"segments": Segments, "lanes": Lanes, "packed": Packed}


def bench_data(
    *,
    tokenizer: str | None = None,
    megabytes: int = 48,
    length: int = 4096,
    batch_size: int = 32,
    file_gigabytes: float = 0.1,
    repeats: int = 3,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Measure everything in one run; speeds compare in it, whatever else the machine is doing."""
    with tempfile.TemporaryDirectory(prefix="gss-bench-") as folder:
        root = Path(folder)
        report("writing text")
        (root / "corpus").mkdir()
        text = b"".join(_standard_library())
        sizes = [_write_document(root / "corpus" / f"{n}.txt", text, 10**6, n) for n in range(megabytes)]
        report("making a vocabulary")
        vocabulary = _vocabulary(tokenizer, root)
        rows = _tokenising(root, vocabulary, sum(sizes), repeats, report)
        report("batching")
        rows += _batching(root / "prepared", length, batch_size)
        if file_gigabytes:
            report(f"preparing one file of {file_gigabytes} GB")
            _write_document(root / "long.txt", text, int(file_gigabytes * 1e9), 0)
            rows.append(_memory(root, vocabulary))
        return rows


def _standard_library() -> Iterator[bytes]:
    for piece in RECIPES["stdlib"](SourceOptions()):
        for fragment in read_piece(piece):
            for block in fragment.blocks:
                yield block.data


def _write_document(path: Path, text: bytes, size: int, number: int) -> int:
    """A document of about `size` bytes, from another place of the text for each number; returns its size."""
    written = 0
    position = text.find(b"\n", number * (1 << 20) % len(text)) + 1
    with open(path, "wb") as file:
        written += file.write(b"document %d\n" % number)
        while written < size:
            end = text.find(b"\n", min(len(text) - 1, position + min(size - written, 1 << 24))) + 1 or len(text)
            written += file.write(text[position:end])
            position = end % len(text)
    return written


def _vocabulary(spec: str | None, root: Path) -> Tokenizer:
    if spec is not None:
        return load_tokenizer(spec)
    return train_tokenizer([str(root / "corpus")], root / "vocabulary", vocab_size=8000, max_bytes=2_000_000)


def _tokenising(root: Path, tokenizer: Tokenizer, size: int, repeats: int, report: Callable[[str], None]) -> list[Row]:
    """`gss prepare` from files to finished shards beside the library's encode on texts in memory."""
    paths = sorted((root / "corpus").iterdir())
    texts = [block.data.decode() for path in paths for block in _blocks(path)]
    cores = len(os.sched_getaffinity(0))
    rows = []
    for workers in sorted({1, cores}):
        report(f"tokenising on {workers} core(s)")
        with _one_thread_unless(workers > 1):
            seconds = median_seconds(
                {
                    "ours": lambda workers=workers: prepare(  # type: ignore[misc]
                        [str(root / "corpus")], root / "prepared", tokenizer, workers=workers, force=True, valid=0
                    ),
                    "bare": bare_encoder(tokenizer, texts, workers),
                },
                repeats,
            )
        megabytes = size / 1e6
        bare = "the bare library's encode"
        what = f"{tokenizer.kind}, {workers} core(s)"
        rows += [
            Row(f"prepare, {what}", megabytes / seconds["ours"], "MB/s").beside(bare, megabytes / seconds["bare"]),
            Row(f"{bare}, {what}", megabytes / seconds["bare"], "MB/s"),
        ]
    return rows


def _blocks(path: Path) -> Iterator[Any]:
    with open(path, "rb") as stream:
        yield from cut_blocks(stream)


@contextmanager
def _one_thread_unless(parallel: bool) -> Iterator[None]:
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if parallel else "false"
    yield
    if before is None:
        del os.environ["TOKENIZERS_PARALLELISM"]
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = before


def bare_encoder(tokenizer: Tokenizer, texts: list[str], threads: int) -> Callable[[], Any]:
    """The library that a vocabulary comes from, called as its users do, with nothing of ours around it."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
        if threads == 1:
            return lambda: [processor.encode(text) for text in texts]
        return lambda: processor.encode(texts, num_threads=threads)
    if isinstance(tokenizer, JsonTokenizer):
        import tokenizers

        bare = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
        return lambda: [encoding.ids for encoding in bare.encode_batch(texts, add_special_tokens=False)]
    assert isinstance(tokenizer, ByteTokenizer)
    return lambda: [list(text.encode()) for text in texts]


def _batching(folder: Path, length: int, batch_size: int) -> list[Row]:
    """Tokens a second of each way to batch, on this thread alone."""
    dataset = open_dataset(folder, verify=False)
    rows = []
    for name, way in WAYS.items():
        batches = way(dataset, length, min(batch_size, len(dataset)))
        rate = tokens_per_second(batches, seconds=1.0)
        rows.append(Row(f"batching, {name}, L={length}", rate / 1e6, "million tokens/s"))
    return rows


def tokens_per_second(batches: Batches, seconds: float) -> float:
    """Tokens in rows, padding included, that `batch` delivers a second."""
    batches.batch(0)
    step, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        batches.batch(step)
        step += 1
    return step * batches.batch_size * batches.length / (time.perf_counter() - started)


def _memory(root: Path, tokenizer: Tokenizer) -> Row:
    """The most memory that preparing one long file takes, over all its processes."""
    path = root / "long.txt"
    size = path.stat().st_size
    tokenizer.save(root / "saved")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_prepare_long, args=(str(path), str(root / "long"), str(root / "saved")))
    process.start()
    peak = 0
    while process.is_alive():
        peak = max(peak, tree_bytes(process.pid or 0))
        process.join(timeout=0.02)
    if process.exitcode:
        raise ValueError("preparing the long file failed: is there room in the temporary folder?")
    workers = len(os.sched_getaffinity(0))
    return Row(f"peak memory, one file of {size / 1e9:.1f} GB, {workers} worker(s)", peak / 1e6, "MB")


def _prepare_long(path: str, out: str, tokenizer: str) -> None:
    prepare([path], out, load_tokenizer(tokenizer), valid=0)


def tree_bytes(process: int) -> int:
    """Resident memory of a process and its descendants, from /proc; 0 for one that has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        own = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return 0
    return own + sum(tree_bytes(int(child)) for child in children)
